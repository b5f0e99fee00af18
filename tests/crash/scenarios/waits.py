"""Signals, children and dependencies under workers that are killed: each is received, run or started once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast import Dependency, Holdfast, JobFilter, JobState
from holdfast.core.errors import Unavailable
from holdfast.core.models import NewJob
from tests.crash.fleet import LEASE, SWEEP, Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit
from tests.support.stores import Home

WORKERS, SLOTS = 3, 15
BETWEEN = 0.6  # seconds between two kills
SHORT = 1.0  # seconds: timeout of every tenth job
SENDERS = 8


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def signals(folder: Path, home: Home, *, count: int, kills: int, timeout: float, seed: int) -> Report:
    """Signals race waits, duplicates, timeouts and kills: each is received by one job, or kept."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        topics = [f"topic-{number}" for number in range(max(1, count // 10))]
        options = {"max_attempts": 25}
        submitted = submit(
            fleet,
            [
                (
                    "crash.wait",
                    {"topics": rng.choices(topics, k=2), "seconds": rng.choice([SHORT, *[timeout] * 9])},
                    options,
                )
                for _ in range(count // 2)
            ],
        )
        fleet.start_workers(WORKERS)
        sent = [(f"signal-{number}", rng.choice(topics), number) for number in range(count)]
        asyncio.run(_send_all(fleet, sent, kills, rng))
        await_quiet(fleet, 180 + 2 * timeout + kills * (LEASE + SWEEP))
        received, kept = asyncio.run(_read_signals(fleet.url, submitted))
        values = Counter(value for _, value in received)
        report.expect(max(values.values(), default=0) <= 1, f"received twice: {values.most_common(3)}")
        numbers = Counter([*values.elements(), *kept])
        report.expect(numbers == Counter(range(count)), f"{count - len(numbers)} of {count} signals are nowhere")
        for line in fleet.lines("got"):
            recorded = [value for job, value in received if job == line["job"]]
            got = [value for value in line["values"] if value is not None]
            report.expect(sorted(got) == sorted(recorded), f"{line['job']} got {got}, and {recorded} is recorded")
        report.figures |= {"signals": count, "received": len(received), "kept": len(kept), "kills": len(fleet.kills)}
        return judged(fleet, facts(fleet, submitted), report)


async def _send_all(fleet: Fleet, sent: Sequence[tuple[str, str, int]], kills: int, rng: random.Random) -> None:
    """Several senders send each signal, some of them twice, while workers are killed."""
    pending = list(sent)
    per_kill = max(1, len(sent) // (kills + 1))

    async def send(app: Holdfast) -> None:
        while pending:
            signal_id, topic, value = pending.pop()
            for _ in range(1 + (rng.random() < 0.2)):
                await _send(app, signal_id, topic, value)
            if kills and len(pending) % per_kill == 0 and len(fleet.kills) < kills:
                working = fleet.working()
                if working:
                    fleet.kill(rng.choice(working))
                fleet.keep_up(WORKERS)

    async with Holdfast(fleet.url) as app:
        await asyncio.gather(*[send(app) for _ in range(SENDERS)])


async def _send(app: Holdfast, signal_id: str, topic: str, value: int) -> None:
    while True:
        try:
            await app.signal(topic, value, id=signal_id)
        except Unavailable:
            await asyncio.sleep(0.1)
        else:
            return


async def _read_signals(url: str, jobs: Sequence[str]) -> tuple[list[tuple[str, int]], list[int]]:
    """The received signals with their jobs, from the records, and those that are kept."""
    async with Holdfast(url) as app:
        received = []
        for job in jobs:
            for step in await app.steps(job):
                record: Mapping[str, Any] = msgspec.json.decode(step.result or "{}")
                received += [(job, record["signal"])] if "signal" in record else []
        store = await app.open_store()
        return received, [int(each.value) for each in await store.workflow.read_signals(limit=1_000_000)]


# ── children ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def children(folder: Path, home: Home, *, parents: int, children: int, kills: int, seed: int) -> Report:
    """Parents wait for children while workers are killed: each child exists once, and each parent succeeds."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        options = {"max_attempts": 25}
        submitted = submit(
            fleet,
            [("crash.parent", {"children": children, "seconds": _seconds_of(parents * children, kills)}, options)]
            * parents,
        )
        fleet.start_workers(WORKERS)
        _kill_often(fleet, kills, rng)
        await_quiet(fleet, 120 + kills * (LEASE + SWEEP))
        found = asyncio.run(_read_children(fleet.url, submitted))
        for job, ids in found.items():
            report.expect(len(ids) == children, f"{job} has {len(ids)} children, not {children}")
        known = facts(fleet, [*submitted, *(child for ids in found.values() for child in ids)])
        succeeded = all(row.state == "succeeded" for row in known.rows.values())
        report.expect(succeeded, "a job with attempts left did not succeed")
        report.figures |= {"parents": parents, "children": len(known.rows) - parents, "kills": len(fleet.kills)}
        return judged(fleet, known, report)


def _seconds_of(jobs: int, kills: int) -> float:
    """The time of a job with which all of them last as long as the kills."""
    return 1.5 * kills * BETWEEN * SLOTS / jobs


def _kill_often(fleet: Fleet, kills: int, rng: random.Random, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Kills workers, until so many are dead or all work is done. ``meanwhile``: called between two kills."""
    for _ in range(kills):
        meanwhile()
        time.sleep(BETWEEN * rng.uniform(0.5, 1.5))
        working = fleet.working()
        if working:
            fleet.kill(rng.choice(working))
        fleet.keep_up(WORKERS)
        if not fleet.database.unended():
            return


async def _read_children(url: str, jobs: Sequence[str]) -> dict[str, list[str]]:
    async with Holdfast(url) as app:
        return {
            job: [each.job_id for each in (await app.read_waits(job)).dependencies if each.is_child] for job in jobs
        }


# ── fan-ins ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def fan_ins(
    folder: Path,
    home: Home,
    *,
    groups: int,
    members: int,
    kills: int,
    seed: int,
    direct: str | None = None,
    cut: Callable[[], object] = lambda: None,
) -> Report:
    """Many jobs wait each for many members, of which some die and are replayed, while workers are killed. Each starts
    once, behind the success of all its members.

    ``direct``: the URL for the test itself; ``cut``: cuts the connections of the fleet, between two kills.
    """
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home, direct=direct) as fleet:
        url = direct or fleet.url
        seconds = _seconds_of(groups * members, kills)
        graph = asyncio.run(_submit_groups(url, groups, members, seconds, rng))
        replayed: dict[str, list[float]] = {}
        fleet.start_workers(WORKERS)

        def meanwhile() -> None:
            cut()
            asyncio.run(_replay_dead(url, replayed))

        _kill_often(fleet, kills, rng, meanwhile)

        def over() -> bool:
            asyncio.run(_replay_dead(url, replayed))
            return fleet.database.unended() == 0 and not asyncio.run(_count_unsuccessful(url))

        until(over, 180 + groups * members / 100 + kills * (LEASE + SWEEP), "every group to succeed", pause=0.3)
        known = replace(facts(fleet, [job for pair in graph.items() for job in (pair[0], *pair[1])]), replayed=replayed)
        _check_order(report, graph, known.runs)
        report.figures |= {"groups": groups, "members": members, "replayed": len(replayed), "kills": len(fleet.kills)}
        return judged(fleet, known, report)


async def _submit_groups(
    url: str, groups: int, members: int, seconds: float, rng: random.Random
) -> dict[str, list[str]]:
    """Submits the groups, every second as a batch; the members of each last job."""
    graph: dict[str, list[str]] = {}
    async with Holdfast(url) as app:
        for number in range(groups):
            options: dict[str, Any] = {"max_attempts": 25}
            firsts: list[NewJob] = [
                app.draft_job("crash.member", {"seconds": seconds, "fails": rng.random() < 0.02}, **options)
                for _ in range(members)
            ]
            if number % 2:
                last = app.draft_job("crash.member", {}, **options)
                await app.enqueue_batch(firsts, on_success=last)
            else:
                last = app.draft_job("crash.member", {}, **options, after=[Dependency(job.id) for job in firsts])
                await app.enqueue_many([*firsts, last], batch_size=10_000)
            graph[last.id] = [job.id for job in firsts]
    return graph


async def _replay_dead(url: str, replayed: dict[str, list[float]]) -> None:
    """Replays the dead jobs of the tasks, and notes when: all their runs until then are of an earlier life."""
    async with Holdfast(url) as app:
        where = JobFilter(states=(JobState.DEAD,), tasks=("crash.member",))
        dead = [job.id for job in (await app.find(where, limit=500)).jobs]
        at = time.monotonic()
        for job, _ in (await app.replay(dead)).changed if dead else ():
            replayed.setdefault(job, []).append(at)


async def _count_unsuccessful(url: str) -> int:
    async with Holdfast(url) as app:
        return await app.count(JobFilter(states=(JobState.DEAD, JobState.CANCELLED)))


def _check_order(report: Report, graph: Mapping[str, Sequence[str]], runs: Sequence[Any]) -> None:
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for run in runs:
        first[run.job] = min(run.started, first.get(run.job, run.started))
        if run.ended is not None:
            last[run.job] = max(run.ended, last.get(run.job, 0.0))
    for job, members in graph.items():
        report.expect(job in first, f"{job} never started")
        late = [member for member in members if last.get(member, float("inf")) > first.get(job, 0.0)]
        report.expect(not late, f"{job} started before {len(late)} of its members had ended")
