"""Every row of the requirements of four seeds has a check that is named by it, or is put off here with a reason.

A: AtlasQueue, D: Delayed Queue, J: Atlas Jobs, S: streams. What rows say of Docker is checked by reading the files: no
test needs an engine.
"""

from __future__ import annotations

import pytest

from tests.examples.atlasqueue_support import EXAMPLE
from tests.examples.rows import checked_rows, named_rows

ROWS = {
    "a": frozenset(range(1, 154)),
    "d": frozenset(range(1, 57)),
    "j": frozenset(range(1, 83)),
    "s": frozenset(range(1, 77)),
}
FILES = {"a": "test_atlasqueue_*.py", "d": "test_delayed_queue_*.py", "j": "test_atlas_*.py", "s": "test_streams_*.py"}
LATER = {
    "a": dict.fromkeys(range(143, 148), "the issue of performance: load tests, and their results published"),
    "d": {},
    "j": {},
    "s": {},
}
"""Rows that are put off."""
OF_HOLDFAST = {
    "s": dict.fromkeys([47, 49, 50, 51], "workflows: tests of Holdfast itself claim them")
    | dict.fromkeys(range(52, 59), "fault injection: a part of Holdfast, not of the example")
}
"""Rows that a part of Holdfast meets, whatever the example does."""
MET_OTHERWISE = {
    "a": {150: "no downgrade: the way back is the backup, as its README says"},
    "d": {
        28: "unackedJobs is a sorted set by the end of the lease: removal from a list costs its length",
        49: "answered by measurement: with 1,000,000 jobs in one set, calls take 0.9 to 1.05 times as long",
        50: "answered by measurement: nothing is split, and D19 measures inserts beside the mover",
        51: "answered by measurement: one set needs no index of parts",
        52: "answered by measurement: nothing is split",
        53: "answered by measurement: one set needs no index of parts",
        54: "answered by measurement: one set needs no index of parts",
    },
}
"""Rows that a ruling meets otherwise, or that a measurement in the example's README answers. No test claims them."""
RULINGS = {13, 22, 23, 24, 25, 26}
"""The X rows, on what AtlasQueue leaves open."""


@pytest.mark.parametrize("seed", ROWS)
def test_every_row_is_checked_or_put_off(seed: str) -> None:
    checked = checked_rows(FILES[seed], seed)
    unclaimed = LATER[seed].keys() | MET_OTHERWISE.get(seed, {}).keys() | OF_HOLDFAST.get(seed, {}).keys()
    assert sorted(ROWS[seed] - checked - unclaimed) == []
    assert sorted(checked - ROWS[seed]) == []
    assert checked.isdisjoint(unclaimed)


def test_every_ruling_is_checked() -> None:
    assert sorted(RULINGS - checked_rows(FILES["a"], "x")) == []


def test_nothing_else_is_put_off() -> None:
    assert sorted((seed, row) for seed, rows in LATER.items() for row in rows) == [
        ("a", row) for row in range(143, 148)
    ]
    answered = (EXAMPLE.parent / "delayed_queue" / "README.md").read_text(encoding="utf-8")
    assert "No test claims the requirements of the partitions, D49 to D54. This measurement answers them" in answered
    assert "No test claims that it is a list (D28)" in answered
    assert "but for A143–A147" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "rows"),
    [("test_a7_a38_bad", [7, 38]), ("a49_lock", [49]), ("test_other_a9_thing", []), ("quick", []), ("test_a1x_y", [])],
)
def test_a_row_is_read_from_a_name(name: str, rows: list[int]) -> None:
    assert list(named_rows(f"def {name}(): pass", "a")) == rows


def test_rows_in_a_marker_are_counted() -> None:
    source = '@pytest.mark.rows("A7", "X38", "A40")\nasync def test_pages(): pass'
    assert list(named_rows(source, "a")) == [7, 40]
