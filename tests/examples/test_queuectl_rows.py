"""Every row of the requirements of the queuectl seed has a check that is named by it, or stands here with a reason."""

from __future__ import annotations

import pytest

from tests.examples.rows import checked_rows, named_rows

CHECKED = checked_rows("test_queuectl_*.py", "q")
ROWS = frozenset(range(1, 85))
LATER = {68: "no issue yet: quotas per user and per job", 69: "no issue yet: sandboxes"}
"""Rows that lack something, and what."""


def test_every_row_is_checked_or_comes_later() -> None:
    assert sorted(ROWS - CHECKED - LATER.keys()) == []


def test_no_row_is_both_or_unheard_of() -> None:
    assert CHECKED.isdisjoint(LATER)
    assert CHECKED <= ROWS


@pytest.mark.parametrize(
    ("name", "rows"),
    [("test_q7_q38_bad", [7, 38]), ("q49_lock", [49]), ("test_other_q9_thing", []), ("quick", []), ("test_q1x_y", [])],
)
def test_a_row_is_read_from_a_name(name: str, rows: list[int]) -> None:
    assert list(named_rows(f"def {name}(): pass", "q")) == rows
