"""Bars as SVG: jobs of a queue by state, and ended jobs by time, with the same as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from holdfast.core.history import History, HistoryInterval, HistoryPoint
from holdfast.core.models import JobState, QueueInfo
from holdfast.views.documents import queue_document, to_builtins
from holdfast.views.formatting import format_timestamp
from holdfast.web.keys import Principal

SPANS = MappingProxyType({"1h": "last hour", "24h": "last day", "7d": "last week"})
"""Spans of the chart, by the word in the address."""
_HEIGHT = 100.0
_WIDTH = 0.8  # of an interval
_LOWEST = 4.0  # height of a bar for a number above 0
_STATES = ("succeeded", "cancelled", "dead")


_BAR = (JobState.RUNNING, JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING, JobState.FAILED, JobState.DEAD)


def queue_view(queue: QueueInfo) -> dict[str, Any]:
    """Returns the document of a queue with the seconds until it is empty, and the parts of its bar."""
    document: dict[str, Any] = to_builtins(queue_document(queue))
    states, pace = document["states"], document["ended_per_second"]
    ready = states["queued"]
    shown = [(state.value, states[state.value]) for state in _BAR if states[state.value]]
    total = sum(number for _, number in shown)
    parts, at = [], 0.0
    for state, number in shown:
        width = 100 * number / total
        parts.append({"state": state, "at": round(at, 2), "width": round(width, 2)})
        at += width
    drain = ready / pace if ready and pace and not queue.paused else None
    return {**document, "drain": drain, "bar": parts}


def chosen_span(text: str) -> str:
    """Returns a span of the chart; the first for anything else."""
    return text if text in SPANS else next(iter(SPANS))


class HistoryCharts:
    """Charts of one read of the history, drawn once for all keys of the same queues."""

    def __init__(self, history: History, span: str) -> None:
        self._history, self._span = history, span
        self._drawn: dict[tuple[str, ...], dict[str, Any]] = {}

    def find_chart(self, caller: Principal) -> dict[str, Any]:
        """Returns the chart of the queues that a principal may see."""
        if caller.queues not in self._drawn:
            self._drawn[caller.queues] = _draw_history(self._history, self._span, caller.allows_queue)
        return self._drawn[caller.queues]


def _draw_history(history: History, span: str, allows: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the bars of the chart, from the bottom, and its sentence, for some queues."""
    points = history.to_points(allows)
    highest = max((point.succeeded + point.cancelled + point.dead for point in points), default=0)
    bars = [bar for place, point in enumerate(points) for bar in _bars(place, point, highest)] if highest else []
    return {
        "span": span,
        "intervals": len(points),
        "bars": bars,
        "since": format_timestamp(points[0].start_us) if points else None,
        "text": _describe(points, SPANS[span], history.interval.value, highest),
    }


def _bars(place: int, point: HistoryPoint, highest: int) -> list[dict[str, Any]]:
    """Returns the parts of one interval's bar, stacked."""
    bars, top = [], _HEIGHT
    for state in _STATES:
        number = getattr(point, state)
        if number:
            height = _HEIGHT * number / highest
            top -= height
            bars.append({"state": state, "x": place, "y": round(top, 2), "width": _WIDTH, "height": round(height, 2)})
    return bars


def draw_hours(hours: Sequence[tuple[int, int]], now_us: int, length: int) -> dict[str, Any]:
    """Returns the bars of the last hours, ``length`` of them, and their sentence. ``hours``: start and number."""
    hour_us = HistoryInterval.HOUR.length_us
    first_us = HistoryInterval.HOUR.floor_us(now_us) - (length - 1) * hour_us
    shown = [((start - first_us) // hour_us, number) for start, number in hours if first_us <= start]
    highest = max((number for _, number in shown), default=0)
    heights = [(place, max(_HEIGHT * number / highest, _LOWEST)) for place, number in shown]
    total, span = sum(number for _, number in shown), "24 hours" if length == 24 else f"{length // 24} days"
    return {
        "intervals": length,
        "bars": [
            {"x": place, "y": round(_HEIGHT - height, 2), "width": _WIDTH, "height": round(height, 2)}
            for place, height in heights
        ],
        "text": f"{total:,} in {span}" + (f", at most {highest:,} in an hour" if total else ""),
    }


def _describe(points: Sequence[HistoryPoint], span: str, interval: str, highest: int) -> str:
    if not highest:
        return f"No job that has ended in the {span} is counted yet. Workers count once a minute."
    numbers = {state: sum(getattr(point, state) for point in points) for state in _STATES}
    parts = ", ".join(f"{number:,} {state}" for state, number in numbers.items() if number)
    return f"{sum(numbers.values()):,} jobs ended in the {span}: {parts}; at most {highest:,} in one {interval}."
