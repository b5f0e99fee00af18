"""Results of benchmarks as they are kept: reading and merging them, and which side of a comparison is better.

A file holds one run, as ``python -m benchmarks`` writes it, or several, as ``benchmarks.page`` keeps them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.rows import ROWS

_DIGITS = 6  # of a figure that is kept
_MORE = frozenset({"jobs/s", "commands/s", "1/s"})
_LESS = frozenset(
    {"ms", "ms, p95", "ms late", "µs", "s", "%", "% of a core", "MB", "bytes", "job times", "transactions/s"}
)
PRODUCTS = ("pgqueuer", "procrastinate", "dbos", "dramatiq", "taskiq", "saq", "arq", "celery", "streaq", "huey")
_QUICKEST = "the quickest"  # of several products, in a round
_BARE = frozenset({"asyncpg", "sqlite3", "subprocess.run"})


class UnusableResults(Exception):
    """Results that no page can be made from."""


class Figure(msgspec.Struct, omit_defaults=True):
    """Figure of a row: its rounds and their median, of Holdfast and of what it is compared with."""

    what: str
    unit: str
    median: float | None = None
    rounds: list[float] = []
    other: str | None = None
    other_median: float | None = None
    other_rounds: list[float] = []
    ratio: float | None = None
    target: str | None = None
    verdict: str | None = None
    missing: str | None = None

    @property
    def is_missed(self) -> bool:
        """Returns True if it has a target and does not meet it."""
        return self.verdict == "miss"


class Run(msgspec.Struct, omit_defaults=True):
    """Run of ``python -m benchmarks``: facts of the machine, and the figures of each row."""

    machine: dict[str, Any]
    quick: bool
    rounds: int
    rows: dict[str, list[Figure]]
    full: bool = False
    titles: dict[str, tuple[str, str]] = {}
    """Of each row: its title, and whose the first figures are."""


class Results(msgspec.Struct):
    """Runs whose rows are all different."""

    runs: list[Run]

    def rows(self) -> dict[str, list[Figure]]:
        """Returns the figures of every row, in the order of the benchmarks."""
        found = {row: figures for run in self.runs for row, figures in run.rows.items()}
        return {row: found[row] for row in (*ROWS, *sorted(found.keys() - set(ROWS))) if row in found}

    def run_of(self, row: str) -> int:
        """Returns the index of the run that measured a row."""
        return next(index for index, run in enumerate(self.runs) if row in run.rows)

    def title_of(self, row: str) -> tuple[str, str]:
        """Returns the title of a row, and whose the first figures are."""
        return self.runs[self.run_of(row)].titles[row]


def read_results(paths: Sequence[Path]) -> Results:
    """Returns the rows of all files; a later file replaces the rows of earlier ones. Raises ``UnusableResults``."""
    runs: list[Run] = []
    for path in paths:
        for run in _read(path):
            if run.quick:
                raise UnusableResults(f"{path} is of a quick run, whose figures mean nothing; measure without --quick")
            for earlier in runs:
                earlier.rows = {row: figures for row, figures in earlier.rows.items() if row not in run.rows}
            runs.append(run)
    for run in runs:
        run.titles = {row: run.titles.get(row) or _title(row) for row in run.rows}
    kept = [run for run in runs if run.rows]
    if not kept:
        raise UnusableResults("there is no row in these files")
    return Results(kept)


def _read(path: Path) -> list[Run]:
    try:
        document = msgspec.json.decode(path.read_bytes())
        runs = document["runs"] if isinstance(document, dict) and "runs" in document else [document]
        return msgspec.convert(_rounded(runs), list[Run])
    except OSError as error:
        raise UnusableResults(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnusableResults(f"{path} holds no results of benchmarks: {error}") from error


def _rounded(value: Any) -> Any:
    """Returns a document with fewer digits: a page made from the kept file equals the one made from the first."""
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
        case _:
            return value


def _title(row: str) -> tuple[str, str]:
    """Returns the title and subject of a row, from its module."""
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", row):
        raise UnusableResults(f"{row!r} is no name of a row")
    try:
        module = importlib.import_module(f"benchmarks.{row}")
    except ImportError as error:
        raise UnusableResults(f"row {row} has no title in its file, and no module: {error}") from error
    return module.TITLE, getattr(module, "SUBJECT", "Holdfast")


# ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────────────
def more_is_better(figure: Figure) -> bool:
    """Returns True for a rate, False for a duration or a cost. A target decides; without one, the unit does."""
    if figure.target is not None:
        return figure.target.startswith("≥")
    if figure.unit in _MORE or "share of the jobs" in figure.what:
        return True
    if figure.unit in _LESS:
        return False
    raise UnusableResults(f"{figure.what}: the unit {figure.unit!r} does not tell whether more is better")


def is_behind(figure: Figure) -> bool:
    """Returns True if the other side of a comparison is better. Medians decide where a round of the other's is zero,
    which has no ratio."""
    if figure.median is None or figure.other_median is None:
        return False
    ours, theirs = figure.median, figure.other_median
    if figure.ratio is not None and all(figure.other_rounds):
        ours, theirs = figure.ratio, 1
    return ours < theirs if more_is_better(figure) else ours > theirs


def is_product(other: str | None) -> bool:
    """Returns True if a figure is compared to another queue, not to Holdfast itself or to a bare loop."""
    return other is not None and (_QUICKEST in other or any(name in other.lower() for name in PRODUCTS))


def is_bare_loop(other: str | None) -> bool:
    """Returns True if a figure is compared to a loop of statements or calls without a queue."""
    return other in _BARE
