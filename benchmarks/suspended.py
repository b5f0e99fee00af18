"""Suspended jobs, on any SQL store: CPU of an idle worker, and claims, beside a million jobs that sleep or wait.

The claims, of ten jobs each, find jobs that were enqueued last. The other store of a pair has no suspended jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import uvloop

from benchmarks.application import fill
from benchmarks.claims import BATCH_SIZE, WARM_UP, alternate_claims
from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.idle import watched

TITLE = "Jobs that sleep, or wait for signals, for three days"

Place = Callable[..., AbstractContextManager[str]]
"""Gives the URL of a new store with ``sleeping`` or ``receivers``, so many jobs, for as long as the context lasts."""

_KINDS = {"sleeping": "asleep", "receivers": "waiting for signals"}


def lines(plan: Plan, place: Place, server_cpu: Callable[[], float] | None = None) -> list[Line]:
    """For each kind of suspended jobs: a store with and a store without them, alternating."""
    return [line for kind in _KINDS for line in _compare(plan, place, kind, server_cpu)]


def _compare(plan: Plan, place: Place, kind: str, server_cpu: Callable[[], float] | None) -> list[Line]:
    suspended, claims = plan.size(1_000_000, 1000), plan.size(1200, 10)
    found = {
        "cpu": _line(f"idle worker, {suspended:,} {_KINDS[kind]}: CPU", "%"),
        "counted": _line(f"idle worker, {suspended:,} {_KINDS[kind]}: CPU of server", "%"),
        "p99": _line(f"claims, {suspended:,} {_KINDS[kind]}: p99", "ms"),
        "p50": _line(f"claims, {suspended:,} {_KINDS[kind]}: p50", "ms"),
    }
    with place(**{kind: suspended}) as large, place() as small:
        for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
            ours, theirs = (_watch(plan, url, server_cpu) for url in (large, small))
            for name in ("cpu", "counted"):
                found[name].add(ours[name], theirs[name])
        for _ in range(plan.rounds):
            for url in (large, small):
                uvloop.run(fill(url, BATCH_SIZE * (WARM_UP + claims)))
            of_large, of_small = uvloop.run(alternate_claims({large: "default", small: "default"}, claims))
            for name, percent in (("p99", 99), ("p50", 50)):
                found[name].add(percentile(of_large, percent), percentile(of_small, percent))
    found["counted"].target = None  # too coarse for a ratio: clock ticks of 10 ms
    if server_cpu is None:
        del found["counted"]
    return list(found.values())


def _line(what: str, unit: str) -> Line:
    return Line(what, unit, other="none suspended", target=times_at_most(1.2))


def _watch(plan: Plan, url: str, server_cpu: Callable[[], float] | None) -> dict[str, float]:
    """Returns CPU of an idle worker, and of its server, in per cent."""
    figures = watched(plan, server_cpu or (lambda: 0.0), "benchmarks.worker", url)
    return figures | {"counted": figures["counted"] * 100}
