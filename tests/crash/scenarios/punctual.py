"""Jobs due at random moments, and several workers: each job once, none early, few late, and the work shared out."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.crash.fleet import Fleet
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import Spec, await_quiet, submit
from tests.support.load import percentile
from tests.support.stores import Home

LEAD = 1.0
"""Seconds until the first moment a job may be due: by then all are stored, and every worker knows of them."""


def punctual(
    folder: Path, home: Home, *, jobs: int, within: float, workers: int, late: float, busiest: float, seed: int
) -> Report:
    """So many jobs due within so many seconds. 99 % of them start at most ``late`` seconds after their moment, and no
    worker runs more than ``busiest`` times its share."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home, lease="30s", heartbeat="10s", concurrency="1") as fleet:
        fleet.start_workers(workers)
        begin = datetime.now(UTC) + timedelta(seconds=LEAD + jobs / 2000)
        moments = [begin + timedelta(seconds=rng.uniform(0, within)) for _ in range(jobs)]
        specs: list[Spec] = [("crash.work", {"seconds": 0.0}, {"run_at": moment}) for moment in moments]
        submitted = submit(fleet, specs)
        due = {job: moment.timestamp() for job, moment in zip(submitted, moments, strict=True)}
        await_quiet(fleet, within + 60)
        known = facts(fleet, submitted)
        executed = Counter(run.job for run in known.runs)
        report.expect(executed == dict.fromkeys(submitted, 1), "a job was not executed exactly once")
        lateness = [run.started_wall - due[run.job] for run in known.runs]
        report.expect(min(lateness) >= 0, f"a job started {-min(lateness):.6f} s early")
        p99 = percentile(lateness, 0.99)
        report.expect(p99 <= late, f"1 % of the jobs started more than {p99:.3f} s late")
        most = max(Counter(run.pid for run in known.runs).values()) * workers / jobs
        report.expect(most <= busiest, f"a worker ran {most:.2f} times its share")
        report.figures |= {
            "jobs": jobs,
            "workers": workers,
            "median lateness ms": round(1000 * percentile(lateness, 0.5), 1),
            "p99 lateness ms": round(1000 * p99, 1),
            "latest ms": round(1000 * max(lateness), 1),
            "busiest": f"{most:.2f} × the mean",
        }
        return judged(fleet, known, report)
