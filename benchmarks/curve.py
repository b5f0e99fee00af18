"""The curve of latency, on any store: from the return of a submission to the start of its handler, at each rate.

Submissions are single and come at random gaps. One submitting process and one worker, then four of each; ``--full``
has the other pairs too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from benchmarks.harness import Line, Plan, at_most, percentile
from benchmarks.processes import children

RATES = {5: 60, 20: 160, 50: 300, 100: 500, 300: 1200, 1000: 3000, 5000: 10_000}
"""Submissions a second, and the number of jobs submitted at that rate."""
_PAIRS = ((1, 1), (4, 4))
_MORE_PAIRS = ((1, 4), (4, 1))
_WARMING, _WARM = 19, 20  # rate and number of the first jobs, which do not count
_LATE = 0.25  # of the time in which its jobs fall due: a later last return shows that the rate was not reached
_SETTLE = 1.0  # seconds for the jobs of one rate to start before the next begins


class Queue(NamedTuple):
    """Queue to measure. ``place``: opens an empty store and returns its address; ``worker``: module and arguments."""

    name: str
    place: Callable[[], AbstractContextManager[str]]
    worker: Callable[[str], tuple[str, ...]]


def run_curve(plan: Plan, ours: Queue, peer: Queue, limit: float) -> list[Line]:
    """Alternate: ours, the peer. ``limit``: the target of each p99 in milliseconds."""
    rates = {20: 4, 300: 4} if plan.quick else RATES
    pairs = _PAIRS[:1] if plan.quick else _PAIRS + (_MORE_PAIRS if plan.full else ())
    lines: list[Line] = []
    for submitters, workers in pairs:
        late = math.inf if plan.quick else _LATE
        measured = [
            [_measure(queue, submitters, workers, rates, late) for queue in (ours, peer)] for _ in range(plan.rounds)
        ]
        for rate in rates:
            lines += _lines(f"{submitters} to {workers}, {rate:,} a second", rate, measured, peer.name, limit)
    return lines


def _lines(
    title: str, rate: int, measured: list[list[dict[int, list[float]]]], peer: str, limit: float
) -> tuple[Line, Line]:
    middle = Line(f"{title}, p50", "ms", other=peer)
    worst = Line(f"{title}, p99", "ms", other=peer, target=at_most(limit))
    for our_delays, peer_delays in measured:
        for line, share in ((middle, 50), (worst, 99)):
            if rate in our_delays:
                line.ours.append(percentile(our_delays[rate], share))
            if rate in peer_delays:
                line.theirs.append(percentile(peer_delays[rate], share))
            if not line.ours:
                line.missing = "rate not reached"
    return middle, worst


def _measure(queue: Queue, submitters: int, workers: int, rates: dict[int, int], late: float) -> dict[int, list[float]]:
    """Milliseconds of each job, by rate. A start before the return took no time at all. Left out: rates at which not
    every job has started by the end, and those that the submitters did not reach."""
    with (
        queue.place() as store,
        children(workers, *queue.worker(store)) as working,
        children(submitters, "benchmarks.submitter", queue.name, store) as submitting,
    ):
        for each in working:
            each.say("go")
        time.sleep(0.5)
        returned: dict[int, float] = {}
        rate_of: list[int] = []
        reached: set[int] = set()
        for rate, jobs in ((_WARMING, _WARM), *rates.items()):
            share = max(1, jobs // submitters)
            began = time.monotonic()
            for each in submitting:
                each.say(json.dumps([rate / submitters, len(rate_of), share]))
                rate_of += [rate] * share
            answers = [each.heard() for each in submitting]
            for each in answers:
                returned |= dict(each["returned"])
            due = max(each["due"] for each in answers)
            if max(returned.values()) - due <= late * (due - began):
                reached.add(rate)
            time.sleep(_SETTLE)
        starts = {number: at for each in working for number, at, *_ in each.ask("stop")["starts"]}
    delays: dict[int, list[float]] = {rate: [] for rate in (_WARMING, *rates)}
    for number, at in returned.items():
        if number in starts:
            delays[rate_of[number]].append(max(0.0, starts[number] - at) * 1000)
    return {rate: delays[rate] for rate in rates if rate in reached and len(delays[rate]) == rate_of.count(rate)}
