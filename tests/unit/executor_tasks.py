"""Tasks that the tests of the executors run in child processes, which import this module by its name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.lifecycle import Dead, RetryAfter, Snooze
from holdfast.tasks import Context, Registry, Task, current_job


def process_task(function: Any) -> Task[..., Any]:
    return Task(function.__name__, function, executor="process", dead_on=KeyError)


places: list[str] = []
"""Entries and exits of scopes, and the handlers inside them, each with its process and thread."""


def place() -> str:
    return f"{os.getpid()} {threading.get_ident()}"


@contextmanager
def note_place(_: Context) -> Iterator[None]:
    places[:] = [f"entered {place()}"]
    yield
    places.append(f"left {place()}")


class NotePlace:
    """A scope for both kinds of handlers."""

    def __init__(self, _: Context) -> None: ...

    def __enter__(self) -> None:
        places.append(f"entered {place()}")

    def __exit__(self, *failure: object) -> None:
        places.append(f"left {place()}")

    async def __aenter__(self) -> None:
        places.append(f"awaited {place()}")

    async def __aexit__(self, *failure: object) -> None:
        places.append(f"left awaited {place()}")


def scoped_task(function: Any) -> Task[..., Any]:
    return Task(function.__name__, function, executor="process", scopes=[note_place, NotePlace])


@scoped_task
def list_places() -> list[str]:
    return [*places, place()]


@scoped_task
async def list_places_async() -> list[str]:
    return [*places, place()]


@process_task
def add(a: int, b: int) -> int:
    return a + b


@process_task
async def add_slowly(ctx: Context, a: int, b: int) -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return {"sum": a + b, "id": ctx.id, "current": current_job().id, "attempt": ctx.attempts}


@process_task
async def leave_a_task(path: str) -> str:
    async def later() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            Path(path).write_text("cancelled")

    task = asyncio.create_task(later())
    await asyncio.sleep(0)
    return task.get_name()


def echo(text: str) -> str:
    return text


@process_task
def fail(how: str) -> None:
    raise {"value": ValueError("no good"), "key": KeyError("k"), "dead": Dead("for good")}.get(how) or RetryAfter(9)


@process_task
async def limited(ctx: Context) -> None:
    await ctx.limit("api")


@process_task
def snooze() -> None:
    raise Snooze(5)


@process_task
def unstorable() -> object:
    return object()


@process_task
def process_id() -> int:
    return os.getpid()


@process_task
def end_the_process(how: str) -> None:
    """Every way a handler can take its process with it, and two that only look so."""
    match how:
        case "_exit":
            os._exit(0)
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "close":
            os.closerange(3, 1 << 20)  # wherever this process got its channel


@process_task
def fork_and_return() -> str:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return "parent" if child else "child"


@process_task
def sleep_with_children(path: str, escape: bool = False) -> None:
    """Write the pids of this process and of one it starts, then sleep, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; sleep 60"], start_new_session=escape)
    whole = Path(path + ".part")
    whole.write_text(f"{os.getpid()} {child.pid}")
    whole.rename(path)
    time.sleep(60)


@process_task
def leave_a_process(path: str) -> None:
    Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))


@process_task
def grow(megabytes: int) -> int:
    KEPT.append(bytearray(megabytes * 1024 * 1024))
    return os.getpid()


KEPT: list[bytearray] = []


class Application:
    """Holds the tasks as an application does."""

    def __init__(self) -> None:
        self.registry = Registry()


app = Application()
app.registry.register(Task("by.registry", echo, executor="process"))


@process_task
def write_logs(ctx: Context, lines: int) -> int:
    for number in range(lines):
        ctx.log.warning("line", number=number, pid_differs=os.getpid() != os.getppid())
    current_job().log("\ud800\0")
    return lines
