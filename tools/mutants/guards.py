"""A mutant, and the files whose guards are taken out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FILES = (
    "core/lifecycle.py",
    "core/limits.py",
    "core/schedule.py",
    "core/unique.py",
    "core/dependencies.py",
    "stores/**/*",
    "transports/**/*",
    "app/submitter.py",
    "app/limits.py",
    "app/schedules.py",
    "app/workflows.py",
    "worker/context.py",
    "worker/runner.py",
    "worker/settler.py",
    "worker/heartbeat.py",
    "worker/fetcher.py",
    "worker/sweeper.py",
    "worker/tx_completion.py",
    "web/authentication.py",
    "web/keys*.py",
    "web/lease_tokens.py",
    "web/submissions.py",
)
"""Modules that decide, below ``holdfast/``."""

BOUNDARIES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


class Guard(NamedTuple):
    """A guard as a parser finds it, bytes ``start`` to ``end`` of the file. ``changes``: their replacements by name."""

    place: str
    start: int
    end: int
    changes: dict[str, bytes]


class Mutant(NamedTuple):
    """A changed guard. ``number`` tells guards of the same text in one place apart."""

    file: str
    place: str
    guard: str
    number: int
    change: str
    start: int
    end: int
    replacement: bytes

    @property
    def site(self) -> str:
        """Name of the guard: it stays when the lines around it change."""
        return f"{self.file}::{self.place}::{self.guard}::{self.number}"

    @property
    def name(self) -> str:
        """Name of the mutant."""
        return f"{self.site}::{self.change}"

    def apply(self, source: bytes) -> bytes:
        """Returns the file without the guard."""
        return source[: self.start] + self.replacement + source[self.end :]


def mutants_of(file: str, source: bytes, guards: Iterable[Guard]) -> Iterator[Mutant]:
    """Yields the mutants of a file."""
    seen: Counter[tuple[str, str]] = Counter()
    for guard in guards:
        text = " ".join(source[guard.start : guard.end].decode().split())
        text = text if len(text) <= 120 else f"{text[:100]} … {hashlib.sha1(text.encode()).hexdigest()[:8]}"  # noqa: S324
        seen[guard.place, text] += 1
        for change, replacement in guard.changes.items():
            yield Mutant(file, guard.place, text, seen[guard.place, text], change, guard.start, guard.end, replacement)


def guarded_files(package: Path) -> list[Path]:
    """Returns the files of ``FILES``; raises LookupError for a pattern that matches none."""
    found: set[Path] = set()
    for pattern in FILES:
        matches = {path for path in package.glob(pattern) if path.suffix in (".py", ".sql", ".lua")}
        if not matches:
            raise LookupError(f"no file of {package} matches {pattern!r}; correct FILES in tools/mutants/guards.py")
        found |= matches
    return sorted(found)


def load_mutants(root: Path, paths: Iterable[Path]) -> list[Mutant]:
    """Returns all mutants of these files."""
    from tools.mutants.lua_guards import lua_guards
    from tools.mutants.python_guards import python_guards
    from tools.mutants.sql_guards import sql_guards

    parsers = {".py": python_guards, ".sql": sql_guards, ".lua": lua_guards}
    found: list[Mutant] = []
    for path in paths:
        source = path.read_bytes()
        found += mutants_of(str(path.relative_to(root)), source, parsers[path.suffix](source))
    return found
