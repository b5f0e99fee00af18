"""The page of metrics names every metric there is, as the catalogue has it."""

from __future__ import annotations

from tests.support.metrics_table import table
from tests.support.pages import ROOT


def test_the_table_of_metrics_is_current() -> None:
    """If not: python -m tests.support.metrics_table"""
    assert table() in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
