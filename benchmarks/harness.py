"""What every row shares: the plan of a run, its figures with their targets, and how they are shown and kept."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Size = TypeVar("Size", int, float)


class Plan(msgspec.Struct, frozen=True):
    """How large a run is. ``quick`` only shows that everything runs: its figures mean nothing."""

    quick: bool
    rounds: int
    folder: Path
    full: bool = False

    def size(self, usual: Size, quick: Size, full: Size | None = None) -> Size:
        """A number of jobs, calls or seconds; ``full``: where the usual run stays below what a target says."""
        if self.quick:
            return quick
        return full if self.full and full is not None else usual

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A folder for the files of one measurement, gone afterwards: these files are large."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


class Target(msgspec.Struct, frozen=True):
    """What a figure, or its ratio to the other's, has to be."""

    limit: float
    least: bool  # or else: at most
    ratio: bool

    def met(self, figure: float) -> bool:
        """Whether ``figure`` is good enough."""
        return figure >= self.limit if self.least else figure <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {number(self.limit)}{' ×' if self.ratio else ''}"


def at_least(limit: float) -> Target:
    """The figure itself must reach ``limit``."""
    return Target(limit, least=True, ratio=False)


def at_most(limit: float) -> Target:
    """The figure itself must not exceed ``limit``."""
    return Target(limit, least=False, ratio=False)


def times_at_least(limit: float) -> Target:
    """The figure must be ``limit`` times the other's."""
    return Target(limit, least=True, ratio=True)


def times_at_most(limit: float) -> Target:
    """The figure must not exceed ``limit`` times the other's."""
    return Target(limit, least=False, ratio=True)


class Line(msgspec.Struct):
    """One figure, once a round; ``theirs`` is what it is compared to, from the same rounds."""

    what: str
    unit: str
    ours: list[float] = []
    theirs: list[float] = []
    other: str = "Huey"
    target: Target | None = None
    missing: str = ""
    """Why rounds have no figure of ours: a feature that does not exist, or an error."""

    def add(self, ours: float, theirs: float | None = None) -> None:
        """Note one round."""
        self.ours.append(ours)
        if theirs is not None:
            self.theirs.append(theirs)

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios: both sides of one were measured within seconds of each other."""
        pairs = [(ours, theirs) for ours, theirs in zip(self.ours, self.theirs, strict=False) if theirs]
        return statistics.median(ours / theirs for ours, theirs in pairs) if pairs else None

    @property
    def verdict(self) -> str:
        """``PASS``, ``miss``, or nothing where there is no target."""
        if self.target is None or not self.ours:
            return ""
        figure = self.ratio if self.target.ratio else statistics.median(self.ours)
        return "PASS" if figure is not None and self.target.met(figure) else "miss"

    def document(self) -> dict[str, Any]:
        """The line as it is kept."""
        return {
            "what": self.what,
            "unit": self.unit,
            "median": statistics.median(self.ours) if self.ours else None,
            "rounds": self.ours,
            "other": self.other if self.theirs else None,
            "other_median": statistics.median(self.theirs) if self.theirs else None,
            "other_rounds": self.theirs,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "verdict": self.verdict or None,
            "missing": self.missing or None,
        }


def number(value: float) -> str:
    """A figure with as many digits as it is worth."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """The median, and the lowest and highest beside it."""
    middle = number(statistics.median(values))
    return f"{middle} [dim]({number(min(values))}-{number(max(values))})[/dim]" if len(values) > 1 else middle


def show(console: Console, title: str, lines: Sequence[Line], subject: str = "Holdfast") -> None:
    """One row as a table; ``subject`` is whose figures these are."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "unit", subject, "other", "", "ratio", "target", ""):
        table.add_column(heading, justify="left" if heading in ("", "unit") else "right")
    for line in lines:
        style = {"PASS": "green", "miss": "red"}.get(line.verdict, "")
        table.add_row(
            line.what,
            line.unit,
            " ".join(filter(None, [spread(line.ours) if line.ours else "", escape(line.missing)])),
            spread(line.theirs) if line.theirs else "",
            line.other if line.theirs else "",
            "" if line.ratio is None else f"{line.ratio:.2f} ×",
            "" if line.target is None else str(line.target),
            f"[{style}]{line.verdict}[/{style}]" if style else "",
        )
    console.print(table)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` per cent of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
