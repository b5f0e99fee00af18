"""A page of the documentation as something to run: its blocks in their order, in one folder, as its reader would.

python   runs; ``await`` may stand outside functions, and what one block defines the next may use. A block that begins
         with ``# app.py`` (or another file's name) is written to that file and imported, and its names are known. A
         block that waits for a result has a worker. ``print(…)  # text`` and ``…  # prints: text``: that is printed,
         with the same numbers.
         One that begins with ``# app.py: replace the last line`` is put into that file in place of its last line, one
         with ``# shop/settings.py: at the end`` at its end. A file in a folder is not imported: a command does.
toml     is written to the file its first line names.
sh       each line is a command, which exits 0, or as ``# exits 1`` behind it says.
console  the same for the lines after ``$``; the others are what must be printed, in this order. Numbers and ids may
         differ; ``…`` stands for anything.

A worker that does not drain, or a server, goes on in the background until the page ends, and must then stop well.
A block that a test reads by ``find_block`` is left to that test.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import Holdfast
from holdfast.core.events import WorkerStarted
from holdfast.worker import Worker
from tests.support.node import NODE
from tests.support.servers import PATIENCE, Port, until
from tests.support.warm import command_words, run_command

ROOT = Path(__file__).resolve().parents[2]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.(?:py|toml|jsonl))$")
_AT_THE_END = re.compile(r"# ([\w/]+\.py): at the end$")
_LAST_LINE = re.compile(r"# (\w+\.py): replace the last line$")
_EXPORT = re.compile(r"export (\w+)=(\S*)$")
_EXITS = re.compile(r"\s+# exits (\d+)$")
_PRINTED = re.compile(r"^(?:\s*print\(.*\)  # |.*  # prints: )(.+)$", re.MULTILINE)
_FOR_EVER = re.compile(r"(holdfast (worker start|dev|api)|node worker\.js|manage\.py runserver)\b(?!.*--drain)")
_STARTED = re.compile("worker_started|api_started|Starting development server")
_APP = re.compile(r"--app [\w:]+")
_PROCESSES = re.compile(r"--processes (\d+)")
_VARYING = re.compile(r"([0-9a-f]{8}-[0-9a-f-]{27})|(…)|(\d[\d.,]*)|(\s+)|([^\d\s…]+)")
_FOUND = re.compile(r'find_block\(\s*"([^"]+)",\s*("[^"]+"|\'[^\']+\')')
LEFT_OUT: Mapping[str, str] = {
    "pip install": "the package index is not asked by tests",
    "python -m venv": "tests have an environment",
    "make ": "the commands of a checkout run the tests",
}
"""Beginnings of commands that are not run, each with the reason."""
_OWN_WORKER = re.compile(r"Worker\(|worker\(")
PORTS = ("8000", "9091")
"""Ports of the pages, in place of which the reader takes free ones."""


class Block(NamedTuple):
    """One fenced block."""

    kind: str
    text: str
    line: int  # of the page


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(found[1], found[2], page.count("\n", 0, found.start()) + 1) for found in _FENCED.finditer(page)]


def find_block(page: str, beginning: str) -> Block:
    """Returns the block of a page that begins so, for a test that runs it; both arguments are literals in the call."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = [block for block in blocks(text) if block.text.lstrip().startswith(beginning)]
    return found


def find_modules(page: str) -> dict[str, str]:
    """Returns the text of each Python block that begins with the name of its file, by that name."""
    named = [(_FILE.match(block.text.partition("\n")[0]), block) for block in blocks(page) if block.kind == "python"]
    return {found[1]: block.text for found, block in named if found}


def check_session(typed: list[Block], output: str) -> None:
    """AssertionError unless the output has all that the blocks say they print, in this order."""
    _check_printed(
        [text for block in typed for text in _PRINTED.findall(block.text)], output, 0, has_exact_numbers=True
    )


def is_runnable(block: Block) -> bool:
    """Returns True if ``Reader.run`` writes a file of the block or runs it."""
    is_file = _FILE.match(block.text.partition("\n")[0]) is not None
    return block.kind in ("python", "sh", "console") or (block.kind == "toml" and is_file)


def is_run_by_another_test(page: str, block: Block) -> bool:
    """Returns True if a test passes the page and the beginning of the block to ``find_block``."""
    return any(name == page and block.text.lstrip().startswith(begin) for name, begin in _find_beginnings())


@cache
def _find_beginnings() -> set[tuple[str, str]]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {(page, ast.literal_eval(begin)) for text in texts for page, begin in _FOUND.findall(text)}


class Reader:
    """Does what a page says."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._module = types.ModuleType(name)
        self._space: dict[str, Any] = self._module.__dict__
        self._background: list[subprocess.Popen[bytes]] = []
        self._runner = asyncio.Runner()
        sys.path.insert(0, str(folder))
        sys.modules[name] = self._module
        programs = folder / ".programs"
        programs.mkdir()
        for program, words in (
            ("holdfast", f"{sys.executable} -m holdfast"),
            ("python", sys.executable),
            ("node", NODE),
        ):
            shim = programs / program
            shim.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            shim.chmod(0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        self._ports = {number: Port() for number in PORTS}
        self._environment = {
            **kept,
            "PATH": f"{programs}:{kept['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "HOLDFAST_LOG_FORMAT": "pretty",  # as on the reader's terminal
            "PYTHONUNBUFFERED": "1",
            "HOLDFAST_API_PORT": str(self._ports["8000"].number),  # where the page gives none
        }

    def run(self, block: Block) -> None:
        """Do what one block says; AssertionError, naming its line, where that is not so."""
        begin, _, rest = block.text.partition("\n")
        if changed := _LAST_LINE.match(begin):
            path = self._folder / changed[1]
            kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
            path.write_text("".join(kept) + rest, encoding="utf-8")
            return
        if extended := _AT_THE_END.match(begin):
            with (self._folder / extended[1]).open("a", encoding="utf-8") as file:
                file.write(rest)
            return
        first = _FILE.match(begin)
        if first:
            path = self._folder / first[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            importlib.invalidate_caches()
        if block.kind == "python" and first and "/" in first[1]:
            return
        if block.kind == "python" and first:
            module = importlib.import_module(path.stem)
            self._space.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        elif block.kind == "python":
            self._python(block)
        elif block.kind in ("sh", "console"):
            for command, expected in _commands(block):
                self._command(command, expected, block.line)

    def close(self) -> None:
        """Stop the workers; each must end well."""
        try:
            self._runner.close()
            for app in {value for value in self._space.values() if isinstance(value, Holdfast)}:
                app.sync.close()
            self._forget_modules()
            for worker in self._background:
                worker.send_signal(signal.SIGTERM)
            codes = [worker.wait(PATIENCE) for worker in self._background]
        finally:
            for worker in self._background:
                worker.kill()
                worker.wait()
            for port in self._ports.values():
                port.release()
        assert not any(codes), f"workers of the page ended with {codes}"

    # ── Python ────────────────────────────────────────────────────────────────────────────────────────────────
    def _python(self, block: Block) -> None:
        text = "\n" * block.line + block.text
        code = compile(text, f"{self._module.__name__}.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), self._worker(block.text):
            ran = types.FunctionType(code, self._space)()
            if inspect.iscoroutine(ran):
                self._runner.run(ran)
        _check_printed(_PRINTED.findall(block.text), printed.getvalue(), block.line, has_exact_numbers=True)

    def _forget_modules(self) -> None:
        """Undo what the page's imports left behind."""
        sys.path.remove(str(self._folder))
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if module is self._module or file.startswith(str(self._folder)):
                del sys.modules[name]
        if sqlmodel := sys.modules.get("sqlmodel.main"):  # it keeps the tables of all pages in one place
            sqlmodel.SQLModel.metadata.clear()
            sqlmodel.default_registry._class_registry.clear()

    @contextlib.contextmanager
    def _worker(self, text: str) -> Iterator[None]:
        """A worker beside a block that waits for a result and runs none: two would share the jobs of a drain."""
        app = self._space.get("app")
        if ".result(" not in text or _OWN_WORKER.search(text) or app is None or self._background:
            yield
            return
        serving = _Serving(app)
        serving.start()
        try:
            yield
        finally:
            serving.stop()

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────
    def _command(self, command: str, expected: list[str], line: int) -> None:
        if command.startswith(tuple(LEFT_OUT)):
            return
        for number, port in self._ports.items():
            command = command.replace(number, str(port.number))  # a reader's port is free; here it may be taken
        if given := _EXPORT.match(command):
            self._environment[given[1]] = given[2]
            return
        if _FOR_EVER.search(command):
            self._start(command.removesuffix(" &"))
            return
        wanted = int(found[1]) if (found := _EXITS.search(command)) else 0
        code, output = self._run(command)
        assert code == wanted, f"line {line}: {command}: exit code {code}\n{output}"
        _check_printed(expected, output, line)

    def _run(self, command: str) -> tuple[int | None, str]:
        """Returns the exit code and the output of a command."""
        words = command_words(command)
        if words is not None:
            return run_command(words, self._folder, self._environment, timeout=PATIENCE)
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return ran.returncode, ran.stdout

    def _start(self, command: str) -> None:
        """Start a worker or a server and wait until it says so; workers of ``holdfast`` must be listed, too."""
        log = self._folder / f".worker-{len(self._background)}.log"
        with log.open("wb") as output:
            worker = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=output,
            )
        self._background.append(worker)

        def started() -> bool:
            assert worker.poll() is None, f"{command}: exit code {worker.returncode}\n{log.read_text()}"
            return _STARTED.search(log.read_text()) is not None

        until(started, f"the start of {command}")
        if "worker start" in command and "manage.py" not in command:
            listing = f"holdfast worker list {found[0] if (found := _APP.search(command)) else ''}"
            processes = int(found[1]) if (found := _PROCESSES.search(command)) else 1
            until(
                lambda: len(self._run(listing)[1].splitlines()) > processes, f"{processes} listed workers of {command}"
            )


class _Serving(threading.Thread):
    """A worker in a thread of its own."""

    def __init__(self, app: Holdfast) -> None:
        super().__init__(name="worker-of-a-page")
        self._worker = Worker(app)
        self._loop = asyncio.new_event_loop()
        self._trouble: list[BaseException] = []
        self._has_begun = threading.Event()
        app.events.subscribe(lambda _: self._has_begun.set(), WorkerStarted)

    def start(self) -> None:
        """Returns once the worker has started: a block may close the application, and its store, at once."""
        super().start()
        assert self._has_begun.wait(PATIENCE), self._trouble

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._worker.run())
        except BaseException as error:
            self._trouble.append(error)

    def stop(self) -> None:
        """Stop and wait; raises what ended the worker before."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._worker.stop)
        self.join(PATIENCE)
        assert not self.is_alive()
        if self._trouble:
            raise self._trouble[0]


def _commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block and the lines it is to print."""
    text = block.text.replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.strip()]
    if block.kind == "sh":
        yield from ((line, []) for line in lines if not line.startswith("#"))
        return
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start][2:], lines[start + 1 : end]


def _check_printed(expected: list[str], output: str, line: int, *, has_exact_numbers: bool = False) -> None:
    """Each expected line is found in the output, in this order."""
    printed = iter(output.splitlines())
    for wanted in filter(lambda text: text.strip() != "…", expected):
        pattern = re.compile(_pattern(wanted.strip(), has_exact_numbers))
        assert any(pattern.search(each) for each in printed), f"line {line}: not printed: {wanted}\nbut:\n{output}"


def _pattern(text: str, has_exact_numbers: bool) -> str:
    parts = []
    for identifier, gap, number, space, rest in _VARYING.findall(text):
        if identifier:
            parts.append(r"[0-9a-f-]{36}")
        elif gap:
            parts.append(r".*")
        elif number:
            parts.append(rf"(?<!\d){re.escape(number)}(?!\d)" if has_exact_numbers else r"\d[\d.,]*")
        else:
            parts.append(r"\s+" if space else re.escape(rest))
    return "".join(parts)
