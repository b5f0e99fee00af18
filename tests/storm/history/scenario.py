"""Writes histories on a store under a nemesis and checks them; and with faults built in, which must be found."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.stores.base import Store
from tests.crash.report import Report
from tests.storm.history.actor import shared_clock
from tests.storm.history.checker import Violation, check, describe
from tests.storm.history.faults import FAULTS
from tests.storm.history.items import describe_job
from tests.storm.history.nemesis import Arena, Nemesis, open_arena
from tests.storm.history.product import RecordedApp
from tests.storm.history.records import Event, Recorder, group_by_job, read_histories

ROUND = 60.0  # seconds
_AT_ONCE = 500


def histories(folder: Path, name: str, *, seconds: float, seed: int) -> Report:
    """Rounds on new stores, until the time is over. Complains of every violation, with its job's history."""
    report = Report()
    rng = random.Random(seed)
    ends = time.monotonic() + seconds
    figures: Counter[str] = Counter()
    while (left := ends - time.monotonic()) > 0 and not report.complaints:
        figures["rounds"] += 1
        place = folder / f"round-{figures['rounds']}"
        violations, events, counts = write_history(place, name, min(left, ROUND), rng.randrange(1 << 32), report)
        report.complaints += describe(violations, events)
        figures.update(counts, jobs=len(group_by_job(events)), calls=len(events))
        figures["unknown outcomes"] += sum(event.got is None for event in events)
        if not report.complaints:
            shutil.rmtree(place)
    report.figures = {"seed": seed, **figures}
    return report


def faults_found(folder: Path, *, within: float, seed: int, faults: Iterable[str] = FAULTS) -> Report:
    """Complains of every built-in fault that no rule finds in time. The figures say which found it, and when."""
    report = Report(figures={"seed": seed})
    rng = random.Random(seed)
    for fault in faults:
        began = time.monotonic()
        seconds, number = 2.0, 0
        violations: list[Violation] = []
        while not violations and time.monotonic() - began < within:
            number += 1
            place = folder / f"{fault}-{number}"
            violations, *_ = write_history(place, "sqlite", seconds, rng.randrange(1 << 32), Report(), fault)
            seconds = min(2 * seconds, ROUND)
        rules = ", ".join(sorted({each.rule for each in violations}))
        report.figures[fault] = f"{time.monotonic() - began:.0f} s by {rules}"
        report.expect(bool(violations), f"no rule found the fault {fault} within {within:g} s")
    return report


def write_history(
    folder: Path, name: str, seconds: float, seed: int, report: Report, fault: str | None = None
) -> tuple[list[Violation], list[Event], Counter[str]]:
    """Writes a history on a new store; returns its violations, its events and the number of faults by kind."""
    calls = folder / "calls"
    calls.mkdir(parents=True)
    with open_arena(name, folder) as arena:
        nemesis = Nemesis(arena, calls, seed, seconds, fault)
        nemesis.run()
        asyncio.run(_read_finally(arena, calls))
        if fault is None:
            report.complaints += arena.fleet.mishaps()
    events = read_histories(calls)
    return check(events, arena.terms), events, Counter(nemesis.counts)


async def _read_finally(arena: Arena, calls: Path) -> None:
    """Reads every job when all is quiet, with the marks of the writes that it shows."""
    ids = [job for job in group_by_job(read_histories(calls)) if job]
    recorder = Recorder(calls / "reader.jsonl", shared_clock(calls))
    async with RecordedApp(arena.fleet.url, recorder) as app:
        opened = await app.open_store()
        for start in range(0, len(ids), _AT_ONCE):
            await _read_jobs(opened, recorder, ids[start : start + _AT_ONCE])


async def _read_jobs(store: Store, recorder: Recorder, ids: list[str]) -> None:
    async def read() -> list[dict[str, Any]]:
        found = []
        for job_id, job in zip(ids, await store.query.get_many(ids), strict=True):
            item = {**describe_job(job_id, job), "final": True}
            if job is not None:
                errors = [each.error for each in await store.query.attempts(job_id)]
                steps = [each.name for each in await store.workflow.read_steps(job_id)]
                shown = [(job.result or "").strip('"'), job.error, *errors, *steps]
                item["marks"] = [each for each in shown if each]
            found.append(item)
        return found

    await recorder.observe("read", [{"job": job_id} for job_id in ids], read(), lambda found: found)


if __name__ == "__main__":
    import sys
    import tempfile

    name, seconds, *given = sys.argv[1:]
    place = Path(tempfile.mkdtemp(prefix="history-"))
    seed = int(given[0]) if given else random.randrange(1 << 32)
    if name == "faults":
        report = faults_found(place, within=float(seconds), seed=seed, faults=given[1:] or FAULTS)
    else:
        report = histories(place, name, seconds=float(seconds), seed=seed)
    print("\n".join([*report.complaints, str(report.figures), os.fspath(place)]))
    sys.exit(bool(report.complaints))
