"""What a transport may lose: an announcement that its submitter died before, and everything at once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from redis import Redis

from holdfast.setting import PREFIX
from tests.crash.checker import excess_explained
from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitters import PROGRAM
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.stores import Home

WORKERS = 2


def unannounced(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Submitters are killed between their commit and their push, with workers idle: what they stored runs all the same.

    Their jobs are of a task nobody has: they end dead as soon as they are claimed.
    """
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, poll="1h", unknown_task="dead") as fleet:
        fleet.start_workers(WORKERS)
        for _ in range(kills):
            fault = f"announce.before:kill@{rng.randint(1, 9)}"
            process = fleet.start(PROGRAM, "blocking", "blocking-0", "0", HOLDFAST_FAULTS=fault)
            fleet.await_end(process, 20, f"{fault} to strike")
            report.expect(process.returncode == -signal.SIGKILL, f"{fault}: exit code {process.returncode}")
        stored = fleet.database.rows()
        report.figures |= {"kills": kills, "jobs": len(stored)}
        report.figures["seconds until the last ended"] = round(await_quiet(fleet, 60), 2)
        acknowledged = [job for line in fleet.lines("ack") for job in line["jobs"]]
        report.expect(len(stored) >= len(acknowledged) + kills, "a job that was not announced was not stored either")
        return report


def emptied(folder: Path, home: Home, *, jobs: int, times: int, seed: int) -> Report:
    """Every key of the transport is deleted, again and again, while workers are killed and jobs run."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, poll="1h") as fleet, Redis.from_url(os.environ[f"{PREFIX}TRANSPORT_URL"]) as client:
        keys = [os.environ[f"{PREFIX}TRANSPORT_{name}"] for name in ("KEY", "DEAD_KEY")]
        fleet.start_workers(WORKERS)
        submitted = submit(fleet, work(jobs, 0.02, max_attempts=25))
        began = time.monotonic()
        for _ in range(times):
            time.sleep(rng.uniform(0.2, 0.6))
            for key in keys:
                client.delete(key, *client.scan_iter(match=f"{key}@*"))
            fleet.kill(rng.choice(fleet.await_working(1)))
            fleet.keep_up(WORKERS)
        until(lambda: fleet.database.unended() == 0, 60 + jobs / 50, "the jobs to end", pause=0.1)
        known = facts(fleet, submitted)
        report.figures |= {"jobs": jobs, "losses": times, "seconds": round(time.monotonic() - began, 2)}
        report.expect(all(row.state == "succeeded" for row in known.rows.values()), "a job did not succeed")
        return judged(fleet, known, report, excess_explained)
