"""Counters and histograms: a batch counts as its values one by one do, labels are capped, and figures add up."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.metric_definitions import FAMILIES
from holdfast.telemetry.metric_types import MAX_VALUE, OTHER, Family, Histogram, LabelLimiter, MetricRegistry, Series

SECONDS = Family(name="x_seconds", kind="histogram", doc="X.", labels=("of",), bounds=(0.1, 1.0, 10.0))
EVENTS = Family(name="x_total", kind="counter", doc="X.")


def series(histogram: Histogram, *labels: str) -> Series:
    value = histogram.read().series[labels]
    assert isinstance(value, Series)
    return value


def test_a_value_at_a_bound_lies_below_it() -> None:
    histogram = Histogram(SECONDS)
    for value in (0.1, 1.0, 10.0, 10.5):
        histogram.add(value, "a")

    assert series(histogram, "a").counts == (1, 1, 1, 1)


@given(st.lists(st.floats(-1, 20) | st.sampled_from((0.1, 1.0, 10.0)), max_size=50))
def test_a_batch_counts_as_its_values_one_by_one(values: list[float]) -> None:
    together, apart = Histogram(SECONDS), Histogram(SECONDS)
    together.add_many(values, "a")
    for value in values:
        apart.add(value, "a")

    text = series(together, "a")
    assert text.count == len(values)
    if values:
        assert text.counts == series(apart, "a").counts
        assert abs(text.total - sum(values)) < 1e-9


def test_beyond_the_cap_values_are_counted_together() -> None:
    cap = LabelLimiter(2)

    assert [cap(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_a_long_value_is_cut() -> None:
    assert LabelLimiter(1)("x" * 500) == "x" * MAX_VALUE


def test_threads_do_not_lose_each_others_counts() -> None:
    figures = MetricRegistry([EVENTS])

    def count() -> None:
        for _ in range(2000):
            with figures.lock:
                figures.counters["x_total"].add()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert next(figures.read()).series == {(): 8000.0}


def test_names_are_as_prometheus_has_them() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert (family.kind == "histogram") == bool(family.bounds), family.name
        assert list(family.bounds) == sorted(set(family.bounds)), family.name
        assert family.doc.endswith("."), family.name
        assert "le" not in family.labels, family.name
