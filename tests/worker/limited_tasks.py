"""Tasks that use more than they may, for child processes, which import this module by its name."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from holdfast import Resources
from holdfast.tasks import Task

KEPT: list[bytearray] = []
"""Memory that a job leaves behind in its child."""


def limited(**resources: Any) -> Any:
    def decorate(function: Any) -> Task[..., Any]:
        return Task(function.__name__, function, executor="process", resources=Resources(**resources))

    return decorate


def process_task(function: Any) -> Task[..., Any]:
    return Task(function.__name__, function, executor="process")


def touched(size: int) -> bytearray:
    """Memory of that many bytes, really there."""
    return bytearray(b"x") * size


@limited(memory="160M")
def hold_memory(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    KEPT.append(touched(400 << 20))
    time.sleep(100)


@limited(cpu=1)
def burn_cpu(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    while True:
        pass


@limited(processes=10)
def fork_many(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    for _ in range(60):
        if not os.fork():
            time.sleep(100)
            os._exit(0)
    time.sleep(100)


@limited(file_size="1M")
def fill_disk(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    with Path(f"{path}.big").open("wb") as file:
        while True:
            file.write(b"x" * 100_000)


@limited(open_files=64)
def open_many(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    opened = []
    try:
        while True:
            opened.append(os.open(path, os.O_RDONLY))
    finally:
        for each in opened:
            with contextlib.suppress(OSError):
                os.close(each)


@limited(memory="200M")
def grow(size: int) -> int:
    KEPT.append(touched(size))
    return os.getpid()


@limited(cpu=60)
def neighbour(word: str) -> str:
    return word


@process_task
def leave_memory(size: int) -> int:
    KEPT.append(touched(size))
    return os.getpid()


HOGS = {"memory": hold_memory, "cpu": burn_cpu, "processes": fork_many, "file_size": fill_disk, "open_files": open_many}
