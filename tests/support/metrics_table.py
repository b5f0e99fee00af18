"""The table of metrics in docs/metrics.md, made from the catalogue: ``python -m tests.support.metrics_table``."""

from __future__ import annotations

from holdfast.telemetry.metric_definitions import FAMILIES
from holdfast.telemetry.metric_types import Family

_EXPOSED_BY = {"worker": "worker", "api": "API", "both": "both"}


def table() -> str:
    """The whole table."""
    return "| metric | kind | labels | of | |\n|---|---|---|---|---|\n" + "".join(map(_row, FAMILIES))


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {_EXPOSED_BY[family.exposed_by]} | {family.doc} |\n"


if __name__ == "__main__":
    print(table(), end="")
