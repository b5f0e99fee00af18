"""Delayed Queue with a large backlog: one sorted set is enough. Tests are named by the rows they prove."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.job import NewJob, new_id
from tests.examples.delayed_support import DATABASE, LEADER, SECOND, Blocked, Delayed, in_time, lateness
from tests.support.redis import shared

pytestmark = pytest.mark.timeout(400)

FEW, MANY = 1_000, 100_000
HOUR = 3600 * SECOND


def _job(due: int) -> NewJob:
    return NewJob(id=new_id(), task="callback", payload='{"payload": null}', run_at_us=due, max_attempts=None)


def _fill(delayed: Delayed, store: Blocked, count: int) -> None:
    """So many jobs for later, a millisecond apart."""
    begin = delayed.now() + HOUR
    for start in range(0, count, 5000):
        store.submit([_job(begin + number * 1000) for number in range(start, min(start + 5000, count))])


def _took(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def _slower(large: Blocked, small: Blocked, due: int) -> float:
    """By which factor an insert into the one takes longer than into the other, 99 % of them, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(200):
        for store, took in zip((large, small), times, strict=True):
            took.append(_took(lambda store=store: store.submit([_job(due)])))
    many, few = (_percentile(each, 0.99) for each in times)
    return many / few


def _under_load(delayed: Delayed, far: int) -> tuple[float, float]:
    """Two hundred inserts a second while a worker moves and runs every twentieth: the seconds that 99 % of the inserts
    take, and how late the jobs were."""
    began, took, due = delayed.now(), [], []
    for number in range(200):
        while delayed.now() < began + number * SECOND // 200:
            time.sleep(0.001)
        soon = number % 20 == 0
        ids: list[str] = []
        when = began + SECOND // 2 + number * 1000 if soon else far
        took.append(_took(lambda ids=ids, when=when: ids.extend(delayed.submit(when))))
        due += ids if soon else []
    return _percentile(took, 0.99), lateness(delayed.all_ended(due))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Delayed]:
    """Another one, for comparison at the same moment."""
    small = Delayed(shared(), tmp_path, DATABASE + 1)
    yield small
    small.close()


def test_d17_d18_d19_d49_d50_d51_d52_d53_d54_d55_a_large_backlog_needs_no_parts(
    delayed: Delayed, small: Delayed
) -> None:
    """What the seed's partitions were to be for (49 to 54) holds with one sorted set: they were not built."""
    far = delayed.now() + 100 * HOUR
    with delayed.store() as store, small.store() as other:
        _fill(delayed, store, MANY)
        _fill(small, other, FEW)
        in_time(lambda: _slower(store, other, far), 3.0, "99 % of inserts slower by a factor")
        in_time(lambda: _took(lambda: store.promote(limit=200)), 0.010, "a look for due jobs")
        with delayed.workers(LEADER):

            def insert() -> float:
                took, late = _under_load(delayed, far)
                return took if late <= 1.5 else late

            def late() -> float:
                return lateness(delayed.all_ended(delayed.submit(delayed.now() + SECOND)))

            in_time(insert, 0.050, "an insert under load")
            in_time(late, 1.5, "a lateness")
    assert delayed.client.keys("delayed-queue:jobs*") == ["delayed-queue:jobs"]
    assert delayed.client.zcard("delayed-queue:jobs") > MANY
