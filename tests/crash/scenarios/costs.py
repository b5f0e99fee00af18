"""What a kill costs: the attempts it charges, and the executions it repeats, while jobs take no time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.crash.checker import excess_explained
from tests.crash.fleet import Fleet, Kill, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.stores import Home

CONCURRENCY = (1, 10)
"""In turn: each kill is of a worker of its own."""
BACKLOG = 2000  # jobs, more than a worker claims at once
MAX_STARTED = 400  # jobs that a worker begins before it is killed
STARTS_WITHIN, QUIET_WITHIN = 30.0, 120.0  # seconds


def last_attempts(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Jobs with one attempt: a kill ends no more of them dead than the worker runs at once."""
    return _cost(folder, home, kills=kills, seed=seed, max_attempts=1, bounded=True)


def unprefetched(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Workers without ``prefetch``: a kill charges, and repeats, no more jobs than the worker runs at once."""
    return _cost(folder, home, kills=kills, seed=seed, max_attempts=25, bounded=True, prefetch="false")


def usual(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Workers as they are by default: what a kill costs is only measured."""
    return _cost(folder, home, kills=kills, seed=seed, max_attempts=25, bounded=False)


def _cost(
    folder: Path, home: Home, *, kills: int, seed: int, max_attempts: int, bounded: bool, **settings: str
) -> Report:
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, **settings) as fleet:
        submitted: list[str] = []
        charged: dict[int, list[Kill]] = {concurrency: [] for concurrency in CONCURRENCY}
        for turn in range(kills):
            concurrency = CONCURRENCY[turn % len(CONCURRENCY)]
            ended = len({line["job"] for line in fleet.lines("end")})
            submitted += submit(fleet, work(BACKLOG - len(submitted) + ended, 0.0, max_attempts=max_attempts))
            worker = fleet.start("tests.crash.programs.worker", HOLDFAST_CONCURRENCY=str(concurrency))
            fleet.await_ready({worker.pid})
            enough = rng.randint(1, MAX_STARTED)
            until(_started(fleet, worker.pid, enough), STARTS_WITHIN, f"{enough} jobs to start", pause=0.001)
            charged[concurrency].append(fleet.kill(worker))
        fleet.start_workers(1)
        await_quiet(fleet, QUIET_WITHIN)
        known = facts(fleet, submitted)
        dead = {row.id for row in known.rows.values() if row.state == "dead"}
        begun = {(run.job, run.claims) for run in known.runs}
        for concurrency, found in charged.items():
            held = [len(kill.held) for kill in found]
            again = [sum(lease in begun for lease in kill.held) for kill in found]
            ended_by = [sum(job in dead for job, _ in kill.held) for kill in found]
            report.expect(
                not bounded or max(held, default=0) <= concurrency,
                f"a kill cost {max(held, default=0)} jobs an attempt at concurrency {concurrency}",
            )
            report.figures |= {
                f"concurrency {concurrency}: attempts charged, mean and most": _spread(held),
                f"concurrency {concurrency}: of them had started, mean and most": _spread(again),
                f"concurrency {concurrency}: jobs dead, mean and most": _spread(ended_by),
            }
        held_by_killed = {job for kill in fleet.kills for job, _ in kill.held}
        report.expect(dead <= held_by_killed, "a job died that no killed worker held")
        report.expect(max_attempts == 1 or not dead, "a job with attempts left died")
        report.figures |= {"jobs": len(submitted), "kills": len(fleet.kills), "dead": len(dead)}
        return judged(fleet, known, report, excess_explained)


def _started(fleet: Fleet, pid: int, enough: int) -> Callable[[], bool]:
    return lambda: sum(line["pid"] == pid for line in fleet.lines("start")) >= enough


def _spread(values: list[int]) -> str:
    return f"{sum(values) / max(1, len(values)):.1f} {max(values, default=0)}"
