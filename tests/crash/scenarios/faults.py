"""A process dies, or its store fails it, at every named point of the code."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from holdfast.core.fault_points import POINTS
from tests.crash.checker import excess_explained
from tests.crash.fleet import WORKER, Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitters import PROGRAM, judge_submitters
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.stores import Home

AT_A_STEP = tuple(sorted(point for point in POINTS if point.startswith(("step.", "signal.", "children."))))
"""Of workflows alone."""
SUBMITTING = tuple(sorted(point for point in POINTS if point.startswith("submit.")))
IN_AN_IMPORT = tuple(sorted(point for point in POINTS if point.startswith("import.")))
AT_THE_TRANSPORT = ("announce.before",)
"""Where there is one, and then only submitters come there for sure."""
AT_A_TICK = ("tick.before_write", "tick.after_write")
"""Of schedules, which have a scenario of their own."""
WORKING = tuple(
    sorted(
        POINTS - {*SUBMITTING, *IN_AN_IMPORT, *AT_THE_TRANSPORT, *AT_A_TICK, *AT_A_STEP},
        key=lambda point: (point.startswith("sweep."), "after" in point, point),
    )
)
"""The sweeper's last: it has something to do once others have died with leases in hand."""
AT_THE_STORE = (
    "claim.before",
    "settle.before",
    "settle.after",
    "heartbeat.before",
    "sweep.before_settle",
    "sweep.after_settle",
)
"""Where the error of a store can surface."""
MAX_HITS = {"heartbeat.before": 4, "sweep.before_settle": 1, "sweep.after_settle": 1}
"""How often a worker that dies soon comes to a point for sure; else 12."""


def killed_at(folder: Path, home: Home, *, points: Sequence[str] = WORKING, rounds: int = 1, seed: int) -> Report:
    """A worker at a time dies at each point; a healthy one finishes."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        submitted = submit(fleet, work(90 * len(points) * rounds, 0.1, max_attempts=25))
        first = fleet.start(WORKER)
        until(lambda: len(fleet.runs()) > 3, 60, "the first executions")
        fleet.kill(first)
        for _ in range(rounds):
            for point in points:
                if point.startswith("sweep."):
                    _leave_leases(fleet)
                fault = f"{point}:kill@{rng.randint(1, MAX_HITS.get(point, 12))}"
                process = fleet.start(WORKER, HOLDFAST_FAULTS=fault)
                fleet.await_end(process, 60, f"{fault} to strike")
                report.expect(process.returncode == -signal.SIGKILL, f"{fault}: exit code {process.returncode}")
                fleet.kill(process)
        fleet.start_workers(2)
        await_quiet(fleet, 120)
        known = facts(fleet, submitted)
        report.figures |= {
            "deaths": len(fleet.kills),
            "jobs": len(submitted),
            "executions": len(known.runs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "unstarted at deaths": sum(known.unstarted.values()),
        }
        return judged(fleet, known, report, excess_explained)


def _leave_leases(fleet: Fleet) -> None:
    """See to it that a sweeper finds some: the last to die may have settled all it had."""
    while not fleet.database.any_running():
        process = fleet.start(WORKER)
        until(partial(_more_than, fleet, len(fleet.runs())), 60, "more executions")
        fleet.kill(process)


def _more_than(fleet: Fleet, before: int) -> bool:
    return len(fleet.runs()) > before


def failed_at(folder: Path, home: Home, *, points: Sequence[str] = AT_THE_STORE, seed: int) -> Report:
    """The store fails a worker at every point, once each: it goes on by itself."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        submitted = submit(fleet, work(100, 0.1, max_attempts=25))
        first = fleet.start(WORKER)
        until(lambda: len(fleet.runs()) > 3, 60, "the first executions")
        fleet.kill(first)
        faults = ",".join(f"{point}:fail@{rng.randint(1, MAX_HITS.get(point, 6))}" for point in points)
        process = fleet.start(WORKER, HOLDFAST_FAULTS=faults)
        await_quiet(fleet, 120)
        report.expect(process.poll() is None, f"the worker ended with exit code {process.returncode}")
        report.figures |= {"points": len(points), "store troubles": len(fleet.lines("trouble"))}
        return judged(fleet, facts(fleet, submitted), report)


def submitters_killed_at(folder: Path, home: Home, *, rounds: int = 1, seed: int) -> Report:
    """A submitter with keys dies before and after its submission, and tries the same keys again."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        for point in SUBMITTING * rounds:
            first = str(len(fleet.lines("ack")))
            process = fleet.start(
                PROGRAM, "keyed", "keyed-0", first, HOLDFAST_FAULTS=f"{point}:kill@{rng.randint(1, 9)}"
            )
            fleet.await_end(process, 60, f"{point} to strike")
            report.expect(process.returncode == -signal.SIGKILL, f"{point}: exit code {process.returncode}")
        known = len(fleet.lines("ack"))
        last = fleet.start(PROGRAM, "keyed", "keyed-0", str(known))
        until(lambda: len(fleet.lines("ack")) > known + 5, 60, "the last submitter")
        last.kill()
        last.wait()
        judge_submitters(fleet, report)
        return report
