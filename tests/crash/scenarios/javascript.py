"""JavaScript workers beside Python ones on the same queue: one of them is killed in the middle, one is frozen."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from tests.crash.fleet import ROOT, START_SECONDS, Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.node import NODE
from tests.support.stores import Home

SCRIPT = ROOT / "tests" / "crash" / "programs" / "worker.mjs"
LEASE = 3  # seconds
PAST = 2.0  # seconds of sleep beyond the lease
SLOTS = 5  # of each worker
SPAN = 0.5  # seconds of work, on average


def javascript(folder: Path, home: Home, *, jobs: int, seed: int) -> Report:
    """Three JavaScript workers and two Python ones share the jobs. Each job succeeds once, despite deaths and sleep."""
    report, rng = Report(figures={"seed": seed, "jobs": jobs}), random.Random(seed)
    with Fleet(folder, home, lease=f"{LEASE}s", heartbeat="1s", sweep="500ms", api_port="0") as fleet:
        specs = [each for _ in range(jobs) for each in work(1, rng.uniform(0, 2 * SPAN), max_attempts=25)]
        _, address = serve(fleet)
        scripts = [_start(fleet, address) for _ in range(3)]
        fleet.await_ready({process.pid for process in scripts})
        fleet.start_workers(2)
        submitted = submit(fleet, specs)
        _await_share(fleet, scripts, jobs // 10)
        fleet.kill(scripts[0])
        fleet.freeze(scripts[1], LEASE + PAST)
        await_quiet(fleet, 120 + 2 * jobs * SPAN)
        for process in scripts[1:]:
            process.terminate()
            fleet.await_end(process, START_SECONDS, "a JavaScript worker to leave")
            report.expect(process.returncode == 0, f"a JavaScript worker ended with exit code {process.returncode}")
        known = facts(fleet, submitted)
        theirs = [run for run in known.runs if run.pid in {process.pid for process in scripts}]
        report.figures |= {
            "executions": len(known.runs),
            "in JavaScript": len(theirs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "held at the kill": len(fleet.kills[0].held),
            "settlements refused": len(fleet.lines("refused")),
        }
        report.expect(bool(fleet.kills[0].held), "the JavaScript worker that was killed held no job")
        report.expect(len(theirs) > jobs // 10, "the JavaScript workers did next to nothing")
        report.expect(len(known.runs) - len(theirs) > jobs // 10, "the Python workers did next to nothing")
        failed = [row.id for row in known.rows.values() if row.state != "succeeded"]
        report.expect(not failed, f"{len(failed)} jobs did not succeed: {failed[:3]}")
        return judged(fleet, known, report)


def serve(fleet: Fleet, *, faults: str = "") -> tuple[subprocess.Popen[bytes], str]:
    """Start the API; its process, and where it is."""
    process = fleet.start("tests.crash.programs.api", HOLDFAST_FAULTS=faults)
    addresses: list[str] = []

    def serving() -> bool:
        addresses.extend(line["address"] for line in fleet.lines("serving") if line["pid"] == process.pid)
        return bool(addresses)

    until(serving, START_SECONDS, "the API to serve")
    return process, addresses[0]


def _start(fleet: Fleet, address: str) -> subprocess.Popen[bytes]:
    return fleet.run([NODE, SCRIPT], API=address, SLOTS=str(SLOTS), LEASE=str(LEASE))


def _await_share(fleet: Fleet, scripts: list[subprocess.Popen[bytes]], number: int) -> None:
    """Until so many jobs have ended, and the first two JavaScript workers have some in hand."""

    def share() -> bool:
        runs = fleet.runs()
        busy = {run.pid for run in runs if run.ended is None}
        return len(runs) >= number and {scripts[0].pid, scripts[1].pid} <= busy

    until(share, 60, "the JavaScript workers to have jobs in hand", pause=0.01)
