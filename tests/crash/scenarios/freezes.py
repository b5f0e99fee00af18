"""SIGSTOP past the lease, and SIGCONT: what a worker does that slept through its own replacement."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Mapping, Set
from pathlib import Path

from tests.crash.checker import Facts
from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.load import slowness
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
    with Fleet(folder, home, lease=f"{LEASE}s", heartbeat="1s", sweep="500ms") as fleet:
        busy = (count + 1) * (LEASE + PAST + 1)
        batch = max(1, round(0.7 * busy * SLOTS / (9 * SHORT + LONG)))
        specs = [*work(9 * batch, SHORT, max_attempts=25), *work(batch, LONG, max_attempts=25)]
        rng.shuffle(specs)
        submitted = submit(fleet, specs)
        long = {job for job, (_, payload, _) in zip(submitted, specs, strict=True) if payload["seconds"] == LONG}
        fleet.start_workers(WORKERS)
        until(lambda: bool(_busy(fleet, long)), 60, "a worker to begin a long job")
        for _ in range(count):
            fleet.freeze(rng.choice(_busy(fleet, long) or fleet.living()), LEASE + PAST)
            time.sleep(rng.uniform(0.5, 1.0))  # awake long enough to be judged
        await_quiet(fleet, 90 + 2 * busy)
        known = facts(fleet, submitted)
        _woken(known, long, _recovered(fleet), report)
        report.figures |= {
            "jobs": len(submitted),
            "freezes": count,
            "executions": len(known.runs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "settlements refused": len(fleet.lines("refused")),
            "store troubles": len(fleet.lines("trouble")),
        }
        return judged(fleet, known, report)


def _busy(fleet: Fleet, long: Set[str]) -> list[subprocess.Popen[bytes]]:
    """Who has just begun a long job, which goes on after the sleep unless it is stopped."""
    lately = time.monotonic() - LONG / 2
    pids = {run.pid for run in fleet.runs() if run.job in long and run.ended is None and run.started > lately}
    return [process for process in fleet.living() if process.pid in pids]


def _recovered(fleet: Fleet) -> dict[tuple[str, int], float]:
    """When (monotonic) each lease that ran out was found and settled."""
    ahead = time.time() - time.monotonic()
    return {lease: at - ahead for lease, at in fleet.database.recovered().items()}


def _woken(known: Facts, long: Set[str], recovered: Mapping[tuple[str, int], float], report: Report) -> None:
    """Every handler whose job was taken away meanwhile ends soon after its process wakes; some had much left to do."""
    lost = unfinished = cancelled = 0
    within = CANCELLED_WITHIN * slowness()
    for freeze in known.frozen:
        for run in known.runs:
            asleep = run.pid == freeze.pid and run.started < freeze.since and (run.ended or 1e18) > freeze.since
            at = recovered.get((run.job, run.claims))
            if not asleep or at is None or at > freeze.until:
                continue
            lost += 1
            unfinished += run.job in long and freeze.since - run.started < LONG - 2 * CANCELLED_WITHIN
            cancelled += run.cancelled
            soon = run.ended is not None and run.ended <= freeze.until + within
            report.expect(soon, f"{run.job}: claim {run.claims} went on after its process woke without its lease")
    report.expect(unfinished > 0, "no frozen worker lost a job that would have gone on")
    report.figures |= {"taken away": lost, "with much left to do": unfinished, "cancelled on waking": cancelled}
