"""A README of an example as something to run: its blocks in their order, as its reader would, on a test's servers.

sh       each line is a command that exits 0. Programs that go on do so in the background, until the next ones.
python   runs after all that came before it; one that begins with ``# shop.py`` is written to that file instead.

What installs, starts containers, runs the tests or tells a story is left out; ``export`` is, too: the test has its own
servers. In place of an id stands the last one that was printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.examples.common import PATIENCE
from tests.examples.programs import ROOT, Program
from tests.support.servers import Port

_FENCED = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = ("pip ", "docker ", "pytest ", "export ", "cd ", "python -m streams story")
_GOES_ON = re.compile(
    r"((?:\w+=\S+ )*)(?:python -m )?(atlasqueue start|atlasqueue worker|delayed_queue start|streams start|atlas_jobs|"
    r"queuectl worker start --count 2|queuectl dashboard --port \d+)\b"
)
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9A-HJKMNP-TV-Z]{26}\b"
_BLOCK = """
import ast, asyncio, inspect, sys, types
code = compile(sys.stdin.read(), "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
ran = types.FunctionType(code, {})()
if inspect.iscoroutine(ran):
    asyncio.run(ran)
"""


class Readme:
    """``replaced``: what differs, addresses mostly. ``ready``: what programs that go on say when they are."""

    def __init__(
        self, path: Path, folder: Path, variables: Mapping[str, str], replaced: Mapping[str, str], ready: Sequence[str]
    ) -> None:
        self._text = path.read_text(encoding="utf-8")
        self._folder = folder
        self._variables = dict(variables)
        self._replaced = replaced
        self._ready = ready
        self._code = ""
        self._last_id = ""
        self.ran: list[str] = []
        self._workers: list[Program] = []

    def run(self) -> None:
        """Do what it says; AssertionError, naming the command, where one does not exit well."""
        with ExitStack() as background:
            for kind, text in _FENCED.findall(self._text):
                if kind == "python":
                    self._python(text)
                else:
                    self._commands(text.replace("\\\n", "").splitlines(), background)

    def _commands(self, lines: Sequence[str], background: ExitStack) -> None:
        if any(_GOES_ON.match(line) for line in lines):
            background.close()
        for line in lines:
            if not line or line.startswith(("#", *_LEFT_OUT)):
                continue
            if goes_on := _GOES_ON.match(line):
                background.enter_context(self._started(*goes_on.groups()))
            else:
                self._command(line)
            if line.endswith("worker stop"):  # a second signal to a process that is about to end would kill it
                assert [each.process.wait(PATIENCE) for each in self._workers] == [0] * len(self._workers)
            self.ran.append(line)

    def _started(self, variables: str, words: str) -> Program:
        provided = dict(each.split("=", 1) for each in self._expand(variables).split())
        program = Program(self._expand(words).split(), self._folder, {**self._variables, **provided})
        try:
            is_dashboard = words.startswith("queuectl dashboard")
            ready = self._ready[:1] if words.endswith(" worker") else self._ready
            for text in ["dashboard: "] if is_dashboard else ready:
                program.says(text)
        except BaseException:
            program.kill()
            raise
        if not is_dashboard:
            self._workers.append(program)
        return program

    def _expand(self, text: str) -> str:
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return re.sub(_ID, self._last_id, text) if self._last_id else text

    def _command(self, line: str) -> None:
        python = re.sub(r"(?<![\w./])python (?=-m)", f"{sys.executable} ", self._expand(line))
        command = re.sub(r"^(until )?(holdfast|queuectl) ", rf"\1{sys.executable} -m \2 ", python)
        output = self._done(["bash", "-c", command], line)
        self._last_id = ([self._last_id, *re.findall(_ID, output)])[-1]

    def _python(self, text: str) -> None:
        if named := re.match(r"# (\w+\.py)\n", text):
            (self._folder / named[1]).write_text(text, encoding="utf-8")
            return
        self._code += text
        self._done([sys.executable, "-c", _BLOCK], text, self._code)

    def _done(self, command: Sequence[str], what: str, given: str = "") -> str:
        done = subprocess.run(
            command,
            input=given,
            cwd=self._folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{what}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def run_documented_tests(readme: str, name: str) -> tuple[set[str], str]:
    """Runs the command of a README that runs its tests. Returns the files it collects, and the output of one test.

    The whole would run the test that asks. No server is named to it.
    """
    (command,) = re.findall(r"^pytest (tests/examples -k \w+)$", readme, re.MULTILINE)
    servers = ("HOLDFAST_", "DATABASE_URL", "REDIS_URL", "PG")
    variables = {name: value for name, value in os.environ.items() if not name.startswith((*servers, "PYTEST_"))}
    options = ("-q", "-s", "-n0", "-p", "no:cacheprovider", "-p", "tests.examples.narrowed")
    program = [sys.executable, "-m", "pytest", *command.split(), *options]
    environment = {**variables, "NARROWED_TO": name}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (collected,) = re.findall(r"^collected (.*)$", done.stdout, re.MULTILINE)
    return set(collected.split()), done.stdout


@contextmanager
def free_ports(number: int) -> Iterator[list[str]]:
    """So many ports of the test's own."""
    ports = [Port() for _ in range(number)]
    try:
        yield [str(port.number) for port in ports]
    finally:
        for port in ports:
            port.release()
