"""What a transport may lose, what its submitter died before and everything at once, and what such a loss costs."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
from redis import Redis

from holdfast.settings.types import PREFIX
from tests.crash.checker import excess_explained
from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged, sound
from tests.crash.scenarios.javascript import serve
from tests.crash.scenarios.submitters import PROGRAM
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.plain_http import PLAIN
from tests.support.stores import Home

FILLER = "tests.crash.programs.filler"
WORKERS = 2
POLL = 1.0  # seconds, and as much between two sweeps
SECONDS = 0.02  # what a job takes
AT_ONCE = "10"  # jobs a worker runs
PATIENCE = 60  # seconds for an answer of the API


def unannounced(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Submitters are killed between their commit and their push, with workers idle: what they stored runs all the same.

    Their jobs are of an unknown task: they end dead as soon as they are claimed.
    """
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home, poll="1h", defer_for="0s") as fleet:
        fleet.start_workers(WORKERS)
        for _ in range(kills):
            fault = f"announce.before:kill@{rng.randint(1, 9)}"
            process = fleet.start(PROGRAM, "blocking", "blocking-0", "0", HOLDFAST_FAULTS=fault)
            fleet.await_end(process, 60, f"{fault} to strike")
            report.expect(process.returncode == -signal.SIGKILL, f"{fault}: exit code {process.returncode}")
        stored = fleet.database.rows()
        report.figures |= {"kills": kills, "jobs": len(stored)}
        report.figures["seconds until the last ended"] = round(await_quiet(fleet, 120), 2)
        acknowledged = [job for line in fleet.lines("ack") for job in line["jobs"]]
        report.expect(len(stored) >= len(acknowledged) + kills, "a job that was not announced was not stored either")
        return sound(fleet, report)


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
        report.figures |= {"jobs": jobs, "lost_leases": times, "seconds": round(time.monotonic() - began, 2)}
        report.expect(all(row.state == "succeeded" for row in known.rows.values()), "a job did not succeed")
        return judged(fleet, known, report, excess_explained)


def delayed(folder: Path, home: Home, *, jobs: int, rounds: int, spare: float, seed: int) -> Report:
    """What a loss costs: Redis is emptied when half the jobs have ended, or a submitter or the API dies between its
    commit and its push, against the same without. Two poll intervals are allowed, beside what one round differs from
    the next, and ``spare`` seconds."""
    report = Report(figures={"seed": seed, "jobs": jobs, "rounds": rounds})
    settings = {"poll": f"{POLL}s", "sweep": f"{POLL}s", "concurrency": AT_ONCE, "lease": "30s", "heartbeat": "10s"}
    settings |= {"api_port": "0"}
    few = jobs // 5
    with Fleet(folder, home, **settings) as fleet, Redis.from_url(os.environ[f"{PREFIX}TRANSPORT_URL"]) as client:
        fleet.start_workers(WORKERS)
        whole, emptied, pushed, unpushed, posted, unposted = [], [], [], [], [], []
        for _ in range(rounds):
            whole.append(_drained(fleet, jobs, lambda: None))
            emptied.append(_drained(fleet, jobs, client.flushdb))
            pushed.append(_submitted_elsewhere(fleet, few))
            unpushed.append(_submitted_elsewhere(fleet, few, HOLDFAST_FAULTS="announce.before:kill@1"))
            api, address = serve(fleet, faults="announce.before:kill@2")
            posted.append(_posted(fleet, address, few))
            unposted.append(_posted(fleet, address, few))
            report.expect(api.wait(PATIENCE) == -signal.SIGKILL, f"the API ended with exit code {api.returncode}")
        _compare(report, "Redis emptied", whole, emptied, spare)
        _compare(report, "submitter killed before its push", pushed, unpushed, spare)
        _compare(report, "API killed before its push", posted, unposted, spare)
        known = facts(fleet, list(fleet.database.rows()))
        report.expect(len(known.rows) == rounds * (2 * jobs + 4 * few), f"{len(known.rows)} jobs were stored")
        report.expect(all(row.state == "succeeded" for row in known.rows.values()), "a job did not succeed")
        return judged(fleet, known, report)


def _drained(fleet: Fleet, jobs: int, halfway: Callable[[], object]) -> float:
    """Seconds from the submission of so many jobs until the last has ended; ``halfway`` something happens."""
    began = time.monotonic()
    submit(fleet, work(jobs, SECONDS))
    until(lambda: fleet.database.unended() <= jobs // 2, 60 + jobs / 20, "half of the jobs to end", pause=0.02)
    halfway()
    return _last_end(fleet, jobs) - began


def _submitted_elsewhere(fleet: Fleet, jobs: int, **environment: str) -> float:
    """Seconds until the last job has ended, from when a process began to submit them, which it may not survive."""
    process = fleet.start(FILLER, str(jobs), str(SECONDS), **environment)
    fleet.await_end(process, 60, "the jobs to be submitted")
    return _last_end(fleet, jobs) - float(fleet.lines("filling")[-1]["mono"])


def _posted(fleet: Fleet, address: str, jobs: int) -> float:
    """Seconds until the last job has ended, from when they were posted to the API, which may die before it answers."""
    began = time.monotonic()
    with suppress(httpx.TransportError):
        posted = [{"task": "crash.work", "payload": {"seconds": SECONDS}}] * jobs
        httpx.post(f"{address}/v1/jobs/batch", json={"jobs": posted}, timeout=PATIENCE, verify=PLAIN).raise_for_status()
    return _last_end(fleet, jobs) - began


def _last_end(fleet: Fleet, jobs: int) -> float:
    """When the last job ended, once they all have."""
    until(lambda: fleet.database.unended() == 0, 60 + jobs / 20, "the jobs to end", pause=0.05)
    return max((run.ended for run in fleet.runs() if run.ended is not None), default=0.0)


def _compare(report: Report, what: str, usual: Sequence[float], lossy: Sequence[float], spare: float) -> None:
    longer = statistics.median(lossy) - statistics.median(usual)
    allowed = 2 * POLL + max(usual) - min(usual) + spare
    report.expect(longer <= allowed, f"{what}: {longer:.2f} s longer, where {allowed:.2f} s are allowed")
    report.figures[what] = f"{statistics.median(lossy):.2f} s, else {statistics.median(usual):.2f} s: {longer:+.2f} s"
