"""The other side as a process of its own: started, and controlled and asked for figures by lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_PATIENCE = 30.0  # seconds a child may take to end


class Child:
    """``python -m MODULE ARGUMENTS``, which says that it is ready before anything else."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def say(self, word: str) -> None:
        """Tell the child something."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """What the child says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a benchmark's process ended before its time: {self._process.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, word: str) -> dict[str, Any]:
        """Tell the child something and hear what it says to that."""
        self.say(word)
        return self.heard()

    def end(self) -> None:
        """Have the child end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, and the reason is on its way up
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def children(count: int, module: str, *arguments: object) -> Iterator[list[Child]]:
    """Several of the same kind, ready; ended afterwards, whatever happened."""
    with ExitStack() as started:
        family = []
        for _ in range(count):
            child = Child(module, *arguments)
            started.callback(child.end)
            family.append(child)
        for child in family:
            child.heard()
        yield family


@contextmanager
def child(module: str, *arguments: object) -> Iterator[Child]:
    """One of them."""
    with children(1, module, *arguments) as (only,):
        yield only
