"""pytest plugin: a process that has collected all tests, and runs some of them on a mutant in a fork of itself.

It serves one runner over the socket ``MUTANTS_SOCKET``. The fork starts with everything imported, with servers that
run already, and with the mutated file on disk, for the programs that tests start. SQL and Lua are read from there;
functions of a mutated module exchange their code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

_Key = tuple[str, str, int]
_OLDER = re.compile(r"(?<=[\[-])(postgres|redis)(16|6)(?=[\]-])")


class Task(NamedTuple):
    """A mutated file and the tests to run, in their order, until one fails."""

    file: str
    mutated: bytes
    tests: list[str]
    seconds: float


class Outcome(NamedTuple):
    """``killer``: the test that failed; "" if none did."""

    killer: str
    is_late: bool = False
    error: str = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out tests on the older version of a server that run on the newer one, too."""
    known = {item.nodeid for item in items}
    items[:] = [
        item for item in items if (newer := _OLDER.sub(r"\1", item.nodeid)) == item.nodeid or newer not in known
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Runs tasks until the runner closes the connection."""
    gc.unfreeze()
    functions = _functions_by_file(Path.cwd())
    items = {item.nodeid: item for item in session.items}
    if any("[postgres" in test or "[redis" in test for test in items):
        _start_servers()
    with Client(os.environ["MUTANTS_SOCKET"], family="AF_UNIX") as connection, contextlib.suppress(EOFError):
        connection.send(sorted(items))
        while True:
            task = Task(*connection.recv())
            with _mutated(Path.cwd() / task.file, task.mutated):
                outcome = _run_in_fork(task, items, functions)
            connection.send(tuple(outcome))
    return True


def _start_servers() -> None:
    from tests.support import postgres, redis

    for major in (postgres.MAIN, postgres.FLOOR):
        postgres.shared(major)
    for kind in (redis.MAIN, *redis.FLOORS):
        redis.shared(kind)


@contextlib.contextmanager
def _mutated(path: Path, content: bytes) -> Iterator[None]:
    original, known = path.read_bytes(), path.stat()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))  # compiled files stay valid


def _run_in_fork(task: Task, items: dict[str, pytest.Item], functions: dict[str, list[FunctionType]]) -> Outcome:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        outcome = Outcome("", error="interrupted")
        try:
            outcome = _run(task, items, functions)
        except BaseException as error:  # whatever it is, the fork must not go on as a second server
            outcome = Outcome("the test process", error=repr(error))
        finally:
            os.write(writing, json.dumps(outcome).encode())
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], task.seconds)
    answer = os.read(reading, 1 << 16) if ready else b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    if not ready:
        return Outcome("", is_late=True)
    return Outcome(*json.loads(answer)) if answer else Outcome("the test process", error="it died")


def _run(task: Task, items: dict[str, pytest.Item], functions: dict[str, list[FunctionType]]) -> Outcome:
    os.setsid()
    sys.dont_write_bytecode = True
    if task.file.endswith(".py"):
        _exchange_code(Path.cwd() / task.file, task.mutated, functions)
    chosen = [items[test] for test in task.tests if test in items]
    reports = _Reports()
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        item.config.pluginmanager.register(reports, "mutants-reports")
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item.config.pluginmanager.unregister(reports)
        if reports.failed:
            return Outcome(item.nodeid, error=reports.failed)
    return Outcome("")


class _Reports:
    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.longreprtext[-500:] or "failed"


def _functions_by_file(folder: Path) -> dict[str, list[FunctionType]]:
    found: dict[str, list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(folder)):
            found.setdefault(each.__code__.co_filename, []).append(each)
    return found


def _exchange_code(path: Path, source: bytes, functions: dict[str, list[FunctionType]]) -> None:
    codes = dict(_codes(compile(source, str(path), "exec")))
    for each in functions.get(str(path), ()):
        code = codes.get(_key(each.__code__))
        if code is not None and code != each.__code__:
            each.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[_Key, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield _key(each), each
            yield from _codes(each)


def _key(code: Any) -> _Key:
    return code.co_name, code.co_qualname, code.co_firstlineno
