"""A call that waits for a locked file longer than its caller's patience is withdrawn: it changes nothing any more."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, NewJob
from holdfast.stores import open_store
from holdfast.stores.common.named_sql import load_statements
from holdfast.stores.sqlite import store as store_module
from tests.support.load import slowness


def _job() -> NewJob:
    return NewJob(id=new_id(), task="work", payload="{}")


def test_calls_on_a_locked_file_are_withdrawn(tmp_path: Path) -> None:
    async def submitting() -> tuple[list[Any], int, int]:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db", call_deadline=0.2)
        await store.open()
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            answers = await asyncio.gather(
                *[store.queueing.submit([_job()]) for _ in range(20)], return_exceptions=True
            )
            waiting = asyncio.create_task(store.query.count(JobFilter()))
            other.execute("rollback")
        seen = await waiting
        await store.queueing.submit([_job()])  # behind all those that were withdrawn
        stored = await store.query.count(JobFilter())
        await store.close()
        return answers, seen, stored

    answers, seen, stored = asyncio.run(submitting())

    assert [type(answer) for answer in answers] == [Unavailable] * 20
    assert "busy" in str(answers[0])
    assert "nothing was changed" in str(answers[0])
    assert (seen, stored) == (0, 1)


def test_withdrawn_call_leaves_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[asyncio.TimerHandle] = []

    async def submitting() -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def note_timer(*arguments: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*arguments))
            return timers[-1]

        store = open_store(f"sqlite:///{tmp_path}/jobs.db", call_deadline=0.2)
        await store.open()
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            monkeypatch.setattr(loop, "call_later", note_timer)
            with pytest.raises(Unavailable, match="busy"):
                await store.queueing.submit([_job()])
            monkeypatch.undo()
        await store.close()

    asyncio.run(submitting())

    assert timers[-1].cancelled()


def test_without_a_word_of_patience_the_lock_is_waited_for(tmp_path: Path) -> None:
    async def submitting() -> int:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db")
        await store.open()
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            waiting = asyncio.create_task(store.queueing.submit([_job()]))
            await asyncio.sleep(0.5)
            other.execute("rollback")
        await waiting
        stored = await store.query.count(JobFilter())
        await store.close()
        return stored

    assert asyncio.run(submitting()) == 1


def test_first_async_write_does_not_block_the_event_loop(tmp_path: Path) -> None:
    async def submitting() -> tuple[float, int]:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db")
        await store.open()
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            blocking = asyncio.create_task(asyncio.to_thread(lambda: store.blocking(store.queueing.submit([_job()]))))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            awaited = asyncio.create_task(store.queueing.submit([_job()]))
            await asyncio.sleep(0)
            took = time.monotonic() - began
            other.execute("rollback")
        await asyncio.gather(blocking, awaited)
        stored = await store.query.count(JobFilter())
        await store.close()
        return took, stored

    took, stored = asyncio.run(submitting())

    assert took < 1 * slowness()
    assert stored == 2


def test_durability_is_answered_while_a_write_waits(tmp_path: Path) -> None:
    """A probe for readiness asks, and must not wait for the connection that waits."""

    async def asking() -> str:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db")
        await store.open()
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            waiting = asyncio.create_task(store.queueing.submit([_job()]))
            await asyncio.sleep(0.1)
            asked = asyncio.create_task(store.health.durability())
            done, _ = await asyncio.wait([asked], timeout=60)
            other.execute("rollback")
        await waiting
        await store.close()
        return asked.result().text if done else "it waits, too"

    assert asyncio.run(asking()).startswith("journal_mode=wal, synchronous=FULL")


def test_closing_waits_for_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "with recursive c (n) as (select 1 union all select n + 1 from c) select n, '' from c where n < 0"
    monkeypatch.setattr(
        store_module, "load_statements", lambda path: {**load_statements(path), "find_unended": endless}
    )

    async def closing_it() -> tuple[list[Any], float]:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db", call_deadline=40.0)
        await store.open()
        where = JobFilter(error="a")
        searches = [
            asyncio.create_task(store.query.find(where)) for _ in range(2)
        ]  # one is under way, one waits for it
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await store.close()
        took = time.monotonic() - began
        return await asyncio.gather(*searches, return_exceptions=True), took

    answers, took = asyncio.run(closing_it())

    assert took < 1 * slowness()
    assert [(type(answer), "closed" in str(answer)) for answer in answers] == [(HoldfastError, True)] * 2


@pytest.mark.parametrize("jobs", [1, 50])
def test_lock_timeout_costs_nothing_without_other_writers(tmp_path: Path, jobs: int) -> None:
    async def submitting() -> int:
        store = open_store(f"sqlite:///{tmp_path}/jobs.db", call_deadline=5.0)
        await store.open()
        await asyncio.gather(*[store.queueing.submit([_job()]) for _ in range(jobs)])
        stored = await store.query.count(JobFilter())
        await store.close()
        return stored

    assert asyncio.run(submitting()) == jobs
