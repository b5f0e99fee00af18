"""Limits under competing workers that are killed and frozen: never exceeded, and whole again soon after."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from holdfast import Holdfast, Job
from holdfast.core.models import Attempt
from tests.crash.checker import excess_explained
from tests.crash.fleet import LEASE, SWEEP, Fleet
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit
from tests.support.stores import Home

TENANTS = 8
AT_ONCE, OF_A_TENANT = 6, 2
RATE, BURST = 60, 5
"""Starts a second of the tenant that has a rate."""
SECONDS = 0.1

Span = tuple[int, int, str]
"""When an execution was claimed, when its end was written, in microseconds; and the tenant."""


def limits(folder: Path, home: Home, *, jobs: int, workers: int, kills: int, seed: int) -> Report:
    """A queue with a limit for all and one for each tenant, and a task with a rate; one worker after the other dies."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        asyncio.run(_limit(fleet.url))
        tenants = [f"tenant-{rng.randrange(TENANTS) if number % 3 else 0}" for number in range(jobs)]
        limited = {"queue": "limited", "max_attempts": 25}
        seconds = max(SECONDS, 1.5 * kills * 0.6 * AT_ONCE / jobs)
        specs = [("crash.work", {"seconds": seconds, "by": each}, limited) for each in tenants]
        rated = {"queue": "rated", "max_attempts": 25}
        specs += [("crash.work", {"seconds": 0.0, "by": "rated"}, rated) for _ in range(jobs)]
        submitted = submit(fleet, specs)
        fleet.start_workers(workers)
        for number in range(kills):
            time.sleep(rng.uniform(0.3, 0.9))
            victim = rng.choice(fleet.await_working(workers - 1))
            if number % 5 == 4:
                fleet.freeze(victim, 3.0)
            else:
                fleet.kill(victim)
            fleet.keep_up(workers)
        await_quiet(fleet, 120 + jobs * seconds / AT_ONCE + kills * (LEASE + SWEEP))
        spans = asyncio.run(_read_spans(fleet.url))
        _check(report, spans)
        known = facts(fleet, submitted)
        succeeded = all(row.state == "succeeded" for row in known.rows.values())
        report.expect(succeeded, "a job with attempts left did not succeed")
        report.figures |= {"jobs": len(submitted), "kills": len(fleet.kills), "freezes": len(fleet.frozen)}
        return judged(fleet, known, report, excess_explained)


def _check(report: Report, spans: dict[str, list[Span]]) -> None:
    limited = spans["limited"]
    most = _max_at_once(limited)
    report.expect(most <= AT_ONCE, f"{most} jobs of the limited queue ran at once")
    report.expect(most == AT_ONCE, f"only {most} jobs of the limited queue ever ran at once")
    of_tenants = defaultdict(list)
    for span in limited:
        of_tenants[span[2]].append(span)
    max_of_tenant = max(map(_max_at_once, of_tenants.values()))
    report.expect(max_of_tenant <= OF_A_TENANT, f"{max_of_tenant} jobs of a tenant ran at once")
    excess = _rate_excess([started for started, _, _ in spans["rated"]])
    report.expect(excess <= 0, f"in some window there were {excess:.1f} starts more than the rate allows")
    begun, over = min(each[0] for each in limited), max(each[1] for each in limited)
    used = sum(ended - started for started, ended, _ in limited) / max(1, over - begun)
    report.figures |= {"most at once": most, "most of a tenant": max_of_tenant, "used on average": round(used, 2)}


def _max_at_once(spans: Sequence[Span]) -> int:
    """A span that ends when another begins does not overlap it."""
    now = most = 0
    for _, change in sorted([(ended, -1) for _, ended, _ in spans] + [(started, 1) for started, _, _ in spans]):
        now += change
        most = max(most, now)
    return most


def _rate_excess(starts: Sequence[int]) -> float:
    """Starts in the worst window beyond a burst and what the rate allows in it."""
    worst, level, before = 0.0, 0.0, 0
    for at in sorted(starts):
        level = max(0.0, level - (at - before) * RATE / 1e6) + 1 if before else 1.0
        worst, before = max(worst, level), at
    return round(worst - BURST, 3)


async def _limit(url: str) -> None:
    async with Holdfast(url) as app:
        await app.limits.add("all", queue="limited", concurrency=AT_ONCE)
        await app.limits.add("tenant", queue="limited", by="args.by", concurrency=OF_A_TENANT)
        await app.limits.add("rated", queue="rated", rate=f"{RATE}/s", burst=BURST)


async def _read_spans(url: str) -> dict[str, list[Span]]:
    """Every execution that was not given back, by queue."""
    spans: dict[str, list[Span]] = defaultdict(list)
    async with Holdfast(url) as app:
        cursor: str | None = None
        while True:
            page = await app.find(limit=500, cursor=cursor)
            for job in page.jobs:
                attempts = await app.attempts(job.id) if job.attempts > 1 else []
                spans[job.queue] += _spans_of(job, attempts)
            cursor = page.cursor
            if cursor is None:
                return spans


def _spans_of(job: Job, attempts: Sequence[Attempt]) -> list[Span]:
    tenant = str(job.decode_arguments()["by"])
    executions = [(each.started_at_us, each.ended_at_us) for each in attempts] + [(job.started_at_us, job.ended_at_us)]
    return [(started, ended, tenant) for started, ended in executions if started is not None and ended is not None]
