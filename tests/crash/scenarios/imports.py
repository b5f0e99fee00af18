"""Jobs move from a live Celery or RQ while its workers and clients go on and imports are killed: each runs once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.crash.fleet import START_SECONDS, Fleet, until
from tests.crash.report import Report, sound
from tests.support.redis import Redis
from tests.support.stores import Home

PROGRAM = "tests.crash.programs.peers"
POINTS = ("import.taken", "submit.before", "submit.after", "import.submitted")
STATES = {
    "celery": {"waiting", "scheduled", "reserved", "scheduled, reserved"},
    "rq": {"queued", "scheduled", "started", "failed"},
}
"""States of a peer's jobs that are met before the first import."""


def moved(folder: Path, home: Home, peer: str, *, jobs: int, kills: int, max_delay: int, seed: int) -> Report:
    """Half of the jobs are there before the first import, the others are submitted meanwhile."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Redis() as server, Fleet(folder, home, lease="60s") as fleet:
        url, half = server.url(), jobs // 2
        fleet.await_end(
            fleet.start(PROGRAM, "submit", peer, "0", str(half), str(max_delay), PEER_URL=url), 300, "the first half"
        )
        planner = fleet.start(PROGRAM, "plan", peer, *STATES[peer], PEER_URL=url)
        until(lambda: bool(fleet.lines("met")), START_SECONDS, "a dry run to meet jobs")
        worker = fleet.start(PROGRAM, "work", peer, PEER_WORKS="1", PEER_URL=url)
        until(lambda: bool(fleet.lines("effect")), START_SECONDS, "the peer's worker to start")
        fleet.run([sys.executable, "-m", "holdfast", "worker", "start"], PEER_URL=url, HOLDFAST_APP=f"{PROGRAM}:app")
        submitter = fleet.start(PROGRAM, "submit", peer, str(half), str(jobs - half), str(max_delay), PEER_URL=url)
        fleet.await_end(planner, START_SECONDS, "dry runs to meet every state")
        for number in range(kills):
            _kill_an_import(fleet, rng, peer, number, url)
        import_once(fleet, peer, url)  # beside the peer's worker, to its end
        fleet.await_end(submitter, 300, "the second half")
        import_twice(fleet, peer, url)
        worker.send_signal(signal.SIGTERM)
        fleet.await_end(worker, 120, "the peer's worker to stop")
        import_once(fleet, peer, url, "failed", "held")
        left = fleet.lines("imported")[-1]["left"]
        assert not left, f"the last import left {left}"
        until(lambda: len(fleet.lines("effect")) >= jobs, 300, "every job to run")
        _judge(fleet, report, peer, jobs)
        report.expect(_is_empty(server), "jobs are left in the peer's store")
        return report


def _kill_an_import(fleet: Fleet, rng: random.Random, peer: str, number: int, url: str) -> None:
    """Every other import dies at a point between two of its steps, the others at any instant."""
    if number % 2:
        fault = f"{rng.choice(POINTS)}:kill@{rng.randint(1, 2)}"
        fleet.await_end(fleet.start(PROGRAM, "import", peer, HOLDFAST_FAULTS=fault, PEER_URL=url), 120, "an import")
        return
    process = fleet.start(PROGRAM, "import", peer, PEER_URL=url)
    time.sleep(rng.uniform(0.3, 1.5))
    process.kill()
    process.wait()


def import_once(fleet: Fleet, peer: str, url: str, *options: str) -> subprocess.Popen[bytes]:
    """Runs an import to its end."""
    process = fleet.start(PROGRAM, "import", peer, *options, PEER_URL=url)
    fleet.await_end(process, 120, "an import")
    return process


def import_twice(fleet: Fleet, peer: str, url: str) -> None:
    """Runs two imports at once."""
    processes = [fleet.start(PROGRAM, "import", peer, PEER_URL=url) for _ in range(2)]
    for process in processes:
        fleet.await_end(process, 120, "one of two imports")


def _judge(fleet: Fleet, report: Report, peer: str, jobs: int) -> None:
    """Every job had its effect, and no job had it twice, on either queue."""
    effects = fleet.lines("effect")
    counts = Counter(line["number"] for line in effects)
    lost = sorted(set(range(jobs)) - set(counts))
    report.expect(not lost, f"{len(lost)} jobs were lost: {lost[:5]}")
    twice = [number for number, count in counts.items() if count > 1]
    report.expect(not twice, f"{len(twice)} jobs ran twice: {twice[:5]}")
    imports = fleet.lines("imported")
    report.figures |= {
        "ran there": sum(line["side"] == "peer" for line in effects),
        "ran here": sum(line["side"] == "here" for line in effects),
        "imports": len(imports),
        "killed": sum(process.returncode == -signal.SIGKILL for process in fleet.processes),
        "submitted again": sum(line["again"] for line in imports),
    }
    sound(fleet, report)


def _is_empty(server: Redis) -> bool:
    """Returns True if no job is left in the peer's store, nor aside."""
    with server.client() as client:
        queues = [b"celery", b"unacked", b"holdfast:moving:celery", b"rq:queue:default", b"rq:scheduled:default"]
        return not client.exists(*queues, b"rq:failed:default", b"rq:holdfast:moving")
