"""SIGSTOP past the lease, and SIGCONT: what a worker does that slept through its own replacement."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.crash.checker import Facts
from tests.crash.fleet import Fleet
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.stores import Home

LEASE = 3.0  # seconds
PAST = 1.5  # seconds of sleep beyond the lease
WORKERS, SLOTS = 3, 15
SHORT, LONG = 0.3, 4.0  # seconds of work
CANCELLED_WITHIN = 0.5  # seconds after waking


def freezes(folder: Path, home: Home, *, count: int, seed: int) -> Report:
    """One worker after the other sleeps through its leases while the others work on."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, lease=f"{LEASE}s", beat="1s", sweep="500ms") as fleet:
        busy = (count + 1) * (LEASE + PAST + 1)
        batch = max(1, round(0.7 * busy * SLOTS / (9 * SHORT + LONG)))
        specs = [*work(9 * batch, SHORT, max_attempts=25), *work(batch, LONG, max_attempts=25)]
        rng.shuffle(specs)
        submitted = submit(fleet, specs)
        fleet.start_workers(WORKERS)
        for _ in range(count):
            fleet.freeze(rng.choice(fleet.living()), LEASE + PAST)
            time.sleep(rng.uniform(0.5, 1.0))  # awake long enough to be judged
        await_quiet(fleet, 90 + 2 * busy)
        known = facts(fleet, submitted)
        _woken(known, report)
        report.figures |= {
            "jobs": len(submitted),
            "freezes": count,
            "executions": len(known.runs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "settlements refused": len(fleet.lines("refused")),
            "store troubles": len(fleet.lines("trouble")),
        }
        return judged(fleet, known, report)


def _woken(known: Facts, report: Report) -> None:
    """Every handler whose job was taken over meanwhile ends soon after its process wakes."""
    taken = {(run.job, run.claims): run.started for run in known.runs}
    lost = cancelled = 0
    for freeze in known.frozen:
        for run in known.runs:
            asleep = run.pid == freeze.pid and run.started < freeze.since and (run.ended or 1e18) > freeze.since
            later = taken.get((run.job, run.claims + 1))
            if not asleep or later is None or later > freeze.until:
                continue
            lost += 1
            cancelled += run.cancelled
            soon = run.ended is not None and run.ended <= freeze.until + CANCELLED_WITHIN
            report.expect(soon, f"{run.job}: claim {run.claims} went on after its process woke without its lease")
    report.figures |= {"taken over": lost, "cancelled on waking": cancelled}
