"""Schedules with competing tickers that are killed, frozen and given a wrong time: each tick makes exactly one job."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from holdfast import Holdfast
from holdfast.core.schedule import Schedule, iterate_ticks, tick_job
from holdfast.testing import Harness, TemporaryStore
from tests.crash.fleet import WORKER, Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet
from tests.support.stores import Home

SCHEDULES = 20
EVERY = 1.0  # seconds
SKEWS = (0, -86_400, 86_400, 3600, -3600)
"""Seconds that the clocks of workers on a server's store are off: there the server's counts."""
POINTS = ("tick.before_write", "tick.after_write")


def ticks(folder: Path, home: Home, *, count: int, workers: int, kills: int, seed: int) -> Report:
    """So many ticks of schedules that fall due together. One worker after the other dies or sleeps meanwhile."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        schedules = asyncio.run(_added(fleet.url, rounds := -(-count // SCHEDULES)))
        skewed = not fleet.url.startswith("sqlite:")
        for number in range(workers):
            fleet.start(WORKER, CRASH_SKEW=str(SKEWS[number % len(SKEWS)] if skewed else 0))
        pause = rounds * EVERY / (kills + 1)
        for number in range(kills):
            time.sleep(rng.uniform(0.5, 1.0) * pause)
            _hurt(fleet, rng, number)
            fleet.keep_up(workers)
        until(lambda: asyncio.run(_ended(fleet.url)), 60 + 3 * rounds * EVERY, "every schedule to end")
        await_quiet(fleet, 120)
        expected = [tick_job(each, tick).id for each in schedules for tick in _ticks(each, rounds)]
        known = facts(fleet, expected)
        for each in asyncio.run(_read(fleet.url)):
            left_out = each.missed + each.skipped
            report.expect(each.runs == rounds and not left_out, f"{each.name}: {each.runs} runs, {left_out} left out")
        report.figures |= {"ticks": len(expected), "jobs": len(known.rows), "kills": len(fleet.killed)}
        report.figures |= {"freezes": len(fleet.frozen), "store troubles": len(fleet.lines("trouble"))}
        return judged(fleet, known, report)


def _hurt(fleet: Fleet, rng: random.Random, number: int) -> None:
    """Kills a worker, or one more worker dies at a point of the ticker; each fifth time one sleeps past its lease."""
    if number % 5 == 4:
        fleet.freeze(rng.choice(fleet.await_working(1)), 3.0)
    elif number % 2:
        fault = f"{rng.choice(POINTS)}:kill@{rng.randint(1, 5)}"
        fleet.start(WORKER, HOLDFAST_FAULTS=fault)
    else:
        fleet.kill(rng.choice(fleet.await_working(1)))


async def _added(url: str, rounds: int) -> list[Schedule]:
    async with Holdfast(url) as app:
        job = app.draft_job("crash.work", {"seconds": 0.0}, max_attempts=25)
        options: dict[str, Any] = {"every": EVERY, "catch_up": 100, "max_runs": rounds}
        for number in range(SCHEDULES):
            await app.schedules.add(f"s-{number}", job, **options)
        return await app.schedules.find_all()


async def _read(url: str) -> list[Schedule]:
    async with Holdfast(url) as app:
        return await app.schedules.find_all()


async def _ended(url: str) -> bool:
    return all(each.next_us is None for each in await _read(url))


def _ticks(schedule: Schedule, rounds: int) -> list[int]:
    found = iterate_ticks(schedule, schedule.start_us)
    return [next(found) for _ in range(rounds)]


def months(folder: Path, *, days: int, seed: int) -> Report:
    """Whole workers in virtual time: every minute of the days around both clock changes of a year runs once."""
    report = Report(figures={"seed": seed})
    for change in (datetime(2031, 3, 30, tzinfo=UTC), datetime(2031, 10, 26, tzinfo=UTC)):
        begin = change - timedelta(days=days / 2)
        url = f"sqlite:///{folder / f'month-{change.month}.db'}"
        started = asyncio.run(_minutes(url, begin, days))
        expected = [begin + timedelta(minutes=n) for n in range(1, days * 24 * 60 + 1)]
        report.expect(started == expected, f"around {change.date()}: {len(started)} runs of {len(expected)}")
        local = [each.astimezone(ZoneInfo("Europe/Zurich")) for each in started]
        twice = len(local) - len({(each.date(), each.hour, each.minute) for each in local})
        report.figures[f"runs around {change.date()}"] = f"{len(started)}, local minutes twice {twice}"
        report.expect(twice == (60 if change.month == 10 else 0), f"{twice} local minutes ran twice")
    return report


async def _minutes(url: str, begin: datetime, days: int) -> list[datetime]:
    app = Holdfast(url)
    started: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        started.append(harness.now)

    async with Harness(app, url=TemporaryStore(url, lambda: None), start=begin) as harness:
        await app.schedules.add("minutely", tick.new_job(), cron="* * * * *", zone="Europe/Zurich")
        await harness.advance(days * 86_400)
    return started
