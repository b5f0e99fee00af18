"""Handlers that end in ways that would hurt their worker: none ends it, and each attempt fails with a clear error."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from holdfast import Holdfast
from holdfast.core.lifecycle import Failed
from holdfast.core.models import Job
from holdfast.tasks import Task
from holdfast.worker.executors.outcome import outcome_of
from tests.worker.hostile import ERRORS

ROOT = Path(__file__).resolve().parents[2]
EXECUTORS = ("coroutine", "thread", "process", "process.async", "judged")


def _drained(folder: Path, *jobs: tuple[str, Any]) -> list[Job]:
    """The jobs after one real worker has met them all, and then a good one."""
    url = f"sqlite:///{folder}/jobs.db"

    async def submit() -> list[str]:
        async with Holdfast(url) as app:
            handles = [await app.enqueue(task, payload, max_attempts=1) for task, payload in jobs]
            return [handle.id for handle in [*handles, await app.enqueue("good", {}, priority=-1)]]

    async def fetch(ids: list[str]) -> list[Job]:
        async with Holdfast(url) as app:
            return [await app.get(job_id) for job_id in ids]

    ids = asyncio.run(submit())
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    words = ["worker", "start", "--drain", "--app", "tests.worker.hostile:app", "--url", url, "--concurrency", "4"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr[-3000:])
    *met, good = asyncio.run(fetch(ids))
    assert (good.state, good.result) == ("succeeded", '"good"'), ended.stderr
    return met


def test_no_exception_of_a_handler_ends_the_worker(tmp_path: Path) -> None:
    cases = [(executor, case) for executor in EXECUTORS for case in ERRORS]
    jobs = _drained(tmp_path, *[(executor, {"case": case}) for executor, case in cases])
    outcomes = {case: (str(job.state), job.error or "") for case, job in zip(cases, jobs, strict=True)}
    stops = [outcomes.pop((executor, "StopIteration")) for executor in EXECUTORS]
    assert all(
        error.startswith(("StopIteration: 5", "RuntimeError: coroutine raised StopIteration")) for _, error in stops
    )
    assert {case: (state, error[: len(case[1])]) for case, (state, error) in outcomes.items()} == {
        case: ("dead", case[1]) for case in outcomes
    }


TRICKS: dict[str, tuple[dict[str, object], str, str]] = {
    "group": ({}, "dead", "SystemExit: 11"),
    "gather": ({}, "dead", "SystemExit: 12"),
    "gather.process": ({}, "dead", "SystemExit: 12"),
    "callback": ({}, "succeeded", ""),
    "closes.itself": ({}, "dead", "GeneratorExit"),
    "refuses.to.end": ({}, "dead", "GeneratorExit"),
    "picky": ({"picky": {"number": 1}}, "dead", "SystemExit: 14"),
    "result": ({}, "dead", "GeneratorExit"),
}
"""Payload of each task, and the state and error of its jobs."""


def test_no_trick_of_a_handler_ends_the_worker(tmp_path: Path) -> None:
    tricks = [name for name in TRICKS for _ in range(6)]  # of each, more than there are runners
    jobs = _drained(tmp_path, *[(name, TRICKS[name][0]) for name in tricks])
    ended = [(name, str(job.state), job.error or "") for name, job in zip(tricks, jobs, strict=True)]
    assert ended == [(name, *TRICKS[name][1:]) for name in tricks]


@pytest.mark.parametrize("case", ERRORS)
def test_every_exception_has_an_outcome(case: str) -> None:
    def raise_it() -> NoReturn:
        raise ERRORS[case]()

    try:
        raise_it()
    except BaseException as error:
        outcome = outcome_of(error, Task("t", raise_it))
    assert isinstance(outcome, Failed)
    assert outcome.error.startswith(case)
    if case != "Snooze" and case != "RetryAfter":
        assert "in raise_it" in (outcome.traceback or "")
