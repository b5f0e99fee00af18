"""Pictures of the page of benchmarks, from its results: drains beside every peer, and latency at each rate by store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.charts import Bar, Curve, Panel, draw_bars, draw_curves
from benchmarks.result_files import Figure, Results, is_product
from benchmarks.rows import STORES

_DRAINS = ("one worker process", "one worker process, everysec")
_PAIRS = ((1, 1), (4, 4))
_ROLES = (("submitting process", "es"), ("worker process", "es"))
_POINT = re.compile(r"(\d+) to (\d+), ([\d,]+) a second, (p\d+)")
_NAMES = {
    "dramatiq": "Dramatiq",
    "taskiq-stream": "TaskIQ, stream",
    "taskiq-list": "TaskIQ, list",
    "saq": "SAQ",
    "celery": "Celery",
}
"""Names of products, where a line has that of a module."""
_LOSING = frozenset({"Huey", "TaskIQ, list"})
"""Queues that do not run a job again whose process was killed, as they are set here."""


class Picture(NamedTuple):
    """Chart as SVG, with its title."""

    title: str
    svg: str


def draw_pictures(results: Results) -> dict[str, Picture]:
    """Returns the pictures that there are figures for, by the names of their files."""
    rows = results.rows()
    drawn = {"drain.svg": _draw_drains(rows)}
    drawn |= {f"latency-{store}.svg": _draw_latency(store, rows.get(f"{store}.curve", ())) for store in STORES}
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _draw_drains(rows: dict[str, list[Figure]]) -> Picture | None:
    groups = [(name, _bars(rows.get(f"{store}.drain", ()))) for store, name in STORES.items()]
    groups = [(name, bars) for name, bars in groups if bars]
    if not groups:
        return None
    title = "Jobs a second of one worker process"
    text = "Empty jobs, queued beforehand; committed completions. More is better."
    if any(bar.name.endswith("*") for _, bars in groups for bar in bars):
        text += " * does not run a job again whose process was killed."
    return Picture(title, draw_bars(title, text, "jobs a second", groups))


def _bars(figures: Sequence[Figure]) -> list[Bar]:
    """Returns the bar of Holdfast, and of every peer that a drain by one process names."""
    compared = [
        figure
        for figure in figures
        if figure.what in _DRAINS and is_product(figure.other) and not (figure.other or "").startswith("the ")
    ]
    bars = [Bar("Holdfast", each.median, min(each.rounds), max(each.rounds), True) for each in compared if each.median]
    peers = [
        Bar(_marked(_product(each.other)), each.other_median, min(each.other_rounds), max(each.other_rounds), False)
        for each in compared
        if each.other_median
    ]
    return bars[:1] + sorted(peers, key=lambda bar: -bar.value)


def _draw_latency(store: str, figures: Sequence[Figure]) -> Picture | None:
    panels = [panel for pair in _PAIRS if (panel := _panel(pair, figures)) is not None]
    if not panels:
        return None
    title = f"{STORES[store]}: from the return of a submission to the start of its handler"
    text = "Single submissions at random gaps. Less is better."
    axes = ("submissions a second (logarithmic)", "milliseconds (logarithmic)")
    return Picture(title, draw_curves(title, text, axes, panels))


def _panel(pair: tuple[int, int], figures: Sequence[Figure]) -> Panel | None:
    found = [(figure, match) for figure in figures if (match := _POINT.fullmatch(figure.what))]
    of_pair = [(figure, match) for figure, match in found if (int(match[1]), int(match[2])) == pair]
    curves: list[Curve] = []
    for percentile in ("p99", "p50"):
        points = [(float(match[3].replace(",", "")), figure) for figure, match in of_pair if match[4] == percentile]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        dashed = percentile == "p50"
        curves.append(Curve(f"Holdfast, {percentile}", True, dashed, [(rate, each.median) for rate, each in points]))
        other = next((each.other for _, each in points if each.other), None)
        if other is not None:
            theirs = [(rate, each.other_median) for rate, each in points]
            curves.append(Curve(f"{_product(other)}, {percentile}", False, dashed, theirs))
    submitters, workers = (
        f"{count} {what}{'' if count == 1 else end}" for count, (what, end) in zip(pair, _ROLES, strict=True)
    )
    title = f"{submitters}, {workers}"
    return Panel(title, curves) if curves else None


def _product(name: str | None) -> str:
    return _NAMES.get(name or "", name or "")


def _marked(product: str) -> str:
    return f"{product} *" if product in _LOSING else product
