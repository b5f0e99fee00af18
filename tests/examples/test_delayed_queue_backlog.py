"""Delayed Queue with a large backlog: one sorted set is enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from tests.examples.delayed_support import DATABASE, LEADER, SECOND, Blocking, Delayed, lateness
from tests.support.load import percentile, slowness
from tests.support.redis import shared

pytestmark = pytest.mark.timeout(400)

FEW, MANY = 1_000, 100_000
HOUR = 3600 * SECOND


def _job(due: int) -> NewJob:
    return NewJob(id=new_id(), task="callback", payload='{"payload": null}', run_at_us=due, max_attempts=None)


def _fill(delayed: Delayed, store: Blocking, count: int) -> None:
    """So many jobs for later, a millisecond apart."""
    begin = delayed.now() + HOUR
    for start in range(0, count, 5000):
        store.queueing.submit([_job(begin + number * 1000) for number in range(start, min(start + 5000, count))])


def _took(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _inserts(large: Blocking, small: Blocking, due: int) -> tuple[list[float], list[float]]:
    """Seconds of inserts into the one and into the other, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(1000):
        for store, took in zip((large, small), times, strict=True):
            took.append(_took(lambda store=store: store.queueing.submit([_job(due)])))
    return times


def _under_load(delayed: Delayed, far: int) -> tuple[list[float], list[float]]:
    """Two hundred inserts a second for half a minute while a worker moves and runs every twentieth: the seconds that
    each insert took, and how late each of these jobs was."""
    began, took, due = delayed.now(), [], []
    for number in range(30 * 200):
        moment = began + number * SECOND // 200
        while (now := delayed.now()) < moment:
            time.sleep((moment - now) / SECOND)
        if now > began + 30 * SECOND:
            break
        soon = number % 20 == 0
        ids: list[str] = []
        when = now + SECOND // 2 if soon else far
        took.append(_took(lambda ids=ids, when=when: ids.extend(delayed.submit(when))))
        due += ids if soon else []
    return took, lateness(delayed.all_ended(due))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Delayed]:
    """Another one, for comparison at the same moment."""
    small = Delayed(shared(), tmp_path, DATABASE + 1)
    yield small
    small.close()


@pytest.mark.rows("D17", "D18", "D19", "D55")
def test_large_backlog_slows_no_insert_look_or_start(delayed: Delayed, small: Delayed) -> None:
    """What the seed's partitions were to be for (D49 to D54) holds with one sorted set: they were not built."""
    far = delayed.now() + 100 * HOUR
    with delayed.store() as store, small.store() as other:
        _fill(delayed, store, MANY)
        _fill(small, other, FEW)
        many, few = _inserts(store, other, far)
        assert percentile(many, 0.99) <= 3 * percentile(few, 0.99)

        slow = slowness()
        looks = [_took(lambda: store.maintenance.promote_due(limit=200)) for _ in range(500)]
        assert percentile(looks, 0.99) < 0.010 * max(slow, slowness())

        with delayed.workers(LEADER):
            slow = slowness()
            inserts, late = _under_load(delayed, far)
            slow = max(slow, slowness())
            assert len(inserts) >= 0.9 * 30 * 200 / slow**2
            assert percentile(inserts, 0.99) < 0.050 * slow
            assert percentile(late, 0.99) <= 1.5 * slow

            slow = slowness()
            (late_by,) = lateness(delayed.all_ended(delayed.submit(delayed.now() + 2 * SECOND)))
            assert late_by <= 1.5 * max(slow, slowness())
    assert delayed.client.keys("delayed-queue:jobs*") == ["delayed-queue:jobs"]
    assert delayed.client.zcard("delayed-queue:jobs") > MANY
