"""Workflows under workers that are killed and frozen: a step that was recorded is never run again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from tests.crash.checker import excess_explained
from tests.crash.fleet import LEASE, SWEEP, Fleet
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit
from tests.support.stores import Home

WORKERS, SLOTS = 4, 20


def workflows(
    folder: Path, home: Home, *, jobs: int, steps: int, kills: int, seed: int, pause: float = 0.6, freezes: bool = True
) -> Report:
    """Jobs of so many steps; one worker after the other is killed, ``pause`` seconds between two of them, or every
    fifth frozen for longer than its lease."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        seconds = max(0.04, 1.5 * kills * pause * SLOTS / (jobs * steps))
        options = {"max_attempts": 25}
        submitted = submit(fleet, [("crash.steps", {"steps": steps, "seconds": seconds}, options)] * jobs)
        fleet.start_workers(WORKERS)
        for number in range(kills):
            time.sleep(pause * rng.uniform(0.5, 1.5))
            victim = rng.choice(fleet.await_working(WORKERS - 1))
            if freezes and number % 5 == 4:
                fleet.freeze(victim, LEASE + 1)
            else:
                fleet.kill(victim)
            fleet.keep_up(WORKERS)
        await_quiet(fleet, 120 + jobs * steps * seconds / SLOTS + kills * (LEASE + SWEEP))
        known = facts(fleet, submitted)
        succeeded = all(row.state == "succeeded" for row in known.rows.values())
        report.expect(succeeded, "a workflow with attempts left did not succeed")
        again = _check_starts(report, fleet.lines("step"), submitted, steps)
        recorded = asyncio.run(_read_names(fleet.url, submitted))
        names = [f"step-{number}" for number in range(steps)]
        for job in submitted:
            report.expect(recorded[job] == names, f"{job} has the steps {recorded[job]}")
        report.figures |= {
            "workflows": jobs,
            "steps run again": again,
            "kills": len(fleet.kills),
            "freezes": len(fleet.frozen),
        }
        return judged(fleet, known, report, excess_explained)


def _check_starts(report: Report, lines: Sequence[Mapping[str, Any]], jobs: Sequence[str], steps: int) -> int:
    """A step begins only after the one before it is recorded: from then on that one must not begin again. Returns how
    many began again before they were recorded."""
    starts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in lines:
        starts[line["job"], line["number"]].append(line["mono"])
    for job in jobs:
        for number in range(steps - 1):
            first_of_next = min(starts[job, number + 1], default=float("inf"))
            late = [at for at in starts[job, number] if at > first_of_next]
            report.expect(not late, f"{job}: step {number} was run again after it was recorded")
        missing = [number for number in range(steps) if not starts[job, number]]
        report.expect(not missing, f"{job}: steps {missing} were never run")
    return sum(len(each) - 1 for each in starts.values())


async def _read_names(url: str, jobs: Sequence[str]) -> dict[str, list[str]]:
    async with Holdfast(url) as app:
        return {job: [step.name for step in await app.steps(job)] for job in jobs}
