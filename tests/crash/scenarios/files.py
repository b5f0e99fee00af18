"""The store itself: created by many at once and forked over; a file that is copied, and on a disk that is full."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.crash.database import database_of
from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged, sound
from tests.crash.scenarios.submitting import submit, work
from tests.support.stores import Home, sqlite_file

PROGRAMS = "tests.crash.programs"


def raced_migrations(folder: Path, home: Home, *, rounds: int, seed: int, openers: int = 5, killed: int = 2) -> Report:
    """Several processes create the same store at once and some are killed in the middle; the others end well."""
    report = Report(figures={"seed": seed, "rounds": rounds})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        for number in range(rounds):
            url = fleet.another(f"race-{number}")
            _race(fleet, url, rng, openers, killed)
            acknowledged = [job for line in fleet.lines("ack") if line["url"] == url for job in line["jobs"]]
            report.expect(len(acknowledged) >= openers - killed, f"{url}: {len(acknowledged)} openers succeeded")
            database = database_of(url)
            report.expect(set(acknowledged) <= set(database.rows()), f"{url}: an acknowledged job is missing")
            report.expect(database.migrations() > 0, f"{url}: no schema")
            report.expect((verdict := database.integrity()) == "ok", f"{url}: integrity_check: {verdict}")
        errors = [line["text"] for line in fleet.lines("error")]
        report.expect(not errors, f"openers failed: {errors[:3]}")
        report.complaints += fleet.mishaps()
        report.figures["acknowledged"] = len(fleet.lines("ack"))
    return report


def _race(fleet: Fleet, url: str, rng: random.Random, openers: int, killed: int) -> None:
    before = len(fleet.lines("here"))
    racers = [
        fleet.run([sys.executable, "-m", f"{PROGRAMS}.opener", url], stdin=subprocess.PIPE) for _ in range(openers)
    ]
    until(lambda: len(fleet.lines("here")) == before + openers, 60, "the openers to be ready", pause=0.02)
    for racer in racers:
        _say_go(racer)
    for racer in racers[:killed]:
        time.sleep(rng.uniform(0, 0.015))
        racer.kill()
    for racer in racers:
        racer.wait(30)


def _say_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.close()


def killed_backups(folder: Path, *, kills: int, seed: int, jobs: int = 3000) -> Report:
    """A process is killed while it copies the store: the store is sound, and so is every copy that bears its name."""
    report = Report(figures={"seed": seed, "kills": kills})
    rng = random.Random(seed)
    with Fleet(folder, sqlite_file) as fleet:
        submitted = submit(fleet, work(jobs, 0.1))
        for _ in range(kills):
            copier = fleet.start(f"{PROGRAMS}.copier", str(folder))
            _await_copying(fleet, copier.pid)
            time.sleep(rng.uniform(0.0, 0.1))
            copier.kill()
            copier.wait()
        rows = fleet.database.rows()
        report.expect(set(submitted) == set(rows), f"{len(submitted)} jobs were stored, {len(rows)} are there")
        sound(fleet, report)
        copies = sorted(folder.glob("copy-*.db"))
        torn = [copy.name for copy in copies if not _whole(copy, jobs)]
        report.expect(not torn, f"copies that are not whole bear their final name: {torn}")
        report.figures |= {
            "whole copies": len(copies) - len(torn),
            "left over": len(list(folder.glob("*copy-*"))) - len(copies),
        }
    return report


def _await_copying(fleet: Fleet, pid: int) -> None:
    until(lambda: any(line["pid"] == pid for line in fleet.lines("copying")), 60, "a copy to be begun", pause=0.01)


def _whole(copy: Path, jobs: int) -> bool:
    with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as connection:
        try:
            verdict = connection.execute("pragma integrity_check").fetchone()[0]
            (count,) = connection.execute("select count(*) from holdfast_job").fetchone()
        except sqlite3.Error:
            return False
    return bool(verdict == "ok" and count == jobs)


def forked(folder: Path, home: Home) -> Report:
    """A fork beside an open store: refused in the child, which opens its own; the parent's is unharmed."""
    report = Report()
    with Fleet(folder, home) as fleet:
        process = fleet.start(f"{PROGRAMS}.forker")
        fleet.await_end(process, 60, "the forking process to end")
        codes = [line["code"] for line in fleet.lines("child")]
        acknowledged = {job for line in fleet.lines("ack") for job in line["jobs"]}
        report.expect(
            (process.returncode, codes) == (0, [0]), f"{process.returncode}, {codes}: {fleet.errors()[-1500:]}"
        )
        report.expect(acknowledged == set(fleet.database.rows()), "acknowledged and stored jobs differ")
        report.expect(len(acknowledged) == 11, f"{len(acknowledged)} jobs were acknowledged instead of 11")
        sound(fleet, report)
    return report


def full_disk(folder: Path, *, size: int) -> Report:
    """No file may grow beyond ``size``: submissions are refused clearly, and go on once there is room."""
    report = Report(figures={"size": size})
    with Fleet(folder, sqlite_file) as fleet:
        process = fleet.start(f"{PROGRAMS}.squeezed", "submitting", str(size))
        fleet.await_end(process, 60, "the submitter to end")
        acknowledged = [job for line in fleet.lines("ack") for job in line["jobs"]]
        stored = fleet.database.rows()
        lifted = fleet.lines("lifted")[0]["mono"]
        after = [line for line in fleet.lines("ack") if line["mono"] > lifted]
        errors = [line["text"] for line in fleet.lines("error")]
        report.expect(process.returncode == 0, f"exit code {process.returncode}: {fleet.errors()[-1500:]}")
        report.expect(not errors, f"errors that do not say what is wrong: {errors[:3]}")
        report.expect(len(fleet.lines("refused")) == 20, "the full disk was not felt")
        report.expect(set(acknowledged) <= set(stored), "an acknowledged job is missing")
        report.expect(len(stored) == len(acknowledged), f"{len(stored) - len(acknowledged)} refused jobs were stored")
        report.expect(len(after) == 20, f"{len(after)} of 20 jobs went in once there was room again")
        sound(fleet, report)
        report.figures |= {"acknowledged": len(acknowledged), "message": fleet.lines("refused")[0]["text"]}
    return report


def full_disk_under_a_worker(folder: Path, *, size: int = 100_000) -> Report:
    """Nothing can be written for a while: the worker waits it out and every job is done."""
    report = Report()
    with Fleet(folder, sqlite_file) as fleet:
        process = fleet.start(f"{PROGRAMS}.squeezed", "working", str(size))
        fleet.await_end(process, 60, "the worker to end")
        report.expect(process.returncode == 0, f"exit code {process.returncode}: {fleet.errors()[-1500:]}")
        errors = [line["text"] for line in fleet.lines("error") + fleet.lines("refused")]
        report.expect(not errors, f"submissions before the disk was full failed: {errors[:3]}")
        known = facts(fleet, [job for line in fleet.lines("ack") for job in line["jobs"]])
        report.figures |= {"executions": len(known.runs), "jobs": len(known.rows)}
        return judged(fleet, known, report)
