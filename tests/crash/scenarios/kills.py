"""kill -9 of workers: at random, and by jobs that kill their process."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from tests.crash.checker import Row, excess_explained
from tests.crash.fleet import LEASE, SWEEP, Fleet, until
from tests.crash.ledger import by_job
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.submitting import await_quiet, submit, work
from tests.support.load import percentile
from tests.support.stores import Home

WORKERS, SLOTS = 4, 20
IN_PROCESS = "tests.crash.programs.in_process"
BETWEEN = 0.6  # seconds between two kills


def random_kills(folder: Path, home: Home, *, jobs: int, kills: int, seed: int) -> Report:
    """Workers are killed and replaced while they work off ``jobs``."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        seconds = max(0.04, 1.5 * kills * BETWEEN * SLOTS / jobs)
        submitted = submit(fleet, work(jobs, seconds, max_attempts=25))
        fleet.start_workers(WORKERS)
        for _ in range(kills):
            time.sleep(BETWEEN * rng.uniform(0.5, 1.5))
            fleet.kill(rng.choice(fleet.await_working(WORKERS - 1)))
            fleet.keep_up(WORKERS)
        await_quiet(fleet, 120 + jobs * seconds / SLOTS)
        _recovery(fleet, report)
        known = facts(fleet, submitted)
        report.figures |= {
            "jobs": jobs,
            "kills": len(fleet.kills),
            "executions": len(known.runs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "unstarted at kills": sum(known.unstarted.values()),
        }
        report.expect(
            all(row.state == "succeeded" for row in known.rows.values()), "a job with attempts left did not succeed"
        )
        return judged(fleet, known, report, excess_explained)


def in_process_workers(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Processes that submit and work are killed and replaced; a worker on its own works off what they leave."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        for _ in range(kills):
            process = fleet.start(IN_PROCESS)
            fleet.await_ready({process.pid})
            time.sleep(BETWEEN * rng.uniform(0.5, 1.5))
            until(partial(_stop_holding, fleet, process), 60, "a process that holds a job", pause=0.01)
            report.expect(bool(fleet.kill(process).held), "the killed process held no job")
        fleet.start_workers(1)
        await_quiet(fleet, 120)
        acknowledged = [job for line in fleet.lines("ack") for job in line["jobs"]]
        # A process may be killed between the commit of a job and the line about it.
        unanswered = fleet.database.rows().keys() - set(acknowledged)
        report.expect(len(unanswered) <= kills, f"{len(unanswered)} jobs exist that were not acknowledged")
        known = facts(fleet, [*acknowledged, *unanswered])
        report.figures |= {"jobs": len(acknowledged), "unanswered": len(unanswered), "executions": len(known.runs)}
        report.expect(
            all(row.state == "succeeded" for row in known.rows.values()), "a job with attempts left did not succeed"
        )
        return judged(fleet, known, report, excess_explained)


def _stop_holding(fleet: Fleet, process: subprocess.Popen[bytes]) -> bool:
    """Stop a process and return True if it holds a job then; else it goes on."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)  # its server ends what it has begun
    if fleet.database.held_by(process.pid):
        return True
    process.send_signal(signal.SIGCONT)
    return False


def _recovery(fleet: Fleet, report: Report) -> None:
    """From each kill until its leases were settled, and until each of its jobs was run again."""
    recovered = fleet.database.recovered()
    runs = by_job(fleet.runs())
    settled, again = [], []
    for kill in fleet.kills:
        for job, claims in kill.held:
            at = recovered.get((job, claims))
            if at is None:
                report.complaints.append(
                    f"{job}: claim {claims} was held by killed process {kill.pid}, never recovered"
                )
                continue
            settled.append(at - kill.wall)
            again += [run.started_wall - kill.wall for run in runs.get(job, ()) if run.claims == claims + 1]
    limit = LEASE + SWEEP + 2
    report.expect(max(settled, default=0) <= limit, f"a lease was recovered after {max(settled, default=0):.2f} s")
    # With a transport what is ready again stands behind all that has arrived.
    soon = fleet.carried or percentile(again, 0.99) <= limit
    held = sum(len(kill.held) for kill in fleet.kills)
    report.expect(held > 0, "no killed worker held a job")
    report.expect(soon, f"jobs ran again after {percentile(again, 0.99):.2f} s (p99)")
    report.figures |= {
        "leases at kills": held,
        "recovered p50 s": round(percentile(settled, 0.5), 2),
        "recovered max s": round(max(settled, default=0), 2),
        "run again p50 s": round(percentile(again, 0.5), 2),
        "run again max s": round(max(again, default=0), 2),
    }


def poison(folder: Path, home: Home, *, jobs: int, poisonous: int) -> Report:
    """``poisonous`` jobs kill their process, among ``jobs`` innocent ones of the same small budget."""
    report = Report()
    budget = 3
    with Fleet(folder, home) as fleet:
        innocent = submit(fleet, work(jobs // 2, 0.1, max_attempts=budget))
        poisons = submit(fleet, [("crash.poison", {}, {"max_attempts": budget})] * poisonous)
        innocent += submit(fleet, work(jobs - jobs // 2, 0.1, max_attempts=budget))
        fleet.start_workers(2)
        await_quiet(fleet, 120, lambda: fleet.keep_up(2))
        known = facts(fleet, [*innocent, *poisons])
        runs = by_job(known.runs)
        for job in innocent:
            report.expect(known.rows[job].state == "succeeded", f"an innocent neighbour died: {known.rows[job]}")
        for job in poisons:
            row: Row = known.rows[job]
            executed = len(runs.get(job, ()))
            # One of several may be held unstarted when another kills its process: that counts as an attempt too.
            enough = executed == budget if poisonous == 1 else 1 <= executed <= budget
            died = (row.state, row.reason, row.attempts) == ("dead", "crashed", budget)
            report.expect(died and enough, f"the poison was executed {executed} times and is {row}")
        report.figures |= {
            "jobs": jobs,
            "poison": poisonous,
            "processes killed": len(fleet.killed),
            "neighbours hit": sum(known.rows[job].attempts > 1 for job in innocent),
            "most attempts of a neighbour": max(known.rows[job].attempts for job in innocent),
        }
        return judged(fleet, known, report)
