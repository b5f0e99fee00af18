"""Every row of the requirements of the queuectl seed has a check that is named by it, or stands here with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROWS = frozenset(range(1, 85))
LATER = {
    67: "issue 5, HTTP API and security: users, tokens",
    68: "issue 5, HTTP API and security: quotas per user and per job",
    69: "issue 5, HTTP API and security: sandboxes",
    75: "the issue of workflows: jobs that depend on jobs",
    76: "the issue of the console: statistics",
    77: "the issue of the console: the workers' health",
    78: "the issue of the console: history",
    79: "issue 5, observability: rules that alert",
}
"""Rows whose part of Holdfast is built later."""


def named_rows(source: str) -> Iterator[int]:
    """The rows that the names of tests and checks in a module name: ``test_q7_q38_…``, ``q49_…``."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and re.match(r"(test_)?q\d", function.name):
            yield from map(int, re.findall(r"(?<=q)\d+(?=_)", function.name))


def _checked() -> set[int]:
    here = Path(__file__).parent
    return {row for path in here.glob("test_queuectl_*.py") for row in named_rows(path.read_text(encoding="utf-8"))}


def test_every_row_is_checked_or_comes_later() -> None:
    assert sorted(ROWS - _checked() - LATER.keys()) == []


def test_no_row_is_both_or_unheard_of() -> None:
    assert _checked().isdisjoint(LATER)
    assert _checked() <= ROWS


@pytest.mark.parametrize(
    ("name", "rows"),
    [("test_q7_q38_bad", [7, 38]), ("q49_lock", [49]), ("test_other_q9_thing", []), ("quick", []), ("test_q1x_y", [])],
)
def test_a_row_is_read_from_a_name(name: str, rows: list[int]) -> None:
    assert list(named_rows(f"def {name}(): pass")) == rows
