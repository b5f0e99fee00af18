"""Requirement rows that tests claim: by marker (``@pytest.mark.rows("Q7")``) or by name (``test_q7_q38_…``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def named_rows(source: str, seed: str) -> Iterator[int]:
    """Yields the rows of one seed, given by its letter, that the functions of a module claim."""
    for function in ast.parse(source).body:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _rows_in_markers(function, seed.upper())
            if re.match(r"(test_)?[a-z]\d", function.name):
                yield from map(int, re.findall(rf"(?<![a-z0-9]){seed}(\d+)(?=_)", function.name))


def _rows_in_markers(function: ast.FunctionDef | ast.AsyncFunctionDef, letter: str) -> Iterator[int]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rows":
            rows = [ast.literal_eval(argument) for argument in decorator.args]
            yield from (int(row[1:]) for row in rows if row.startswith(letter))


def checked_rows(pattern: str, seed: str) -> set[int]:
    """Returns the rows that the test files beside this one claim."""
    files = Path(__file__).parent.glob(pattern)
    return {row for path in files for row in named_rows(path.read_text(encoding="utf-8"), seed)}
