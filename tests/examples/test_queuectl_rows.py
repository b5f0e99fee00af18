"""Every row of the requirements of the queuectl seed has a check that names it, or a reason why none does."""

from __future__ import annotations

import pytest

from tests.examples.queuectl_support import EXAMPLE
from tests.examples.rows import checked_rows, named_rows

CHECKED = checked_rows("test_queuectl_*.py", "q")
ROWS = frozenset(range(1, 85))
MET_OTHERWISE = {
    51: "WAL with synchronous=FULL: no power cut has lost a job",
    59: "WAL is the only mode: nothing is left to choose",
}
"""Rows that a ruling meets otherwise. No test claims them, as the example's README says."""


def test_every_row_is_checked_and_no_other() -> None:
    assert sorted(ROWS - CHECKED) == sorted(MET_OTHERWISE)
    assert sorted(CHECKED - ROWS) == []
    assert "No test claims these two requirements, Q51 and Q59" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "rows"),
    [("test_q7_q38_bad", [7, 38]), ("q49_lock", [49]), ("test_other_q9_thing", []), ("quick", []), ("test_q1x_y", [])],
)
def test_a_row_is_read_from_a_name(name: str, rows: list[int]) -> None:
    assert list(named_rows(f"def {name}(): pass", "q")) == rows
