"""kill -9 of those who submit: ten processes on one file."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from tests.crash.fleet import Fleet, until
from tests.crash.report import Report

MODES = ("keyed", "keyed", "keyed", "blocking", "blocking", "blocking", "bulk", "bulk", "concurrent", "concurrent")
PROGRAM = "tests.crash.programs.submitter"


def killed_submitters(folder: Path, *, kills: int, seed: int) -> Report:
    """Each is killed at random instants and started again where its acknowledgements end: keys are then tried again."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    with Fleet(folder) as fleet:
        names = [f"{mode}-{number}" for number, mode in enumerate(MODES)]
        running = {name: fleet.start(PROGRAM, mode, name, "0") for name, mode in zip(names, MODES, strict=True)}
        until(lambda: {line["by"] for line in fleet.lines("ack")} == set(names), 30, "every submitter's first job")
        for _ in range(kills):
            time.sleep(rng.uniform(0.05, 0.4))
            name = rng.choice(names)
            running[name].kill()
            running[name].wait()
            first = sum(line["by"] == name for line in fleet.lines("ack"))
            running[name] = fleet.start(PROGRAM, name.split("-")[0], name, str(first))
        for process in running.values():
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
    by_key = Counter(
        key
        for (key,) in fleet.database.all(
            "select payload ->> '$.by' || '-' || (payload ->> '$.index') from holdfast_job where keyed"
        )
    )
    report.expect(max(by_key.values()) == 1, f"keys with two jobs: {[key for key, n in by_key.items() if n > 1][:3]}")
    for line in acks:
        if line["key"] is not None:
            owner = fleet.database.all("select job_id from holdfast_key where key = ?", line["key"])
            report.expect(owner == [(line["jobs"][0],)], f"{line['key']} stands for {owner}, not {line['jobs']}")
    halves = _torn_batches(fleet)
    report.expect(not halves, f"batches stored in part: {halves[:3]}")
    report.expect((verdict := fleet.database.integrity()) == "ok", f"integrity_check: {verdict}")
    report.figures |= {
        "acknowledged": len(acknowledged),
        "stored": len(stored),
        "in doubt": len(stored) - len(set(acknowledged)),
        "keys": len(by_key),
    }


def _torn_batches(fleet: Fleet) -> list[tuple[object, ...]]:
    """Batches of one transaction of which only some jobs are there."""
    return fleet.database.all(
        """select json_extract(payload, '$.by') as by, json_extract(payload, '$.index') as number, count(*)
           from holdfast_job where by like 'bulk-%' group by by, number having count(*) % 20 <> 0"""
    )
