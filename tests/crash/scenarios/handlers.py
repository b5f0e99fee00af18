"""Handlers that block their event loop, and handlers that will not die."""

from __future__ import annotations

import time
from pathlib import Path

from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged, sound
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.load import slowness
from tests.support.stores import Home

TIMEOUT = 5.0  # seconds, of crash.stubborn: time to start ten processes and their children on a busy machine
_TRIES = 3


def spinning(folder: Path, home: Home, *, lease: float = 3.0) -> Report:
    """An ``async def`` that spins for three leases keeps its job; an idle worker beside it does not get it."""
    report = Report()
    with Fleet(folder, home, lease=f"{lease}s", heartbeat=f"{1000 * lease // 3:.0f}ms", sweep="200ms") as fleet:
        (spinner,) = submit(fleet, [("crash.spin", {"seconds": 3 * lease}, {})])
        others = submit(fleet, work(20, 0.1))
        fleet.start_workers(2)
        await_quiet(fleet, 120)
        known = facts(fleet, [spinner, *others])
        spins = [run for run in known.runs if run.job == spinner]
        row = known.rows[spinner]
        once = len(spins) == 1 and (row.state, row.claims) == ("succeeded", 1)
        report.expect(once, f"the spinner was executed {len(spins)} times: {row}")
        report.figures["leases"] = 3
        return judged(fleet, known, report)


def stubborn(folder: Path, home: Home, *, jobs: int = 1) -> Report:
    """A process task that ignores signals is dead within a second of its timeout, and so are its children.

    Half of the jobs need to have got as far as their handlers: on a busy machine a process may reach its timeout before
    it could write anything down. So where fewer have, as many again are tried, up to three times."""
    report = Report()
    submitted: list[str] = []
    lives: list[float] = []
    with Fleet(folder, home) as fleet:
        fleet.start_workers(1, HOLDFAST_APP="tests.crash.programs.stubborn:app")
        while 2 * len(lives) < jobs and len(submitted) < _TRIES * jobs:
            submitted += submit(fleet, [("crash.stubborn", {}, {"max_attempts": 1})] * jobs)
            while len(lives) < len(submitted) and (life := _life_after_timeout(fleet, len(lives))) is not None:
                lives.append(life)
        slowest = max(lives, default=0.0)
        await_quiet(fleet, 120)
        rows = fleet.database.rows()
        report.expect(2 * len(lives) >= jobs, f"{len(lives)} of {len(submitted)} stubborn processes were seen")
        report.expect(slowest <= 1.0 * slowness(), f"a stubborn process lived {slowest:.2f} s beyond its timeout")
        for job in submitted:
            row = rows[job]
            report.expect((row.state, row.attempts) == ("dead", 1), f"the stubborn job is {row}")
            timed_out = (row.error or "").startswith("timeout: ")
            report.expect(timed_out, f"the stubborn job died of something else than its timeout: {row}")
        report.figures |= {
            "jobs": len(submitted),
            "seen": len(lives),
            "slowest death after timeout s": round(slowest, 2),
        }
        return sound(fleet, report)


def _life_after_timeout(fleet: Fleet, number: int) -> float | None:
    """How long the ``number``-th stubborn process and its children lived beyond their timeout, in seconds; None if no
    such process was seen."""

    def started() -> bool:
        return len(fleet.lines("start")) > number

    until(lambda: started() or fleet.database.unended() == 0, 60, "the stubborn job to start or to end")
    if not started():
        return None
    line = fleet.lines("start")[number]
    family = [line["pid"], *line["children"]]
    until(lambda: not any(map(_alive, family)), 60, "the stubborn family to die", pause=0.01)
    return float(time.monotonic() - line["mono"] - TIMEOUT)


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
