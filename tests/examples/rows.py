"""Which rows of the requirements the names of tests name: ``test_q7_q38_…``, ``j49_…``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def named_rows(source: str, seed: str) -> Iterator[int]:
    """The rows of one seed, by its letter, in the names of the functions of a module."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and re.match(r"(test_)?[a-z]\d", function.name):
            yield from map(int, re.findall(rf"(?<![a-z0-9]){seed}(\d+)(?=_)", function.name))


def checked_rows(pattern: str, seed: str) -> set[int]:
    """The rows that the test files beside this one name."""
    files = Path(__file__).parent.glob(pattern)
    return {row for path in files for row in named_rows(path.read_text(encoding="utf-8"), seed)}
