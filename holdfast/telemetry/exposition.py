"""Figures as documents: Prometheus text, OpenMetrics, or JSON, as the reader asks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError
from holdfast.telemetry.metric_types import Family, Reading, Series

JSON = "application/json"
TEXT = "text/plain"
OPEN = "application/openmetrics-text"


def wants_json(accept: str) -> bool:
    """Returns True if JSON is asked for before anything that Prometheus reads."""
    ranges = [each.split(";")[0].strip().lower() for each in accept.split(",")]
    read = {TEXT, OPEN, "application/vnd.google.protobuf"}
    return next((each == JSON for each in ranges if each == JSON or each in read), False)


def expose_metrics(readings: Iterable[Reading], *, prefix: str, accept: str) -> tuple[bytes, str]:
    """The document and its media type. ConfigError where text is asked for and its library is missing."""
    if wants_json(accept):
        return msgspec.json.encode({"metrics": [_plain(each, prefix) for each in readings]}), JSON
    try:
        from prometheus_client.exposition import choose_encoder
    except ModuleNotFoundError:
        raise ConfigError("metrics as text need prometheus-client; pip install 'holdfast[metrics]'") from None
    encode, media = choose_encoder(accept)
    return encode(_Collected(readings, prefix)), media


class _Collected:
    """Readings as the library's metrics, and the process's own figures."""

    def __init__(self, readings: Iterable[Reading], prefix: str) -> None:
        self._readings = readings
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        """In the order of the catalogue."""
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
    """Each bound with how many values lie at or below it, as the formats want it."""
    bounds = [*map(str, family.bounds), "+Inf"]
    return zip(bounds, accumulate(series.counts), strict=True)


def _plain(reading: Reading, prefix: str) -> dict[str, Any]:
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
