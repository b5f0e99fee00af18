"""Workers in numbers on one store: what they share they share out, whatever else happens to it."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from holdfast import Holdfast
from tests.crash.fleet import START_SECONDS, WORKER, Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.load import SUBMITTER
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.stores import Home

CROWD = 8
BATCHES = (1, 20)
"""The fewest and the most jobs that a worker of the crowd runs at once: it claims what fits."""
BETWEEN = 0.8  # seconds between two kills
SECONDS = (0.05, 1.5)  # what the jobs take that are there from the start
BACKLOG = 100
"""Jobs there are from the start, for each kill."""


def shared(folder: Path, home: Home, *, jobs: int, seconds: float, share: float = 0.0) -> Report:
    """Two workers get so many jobs at once: none is executed twice, and each runs at least ``share`` of them."""
    report = Report()
    with Fleet(folder, home, lease="30s", heartbeat="10s") as fleet:
        fleet.start_workers(2)
        submitted = submit(fleet, work(jobs, seconds))
        began = time.monotonic()
        await_quiet(fleet, 120 + jobs / 100)
        took = time.monotonic() - began
        known = facts(fleet, submitted)
        executed = Counter(run.job for run in known.runs)
        twice = [job for job, count in executed.items() if count > 1]
        report.expect(not twice, f"{len(twice)} jobs were executed twice: {twice[:3]}")
        report.expect(len(executed) == jobs, f"{len(executed)} of {jobs} jobs were executed")
        by_worker = Counter(run.pid for run in known.runs)
        least = min(by_worker[process.pid] for process in fleet.processes) / jobs
        report.expect(least >= share, f"a worker ran {least:.0%} of the jobs, the other one the rest")
        report.figures |= {"jobs": jobs, "seconds": round(took, 1), "smaller share": f"{least:.0%}"}
        return judged(fleet, known, report)


def crowd(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Eight workers claim at batch sizes of their own while jobs come, are cancelled and replayed, and workers die."""
    rng = random.Random(seed)
    report = Report(figures={"seed": seed})
    with Fleet(folder, home) as fleet:
        for _ in range(CROWD):
            _another(fleet, rng)
        fleet.await_ready({process.pid for process in fleet.processes})
        submitters = {mode: fleet.start(SUBMITTER, mode, mode) for mode in ("keyed", "bulk", "concurrent")}
        specs = [spec for _ in range(BACKLOG * kills) for spec in work(1, rng.uniform(*SECONDS), max_attempts=25)]
        submitted = submit(fleet, specs)
        with _Operator(fleet, rng, submitted) as operator:
            for _ in range(kills):
                operator.interfere(BETWEEN)
                fleet.kill(rng.choice(fleet.await_working(CROWD // 2)))
                _another(fleet, rng)
            _await_submissions(fleet, set(submitters))
            for process in submitters.values():
                process.send_signal(signal.SIGTERM)
                fleet.await_end(process, 60, "a submitter to stop")
            await_quiet(fleet, 120)
        acknowledged = [*submitted, *(job for line in fleet.lines("ack") for job in line["jobs"])]
        known = replace(facts(fleet, acknowledged), replayed=operator.replayed)
        report.expect(not fleet.lines("error"), f"errors: {[line['text'] for line in fleet.lines('error')[:3]]}")
        report.figures |= {
            "kills": len(fleet.kills),
            "jobs": len(acknowledged),
            "executions": len(known.runs),
            **operator.figures(),
            **Counter(row.state for row in known.rows.values()),
        }
        return judged(fleet, known, report)


def _await_submissions(fleet: Fleet, names: Set[str]) -> None:
    """Wait until each submitter was acknowledged a job: only then does it surely hear a signal to stop."""
    until(lambda: names <= {line["by"] for line in fleet.lines("ack")}, START_SECONDS, "every submitter to submit")


def _another(fleet: Fleet, rng: random.Random) -> None:
    fleet.start(WORKER, HOLDFAST_CONCURRENCY=str(rng.randint(*BATCHES)))


class _Operator:
    """Cancels and replays jobs at random. Use it with ``with``."""

    def __init__(self, fleet: Fleet, rng: random.Random, jobs: Sequence[str]) -> None:
        self._fleet = fleet
        self._jobs = jobs
        self._rng = rng
        self._app = Holdfast(fleet.url)
        self._did: Counter[str] = Counter()
        self.replayed: dict[str, list[float]] = defaultdict(list)

    def __enter__(self) -> _Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._app.sync.close()

    def figures(self) -> dict[str, int]:
        """What it did, how often."""
        return dict(self._did)

    def interfere(self, seconds: float) -> None:
        """For so long, cancel and replay."""
        known = [*self._jobs, *(job for line in self._fleet.lines("ack") for job in line["jobs"])]
        until_then = time.monotonic() + seconds
        while time.monotonic() < until_then:
            job = self._rng.choice(known)
            if self._rng.random() < 0.5:
                self._did["asked to cancel"] += len(self._app.sync.cancel([job]).changed)
            else:
                self._replay(job)
            time.sleep(self._rng.uniform(0, 0.04))

    def _replay(self, job: str) -> None:
        if self._app.sync.replay([job], force=True).changed:
            self.replayed[job].append(time.monotonic())
            self._did["replayed"] += 1
