"""Every row of the requirements of AtlasQueue has a check that is named by it, or stands here with a reason."""

from __future__ import annotations

import re

from tests.examples.atlasqueue_support import EXAMPLE
from tests.examples.rows import checked_rows

CHECKED = checked_rows("test_atlasqueue_*.py", "a")
ROWS = frozenset(range(1, 154))
HTTP = "issue 5: the HTTP API, its answers and its OpenAPI document"
METRICS = "issue 5: metrics, of the API and of the worker"
DEPLOY = "issue 5: Dockerfiles, the compose file of the whole and its .env.docker"
LATER = {
    **dict.fromkeys((2, 3, 4, 32, 99, 100, 107, 117), HTTP),
    **dict.fromkeys((9, 25, *range(83, 97), 123, 125, 135, 151), METRICS),
    **dict.fromkeys((98, 127), DEPLOY),
    **dict.fromkeys((139, 141, 142), "issue 5: the tests of the API and of the metrics, which they count"),
    50: "the issue of flow control: rate limits",
    51: "the issue of workflows: chains and groups",
    **dict.fromkeys(range(143, 148), "the issue of performance: load tests and their report"),
}
"""Rows whose part of Holdfast is built later."""
HALF = {8, 33, 34, 35, 55, 57, 101, 102, 104, 106, *range(108, 117), 124}
"""Proved here without HTTP, through the application; their HTTP answers come with issue 5."""
RULINGS = {13, 22, 23, 24, 25, 26}
"""The X rows, on what AtlasQueue leaves open."""


def test_every_row_is_checked_or_comes_later() -> None:
    assert sorted(ROWS - CHECKED - LATER.keys()) == []
    assert sorted(RULINGS - checked_rows("test_atlasqueue_*.py", "x")) == []


def test_no_row_is_both_or_unheard_of() -> None:
    assert CHECKED.isdisjoint(LATER)
    assert CHECKED <= ROWS
    assert HALF <= CHECKED


def _numbers(text: str) -> set[int]:
    spans = [each.split("–") for each in text.replace("A", "").split(", ")]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


def test_the_readme_names_the_rows_that_wait() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    told = {why: _numbers(rows) for rows, why in re.findall(r"^\| (A\d[A0-9–, ]*) \| (.*?) \|$", readme, re.MULTILINE)}
    expected: dict[str, set[int]] = {}
    for row, why in LATER.items():
        expected.setdefault(why, set()).add(row)
    assert told == {**expected, "issue 5: their HTTP answers; what stands behind these is proved": HALF}
