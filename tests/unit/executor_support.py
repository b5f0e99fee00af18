"""What the tests of the executors share: both event loops, a job, and a look at what still runs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from holdfast.core.models import Job


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's own loop and on uvloop."""

    @functools.wraps(test)
    def run(loop_factory: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**fixtures))

    loop = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [loop, *inspect.signature(test).parameters.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest asks for it by that name
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(run)


def job(task: str, payload: str = "{}") -> Job:
    """A running job."""
    return Job("job-1", task, "default", payload, 1, 1, 5, 0, 0, 0, 0)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def living_with(marker: str) -> list[int]:
    """The pids of every process whose command line contains ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if marker.encode() in line and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something another process does; fail if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)
