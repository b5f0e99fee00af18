"""SIGTERM under load: rolling stops, and a second signal."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.crash.fleet import WORKER, Fleet, until
from tests.crash.report import Report, facts, judged, sound
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.load import slowness
from tests.support.stores import Home

GRACE = 1.0  # seconds
SHORT, LONG = 0.1, 2.5  # seconds of work: within the grace and beyond it
WORKERS = 3


def rolling_stops(folder: Path, home: Home, *, count: int, seed: int) -> Report:
    """Workers are stopped, one after the other, and replaced."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, grace=f"{GRACE}s", lease="10s", heartbeat="3s") as fleet:
        batch = max(4, count * 8)
        specs = [*work(10 * batch, SHORT), *work(batch, LONG)]
        rng.shuffle(specs)
        submitted = submit(fleet, specs)
        fleet.start_workers(WORKERS)
        stopped, held = [], 0
        for _ in range(count):
            time.sleep(rng.uniform(0.3, 0.8))
            process = rng.choice(fleet.living())
            held += len(fleet.database.held_by(process.pid))
            process.send_signal(signal.SIGTERM)
            stopped.append(fleet.await_end(process, GRACE + 60, "a worker to stop"))
            report.expect(process.returncode == 0, f"a stopped worker ended with exit code {process.returncode}")
            report.expect(not fleet.database.held_by(process.pid), "a stopped worker kept leases")
            fleet.await_ready({fleet.start(WORKER).pid})
        report.expect(held > 0, "no stopped worker held a job")
        await_quiet(fleet, 120)
        known = facts(fleet, submitted)
        counting = Counter(run.job for run in known.runs if not run.cancelled)
        for row in known.rows.values():
            report.expect(
                row.attempts == counting[row.id] == 1, f"{row} was executed {counting[row.id]} times to its end"
            )
        report.figures |= {
            "jobs": len(submitted),
            "stops": count,
            "released while running": sum(run.cancelled for run in known.runs),
            "slowest stop s": round(max(stopped), 2),
        }
        return judged(fleet, known, report)


def second_signal(folder: Path, home: Home) -> Report:
    """The second SIGTERM does not wait for the grace."""
    report = Report()
    with Fleet(folder, home, grace="60s") as fleet:
        (job,) = submit(fleet, work(1, 60))
        process = fleet.start(WORKER)
        until(lambda: len(fleet.runs()) == 1, 60, "the job to start")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # `timeout` and others signal a program and its group: one burst
        until(lambda: "stopping" in fleet.kinds(), 60, "the worker to hear the first signal")
        time.sleep(1.5)
        report.expect(process.poll() is None, "the first signals did not wait for the running job")
        process.send_signal(signal.SIGTERM)
        seconds = fleet.await_end(process, 60, "the worker to stop")
        row = fleet.database.rows()[job]
        report.expect(process.returncode == 0, f"exit code {process.returncode}")
        report.expect(seconds < 3 * slowness(), f"the second signal took {seconds:.1f} s")
        report.expect((row.state, row.attempts) == ("queued", 0), f"the job was not released: {row}")
        report.figures["seconds"] = round(seconds, 2)
        return sound(fleet, report)
