"""Counters and histograms that accept batches: a hot loop only appends to a list for each job.

Histograms of one name have the same buckets in every process, so they can be added up. The number of values of a label
is capped: further values are counted together as ``other``.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from holdfast.core.errors import ConfigError

OTHER = "other"
"""Replaces every value of a label beyond the limit of distinct values."""

MAX_VALUE = 80
"""Maximum length of a label's value; longer ones are cut."""

Values = tuple[str, ...]
"""The values of a metric's labels, in their order."""


class Family(msgspec.Struct, frozen=True):
    """A metric: its name and its meaning.

    ``exposed_by``: the kind of process that exposes it.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    exposed_by: Literal["worker", "api", "both"] = "worker"


class Series(msgspec.Struct, frozen=True):
    """Counts of a histogram's buckets (the last one: above all bounds), and the sum of its observations."""

    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Returns the number of observations."""
        return sum(self.counts)


class Reading(msgspec.Struct, frozen=True):
    """A reading of a metric."""

    family: Family
    series: Mapping[Values, float | Series]


class LabelLimiter:
    """Limits the distinct values of a label to the first ``max_labels``."""

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._known: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        """Returns the value, or ``other``."""
        if value not in self._known and len(self._known) < self._max_labels:
            self._known[value] = value[:MAX_VALUE]
        return self._known.get(value, OTHER)


class Counter:
    """A counter for each combination of labels. Used under its owner's lock."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._values: dict[Values, float] = {} if family.labels else {(): 0.0}

    def add(self, number: float = 1.0, *labels: str) -> None:
        """Adds to the counter."""
        self._values[labels] = self._values.get(labels, 0.0) + number

    def read(self) -> Reading:
        """Returns the current reading."""
        return Reading(self.family, dict(self._values))


class Histogram:
    """A histogram for each combination of labels. Used under its owner's lock."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._bounds = family.bounds
        self._series: dict[Values, tuple[list[int], list[float]]] = {}
        if not family.labels:
            self._of(())

    def add(self, value: float, *labels: str) -> None:
        """Observes one value."""
        counts, total = self._of(labels)
        counts[bisect_left(self._bounds, value)] += 1
        total[0] += value

    def add_many(self, values: Sequence[float], *labels: str) -> None:
        """Observes a batch: sorts it once and searches each bound, instead of a bucket for each value."""
        counts, total = self._of(labels)
        ordered, start = sorted(values), 0
        for index, bound in enumerate(self._bounds):
            end = bisect_right(ordered, bound, start)
            counts[index] += end - start
            if end == len(ordered):
                break
            start = end
        else:
            counts[-1] += len(ordered) - start
        total[0] += sum(ordered)

    def read(self) -> Reading:
        """Returns the current reading."""
        series = {labels: Series(tuple(counts), total[0]) for labels, (counts, total) in self._series.items()}
        return Reading(self.family, series)

    def _of(self, labels: Values) -> tuple[list[int], list[float]]:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = [0] * (len(self._bounds) + 1), [0.0]
        return series


class MetricRegistry:
    """Counters and histograms by name, under one lock, for any thread."""

    def __init__(self, families: Sequence[Family]) -> None:
        self.lock = threading.Lock()
        self.counters = {each.name: Counter(each) for each in families if each.kind == "counter"}
        self.histograms = {each.name: Histogram(each) for each in families if each.kind == "histogram"}

    def read(self) -> Iterator[Reading]:
        """Yields all readings, taken under one lock."""
        with self.lock:
            counted = [each.read() for each in self.counters.values()]
            counted += [each.read() for each in self.histograms.values()]
        yield from counted


JSON = "application/json"
TEXT = "text/plain"
OPEN = "application/openmetrics-text"


def wants_json(accept: str) -> bool:
    """Returns True if an Accept header prefers JSON to the formats of Prometheus: by weight (0: never), then order."""
    ranges = [each.partition(";q=") for each in "".join(accept.lower().split()).split(",")]
    weighed = [(min((q.split(";")[0] or "1").rstrip("0."), "1"), text.split(";")[0]) for text, _, q in ranges]
    read = {JSON, TEXT, OPEN, "application/vnd.google.protobuf"}
    return max([("0", ""), *(each for each in weighed if each[1] in read)], key=lambda each: each[0])[1] == JSON


def expose_metrics(readings: Iterable[Reading], *, prefix: str, accept: str) -> tuple[bytes, str]:
    """Returns the document and its media type. ConfigError if the text format needs a missing library."""
    if wants_json(accept):
        return msgspec.json.encode({"metrics": [_reading_document(each, prefix) for each in readings]}), JSON
    try:
        from prometheus_client.exposition import choose_encoder
    except ModuleNotFoundError:
        raise ConfigError("metrics as text need prometheus-client; pip install 'holdfast[metrics]'") from None
    encode, media = choose_encoder(accept)
    return encode(_Collected(readings, prefix)), media


class _Collected:
    """Prometheus collector: the readings, and the metrics of the process."""

    def __init__(self, readings: Iterable[Reading], prefix: str) -> None:
        self._readings = readings
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        """Yields the metrics in the order of their definitions."""
        from prometheus_client import ProcessCollector

        for reading in self._readings:
            yield _metric(reading, self._prefix)
        yield from ProcessCollector(registry=None).collect()


def _metric(reading: Reading, prefix: str) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    family = reading.family
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    metric = kinds[family.kind](prefix + family.name, family.doc, labels=family.labels)
    for values, value in reading.series.items():
        if isinstance(value, Series):
            metric.add_metric(values, list(_cumulative(family, value)), value.total)
        else:
            metric.add_metric(values, value)
    return metric


def _cumulative(family: Family, series: Series) -> Iterator[tuple[str, int]]:
    """Returns each bound with the number of values at or below it."""
    bounds = [*map(str, family.bounds), "+Inf"]
    return zip(bounds, accumulate(series.counts), strict=True)


def _reading_document(reading: Reading, prefix: str) -> dict[str, Any]:
    family = reading.family
    return {
        "name": prefix + family.name,
        "type": family.kind,
        "help": family.doc,
        "series": [
            {"labels": dict(zip(family.labels, values, strict=True)), **_value(family, value)}
            for values, value in reading.series.items()
        ],
    }


def _value(family: Family, value: float | Series) -> dict[str, Any]:
    if isinstance(value, Series):
        return {"count": value.count, "sum": value.total, "buckets": dict(_cumulative(family, value))}
    return {"value": value if math.isfinite(value) else None}
