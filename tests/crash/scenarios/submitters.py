"""kill -9 of those who submit: ten processes on one file."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, sound
from tests.support.stores import Home

MODES = ("keyed", "keyed", "keyed", "blocking", "blocking", "blocking", "bulk", "bulk", "concurrent", "concurrent")
PROGRAM = "tests.crash.programs.submitter"
BATCH = 20
"""Jobs in one transaction of a submitter in bulk."""


def killed_submitters(folder: Path, home: Home, *, kills: int, seed: int) -> Report:
    """Each is killed at random instants and started again where its acknowledgements end: keys are then tried again."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder, home) as fleet:
        names = [f"{mode}-{number}" for number, mode in enumerate(MODES)]
        running = {name: fleet.start(PROGRAM, mode, name, "0") for name, mode in zip(names, MODES, strict=True)}
        until(lambda: {line["by"] for line in fleet.lines("ack")} == set(names), 60, "every submitter's first job")
        for _ in range(kills):
            time.sleep(rng.uniform(0.05, 0.4))
            name = rng.choice(names)
            report.expect(running[name].poll() is None, f"{name} ended before it was killed")
            running[name].kill()
            running[name].wait()
            first = sum(line["by"] == name for line in fleet.lines("ack"))
            running[name] = fleet.start(PROGRAM, name.split("-")[0], name, str(first))
        for name, process in running.items():
            report.expect(process.poll() is None, f"{name} ended before it was killed")
            process.kill()
            process.wait()
        judge_submitters(fleet, report)
        report.figures["kills"] = kills + len(names)
    return report


def judge_submitters(fleet: Fleet, report: Report) -> None:
    """Every acknowledged id exists, no key has two jobs, no error surfaced."""
    acks, errors = fleet.lines("ack"), fleet.lines("error")
    acknowledged = [job for line in acks for job in line["jobs"]]
    stored = fleet.database.rows()
    lost = [job for job in acknowledged if job not in stored]
    report.expect(not lost, f"{len(lost)} acknowledged jobs do not exist: {lost[:3]}")
    report.expect(not errors, f"{len(errors)} errors reached submitters: {[line['text'] for line in errors[:3]]}")
    notes = fleet.database.notes()
    by_key = Counter(f"{note.by}-{note.index}" for note in notes if note.keyed)
    report.expect(max(by_key.values()) == 1, f"keys with two jobs: {[key for key, n in by_key.items() if n > 1][:3]}")
    owners = fleet.database.keys()
    for line in acks:
        if line["key"] is not None:
            owner = owners.get(line["key"])
            report.expect(owner == line["jobs"][0], f"{line['key']} stands for {owner}, not {line['jobs']}")
    batches = Counter((note.by, note.index) for note in notes if note.by.startswith("bulk-"))
    halves = [batch for batch, count in batches.items() if count % BATCH]
    report.expect(not halves, f"batches stored in part: {halves[:3]}")
    sound(fleet, report)
    report.figures |= {
        "acknowledged": len(acknowledged),
        "stored": len(stored),
        "in doubt": len(stored) - len(set(acknowledged)),
        "keys": len(by_key),
    }
