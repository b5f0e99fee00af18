"""Charts of the page of benchmarks, as SVG: bars in groups, and curves with two logarithmic axes.

A picture has a background and two themes of its own. Text is never measured: each label has the room of a long one.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness import number

WIDTH = 900
_MARGIN = 24
_HEAD = 100  # pixels of title, subtitle and legend
_STYLE = """
svg { --ground: #ffffff; --frame: #d0d7de; --text: #1f2328; --quiet: #59636e; --grid: #e4e8ec;
  --ours: #0969da; --peer: #bc4c00; --other: #8c959f; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --frame: #3d444d; --text: #f0f6fc; --quiet: #9198a1; --grid: #262c36;
    --ours: #4493f8; --peer: #f0883e; --other: #656c76 } }
text { fill: var(--text); font-size: 13px }
.ground { fill: var(--ground); stroke: var(--frame) }
.title { font-size: 18px; font-weight: 600 }
.bold { font-weight: 600 }
.quiet { fill: var(--quiet) }
.grid { stroke: var(--grid) }
.axis { stroke: var(--quiet) }
.range { stroke: var(--text); stroke-width: 1.5 }
.ours { fill: var(--ours) }
.peer { fill: var(--peer) }
.other { fill: var(--other) }
.line { fill: none; stroke-width: 2 }
.line.ours, .mark.ours { stroke: var(--ours) }
.line.peer, .mark.peer { stroke: var(--peer) }
.line { fill: none }
.dashed { stroke-dasharray: 6 4 }
.mark { stroke-width: 2 }
.hollow { fill: var(--ground) }
"""


class Bar(NamedTuple):
    """Bar of a chart: the median of a queue, with the lowest and the highest round. ``ours``: it is Holdfast's."""

    name: str
    value: float
    low: float
    high: float
    is_ours: bool


class Curve(NamedTuple):
    """Curve of a panel. A point without a value is a gap; 0 is drawn on the floor of the logarithmic axis."""

    name: str
    is_ours: bool
    is_dashed: bool
    points: Sequence[tuple[float, float | None]]


class Panel(NamedTuple):
    """Curves beside each other on one pair of axes."""

    title: str
    curves: Sequence[Curve]


class _Canvas:
    """An SVG under construction."""

    def __init__(self, title: str, description: str, height: float) -> None:
        size = {"width": f"{WIDTH}", "height": f"{height:g}", "viewBox": f"0 0 {WIDTH} {height:g}"}
        named = {"role": "img", "aria-labelledby": "title description"}
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **named})
        ET.SubElement(self._root, "title", id="title").text = title
        ET.SubElement(self._root, "desc", id="description").text = description
        ET.SubElement(self._root, "style").text = _STYLE
        self.rectangle("ground", 0.5, 0.5, WIDTH - 1, height - 1, rounded=8)
        self.text(title, _MARGIN, 36, "title")
        self.text(description, _MARGIN, 58, "quiet")

    def rectangle(self, kind: str, x: float, y: float, width: float, height: float, rounded: float = 2) -> None:
        self._add("rect", kind, x=x, y=y, width=width, height=height, rx=rounded)

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(self, kind: str, points: Sequence[tuple[float, float]]) -> None:
        self._add("polyline", kind, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def mark(self, kind: str, x: float, y: float) -> None:
        self._add("circle", f"mark {kind}", cx=x, cy=y, r=3.5)

    def text(self, text: str, x: float, y: float, kind: str = "", anchor: str = "start", turned: bool = False) -> None:
        turn = {"transform": f"rotate(-90 {x:g} {y:g})"} if turned else {}
        self._add("text", kind, x=x, y=y, **{"text-anchor": anchor}, **turn).text = text

    def _add(self, tag: str, kind: str, **attributes: float | str) -> ET.Element:
        given = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in attributes.items()}
        return ET.SubElement(self._root, tag, {**({"class": kind} if kind else {}), **given})

    def svg(self) -> str:
        """Returns the document."""
        ET.indent(self._root)
        return ET.tostring(self._root, encoding="unicode") + "\n"


# ── bars ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_BAR, _STEP, _GROUP = 18, 26, 34  # pixels: of a bar, from one bar to the next, of a group's heading
_NAMES, _VALUES = 150, 110  # pixels for the names before the bars, and for the values behind them


def draw_bars(title: str, description: str, unit: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Returns horizontal bars in groups, on one linear axis that begins at zero, each with the range of its rounds."""
    top, bottom = _HEAD - 24, 56
    height = top + sum(_GROUP + _STEP * len(bars) for _, bars in groups) + bottom
    canvas = _Canvas(title, description, height)
    left, right = _MARGIN + _NAMES, WIDTH - _MARGIN - _VALUES
    step, last = _linear_steps(max(bar.high for _, bars in groups for bar in bars))
    floor = height - bottom
    for index in range(round(last / step) + 1):
        x = left + (right - left) * index * step / last
        canvas.line("grid", x, top + 8, x, floor)
        canvas.text(number(index * step), x, floor + 18, "quiet", "middle")
    canvas.text(unit, (left + right) / 2, floor + 40, "quiet", "middle")
    y = float(top)
    for name, bars in groups:
        canvas.text(name, _MARGIN, y + 24, "bold")
        y += _GROUP
        for bar in bars:
            _draw_bar(canvas, bar, left, (right - left) / last, y)
            y += _STEP
    canvas.line("axis", left, top + 8, left, floor)
    return canvas.svg()


def _draw_bar(canvas: _Canvas, bar: Bar, left: float, scale: float, y: float) -> None:
    middle = y + _BAR / 2
    canvas.text(bar.name, left - 10, middle + 4.5, "bold" if bar.is_ours else "", "end")
    canvas.rectangle("ours" if bar.is_ours else "other", left, y, max(1, bar.value * scale), _BAR)
    if bar.high > bar.low:
        canvas.line("range", left + bar.low * scale, middle, left + bar.high * scale, middle)
        for end in (bar.low, bar.high):
            canvas.line("range", left + end * scale, middle - 4, left + end * scale, middle + 4)
    canvas.text(number(bar.value), left + bar.high * scale + 8, middle + 4.5, "bold" if bar.is_ours else "")


def _linear_steps(highest: float) -> tuple[float, float]:
    """Returns the distance of the grid lines, and the last of them, which is at or above the highest value."""
    power = 10.0 ** math.floor(math.log10(max(highest, 1e-9)))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2) if factor * power * 6 >= highest)
    return step, step * math.ceil(highest / step)


# ── curves ────────────────────────────────────────────────────────────────────────────────────────────────────────
_PLOT = 300  # pixels: height of a plot
_AXIS = 62  # pixels for the labels before a plot


def draw_curves(title: str, description: str, axes: tuple[str, str], panels: Sequence[Panel]) -> str:
    """Returns one or more panels side by side, with the same logarithmic axes, and one legend for all.

    ``axes``: what is written at the horizontal and at the vertical axis. A value of 0 is a hollow mark on the floor.
    """
    top = _HEAD + 34
    canvas = _Canvas(title, description, top + _PLOT + 64)
    _draw_legend(canvas, panels[0].curves)
    points = [point for panel in panels for curve in panel.curves for point in curve.points]
    spans = _span([x for x, _ in points]), _span([y for _, y in points if y])
    width = (WIDTH - 2 * _MARGIN - _AXIS * len(panels)) / len(panels)
    for index, panel in enumerate(panels):
        left = _MARGIN + _AXIS + index * (width + _AXIS)
        plot = _Plot(canvas, left, top, width, *spans)
        plot.draw_axes(panel, axes)
        for curve in panel.curves:
            plot.draw(curve)
    return canvas.svg()


def _draw_legend(canvas: _Canvas, curves: Sequence[Curve]) -> None:
    for index, curve in enumerate(curves):
        x, y = _MARGIN + index * 190, 84
        side = "ours" if curve.is_ours else "peer"
        canvas.path(f"line {side}{' dashed' if curve.is_dashed else ''}", [(x, y), (x + 36, y)])
        canvas.mark(side, x + 18, y)
        canvas.text(curve.name, x + 44, y + 4.5)


class _Plot:
    """The axes of one panel, and the curves on them."""

    def __init__(
        self,
        canvas: _Canvas,
        left: float,
        top: float,
        width: float,
        x_span: tuple[float, float],
        y_span: tuple[float, float],
    ) -> None:
        self._canvas, self._left, self._top, self._width = canvas, left, top, width
        self._x_span, self._y_span = x_span, y_span
        self._floor = top + _PLOT

    def draw_axes(self, panel: Panel, axes: tuple[str, str]) -> None:
        """Draws the grid, its labels and the title of the panel."""
        right = self._left + self._width
        self._canvas.text(panel.title, self._left, self._top - 14, "bold")
        for y in _ticks(self._y_span):
            self._canvas.line("grid", self._left, self._y(y), right, self._y(y))
            self._canvas.text(number(y), self._left - 8, self._y(y) + 4.5, "quiet", "end")
        for x in sorted({x for curve in panel.curves for x, _ in curve.points}):
            self._canvas.line("grid", self._x(x), self._top, self._x(x), self._floor)
            self._canvas.text(number(x), self._x(x), self._floor + 20, "quiet", "middle")
        self._canvas.line("axis", self._left, self._floor, right, self._floor)
        self._canvas.line("axis", self._left, self._top, self._left, self._floor)
        self._canvas.text(axes[0], self._left + self._width / 2, self._floor + 44, "quiet", "middle")
        self._canvas.text(axes[1], self._left - 46, self._top + _PLOT / 2, "quiet", "middle", turned=True)

    def draw(self, curve: Curve) -> None:
        """Draws one curve; a gap ends its line."""
        side = "ours" if curve.is_ours else "peer"
        for points in _unbroken(curve.points):
            self._canvas.path(
                f"line {side}{' dashed' if curve.is_dashed else ''}", [(self._x(x), self._y(y)) for x, y in points]
            )
            for x, y in points:
                self._canvas.mark(side if y else f"{side} hollow", self._x(x), self._y(y))

    def _x(self, value: float) -> float:
        return self._left + self._width * _share(value, self._x_span)

    def _y(self, value: float) -> float:
        return self._floor - _PLOT * _share(value, self._y_span)


def _unbroken(points: Sequence[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    """Yields the stretches of points that have values."""
    stretch: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            stretch.append((x, y))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _share(value: float, span: tuple[float, float]) -> float:
    """Returns where a value is between the ends of an axis, from 0 to 1."""
    low, high = (math.log10(end) for end in span)
    return 0.0 if value <= 0 else (math.log10(value) - low) / (high - low)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of an axis: the steps 1, 2, 5, 10 … that enclose all values with a little room."""
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    steps = [step for power in range(-7, 8) for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    return (max(step for step in steps if step <= low * 0.9), min(step for step in steps if step >= high * 1.1))


def _ticks(span: tuple[float, float]) -> list[float]:
    """Returns the labelled values of an axis: 1, 2, 5 of each power of ten, or only the powers if there are many."""
    factors = (1, 2, 5) if span[1] / span[0] <= 3000 else (1,)
    values = [float(f"{factor}e{power}") for power in range(-7, 8) for factor in factors]
    return [value for value in values if span[0] * 0.999 <= value <= span[1] * 1.001]
