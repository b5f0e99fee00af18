"""When a process holds the lock that asks for notifications of ready jobs, and how long it waits between claims."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from holdfast.stores.postgres import listener_lock
from holdfast.stores.postgres.listener_lock import CLAIM_INTERVAL, RECHECK_SECONDS, ListenerLock
from holdfast.stores.postgres.pool import Connection
from holdfast.stores.postgres.store import PostgresStore

_SQL = PostgresStore("postgresql://localhost/jobs").sql


class _Connection:
    """A connection that only keeps what it was asked to execute."""

    def __init__(self) -> None:
        self.executed: list[str] = []

    async def execute(self, sql: str, *, timeout: float) -> None:
        assert timeout
        self.executed.append(sql.partition("(")[0].removeprefix("select pg_advisory_"))


class _Time:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    time = _Time()
    monkeypatch.setattr(listener_lock, "time", time)
    return time


def wait(lock: ListenerLock, time: _Time | None = None, *, notified_after: float = 1.0) -> float:
    """Returns how long a wait lasts if no notification comes; in ``time`` it lasts until one does."""
    with lock.register_wait() as max_wait:
        if time is not None:
            time.now += min(max_wait, notified_after)
        return max_wait


def work(lock: ListenerLock, time: _Time, *, rate: float, seconds: float) -> None:
    """Claims that find jobs, so many a second."""
    for _ in range(int(rate * seconds)):
        time.now += 1 / rate
        lock.count_claim(found=True)


def run_attached(use: Callable[[ListenerLock], Awaitable[None]], time: _Time) -> list[str]:
    """Runs this with a lock that a wait wants, and its connection, which has taken it; returns what was executed."""
    connection = _Connection()

    async def run() -> None:
        lock = ListenerLock(_SQL, "ready")
        wait(lock)
        time.now += 1
        with lock.attach_to(cast("Connection", connection)):
            await lock.adjust_lock()
            await use(lock)
        lock.close()

    asyncio.run(run())
    return connection.executed


def test_process_without_a_connection_claims_again_until_it_has_one(time: _Time) -> None:
    """A job that is submitted before the process listens sends it no notification."""

    async def run() -> float:
        lock = ListenerLock(_SQL, "ready")
        found = wait(lock)
        lock.close()
        return found

    assert 0.01 <= asyncio.run(run()) <= 0.1


@pytest.mark.parametrize(("kind", "executed"), [("ready", []), ("ended", ["lock_shared"])])
def test_lock_of_ready_jobs_alone_needs_a_wait(time: _Time, kind: str, executed: list[str]) -> None:
    connection = _Connection()

    async def run() -> None:
        lock = ListenerLock(_SQL, kind)
        with lock.attach_to(cast("Connection", connection)):
            await lock.adjust_lock()

    asyncio.run(run())
    assert connection.executed == executed


def test_wait_that_begins_during_the_release_claims_again(time: _Time) -> None:
    """The lock is free before it is retaken, so a job may come that is not notified of."""
    waits = []

    class Releasing(_Connection):
        async def execute(self, sql: str, *, timeout: float) -> None:
            await super().execute(sql, timeout=timeout)
            if self.executed[-1] == "unlock_shared":
                time.now += 1
                waits.append(wait(lock))

    lock = ListenerLock(_SQL, "ready")

    async def run() -> None:
        wait(lock)
        with lock.attach_to(cast("Connection", Releasing())):
            await lock.adjust_lock()
            work(lock, time, rate=1000, seconds=1)
            await lock.adjust_lock()
            assert lock.changed.is_set()
            await lock.adjust_lock()
            assert lock.is_held
        lock.close()

    asyncio.run(run())
    assert waits == [CLAIM_INTERVAL]


def test_process_claims_again_after_it_has_taken_the_lock(time: _Time) -> None:
    """At once: its last claim may have been before that. Then for what was being committed at that moment."""

    async def use(lock: ListenerLock) -> None:
        waits = [wait(lock, time) for _ in range(6)]
        assert waits[0] == 0
        assert waits == sorted(waits)
        assert sum(waits[:4]) == pytest.approx(RECHECK_SECONDS)
        assert waits[4:] == [math.inf, math.inf]

    assert run_attached(use, time) == ["lock_shared"]


def test_waits_cut_short_do_not_end_the_claims_earlier(time: _Time) -> None:
    async def use(lock: ListenerLock) -> None:
        end = time.now + RECHECK_SECONDS
        while time.now < end:
            assert wait(lock, time, notified_after=0.001) < math.inf
        assert wait(lock, time) == math.inf

    assert run_attached(use, time) == ["lock_shared"]


@pytest.mark.parametrize(("rate", "is_polling"), [(100, False), (150, False), (300, True), (1000, True)])
def test_process_that_finds_jobs_all_the_time_polls(time: _Time, rate: int, *, is_polling: bool) -> None:
    async def use(lock: ListenerLock) -> None:
        work(lock, time, rate=rate, seconds=1)
        await lock.adjust_lock()
        assert (wait(lock) == CLAIM_INTERVAL) == is_polling

    assert run_attached(use, time) == (["lock_shared", "unlock_shared"] if is_polling else ["lock_shared"])


def test_process_takes_the_lock_again_when_claims_find_less(time: _Time) -> None:
    async def use(lock: ListenerLock) -> None:
        work(lock, time, rate=1000, seconds=1)
        await lock.adjust_lock()
        time.now += 0.5
        assert wait(lock) == CLAIM_INTERVAL  # it does not have it yet
        assert lock.changed.is_set()
        time.now += CLAIM_INTERVAL
        await lock.adjust_lock()
        assert wait(lock) == 0

    assert run_attached(use, time) == ["lock_shared", "unlock_shared", "lock_shared"]


def test_claims_that_find_nothing_keep_no_process_busy(time: _Time) -> None:
    async def use(lock: ListenerLock) -> None:
        work(lock, time, rate=1000, seconds=1)
        for _ in range(100):
            time.now += CLAIM_INTERVAL
            lock.count_claim(found=False)
        wait(lock)
        assert lock.changed.is_set()

    assert run_attached(use, time) == ["lock_shared"]


def test_new_connection_takes_the_lock_that_a_wait_wants(time: _Time) -> None:
    async def run() -> list[str]:
        lock, connection = ListenerLock(_SQL, "ready"), _Connection()
        with lock.register_wait():
            with lock.attach_to(cast("Connection", _Connection())):
                await lock.adjust_lock()
            assert not lock.is_held
            with lock.attach_to(cast("Connection", connection)):
                await lock.adjust_lock()
        lock.close()
        return connection.executed

    assert asyncio.run(run()) == ["lock_shared"]
