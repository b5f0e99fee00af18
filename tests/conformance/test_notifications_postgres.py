"""Notifications to other processes that want them: with a lone job, after the commit of everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, LiteralString

import psycopg
import pytest

from holdfast.stores.base import Store
from holdfast.stores.postgres.pool import parse_url
from holdfast.stores.postgres.store import PostgresStore
from tests.conformance.support import Opener, new_job, put, running, settle
from tests.conformance.test_wait import quiet
from tests.support.spoiling import session

_PATIENCE = 60.0
_LONG = 120.0
_SLOW = 20301130  # of advisory locks, for slow commits
_HOLDERS = """select count(*) from pg_locks where locktype = 'advisory' and classid = 1215261799 and granted
    and objid = hashtext(%s)::bigint & 4294967295"""


@contextmanager
def listening(url: str, kind: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that listens to a channel, and holds no lock."""
    with session(url) as other:
        other.autocommit = True
        other.execute(f'listen "{parse_url(url).schema}_{kind}"'.encode())
        yield other


def acquire_lock(listener: psycopg.Connection[Any], url: str, kind: str) -> None:
    """Takes the lock of a process that wants notifications."""
    listener.execute(PostgresStore(url).sql[f"acquire_{kind}_lock"].sql.encode())


async def test_single_job_notifies_in_its_transaction_and_batch_afterwards(store: Store) -> None:
    with listening(store.url, "ready") as other:
        acquire_lock(other, store.url, "ready")
        ((begun,),) = other.execute("select clock_timestamp()").fetchall()

        await put(store, new_job(queue="lone"))
        assert await asyncio.to_thread(received_topics, other) == ["queue:lone"]
        assert count_notifications(other, begun) == 0

        await put(store, new_job(queue="first"), new_job(queue="first"))
        assert await asyncio.to_thread(received_topics, other) == ["queue:first"]
        assert count_notifications(other, begun) == 1


@pytest.mark.parametrize("number", [1, 2])
async def test_jobs_are_not_notified_of_while_no_process_waits(store: Store, opener: Opener, number: int) -> None:
    with listening(store.url, "ready") as other:
        sender = await opener()
        await put(sender, *[new_job(queue="before") for _ in range(number)])
        await sender.close()  # sends what is pending
        acquire_lock(other, store.url, "ready")
        await put(store, *[new_job(queue="after") for _ in range(number)])
        assert await asyncio.to_thread(received_topics, other) == ["queue:after"]


async def test_ends_are_not_notified_of_while_no_process_awaits_one(store: Store, opener: Opener) -> None:
    jobs = [await running(store) for _ in range(2)]
    with listening(store.url, "ended") as other:
        settler = await opener()
        await settle(settler, jobs[0])
        await settler.close()
        acquire_lock(other, store.url, "ended")
        await settle(store, jobs[1])
        assert await asyncio.to_thread(received_topics, other) == [f"job:{jobs[1].id}"]


@pytest.mark.parametrize("number", [151, 300])
async def test_many_ends_at_once_are_notified_of(store: Store, number: int) -> None:
    """By name as long as the names fit into one notification."""
    ids = await put(store, *[new_job() for _ in range(number)])
    with listening(store.url, "ended") as other:
        acquire_lock(other, store.url, "ended")
        await store.admin.cancel(ids)
        topics = await asyncio.to_thread(received_topics, other)
        assert sorted(topics) == (sorted(f"job:{job_id}" for job_id in ids) if number < 160 else ["job:*"])


async def test_process_holds_the_lock_while_it_waits(store: Store) -> None:
    async def wait_forever() -> None:
        while True:
            await store.queueing.wait(["queue:default"], timeout=_LONG)

    with session(store.url) as other:
        other.autocommit = True
        waiting = asyncio.create_task(wait_forever())
        await until_holders(other, store.url, 1)
        waiting.cancel()
        await until_holders(other, store.url, 0)
        waiting = asyncio.create_task(wait_forever())
        await until_holders(other, store.url, 1)
        waiting.cancel()


async def test_wait_for_a_command_holds_no_lock(store: Store) -> None:
    """Each heartbeat waits so, also while the worker is busy and needs no notification of jobs."""
    with session(store.url) as other:
        other.autocommit = True
        notify = f"""select pg_notify('{parse_url(store.url).schema}_ready', 'test\nworker:w')""".encode()
        waiting = asyncio.create_task(store.queueing.wait(["worker:w"], timeout=_LONG))
        async with asyncio.timeout(_PATIENCE):
            while not waiting.done():
                other.execute(notify)
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(store.queueing.wait(["worker:w"], timeout=_LONG))
        await until_holders(other, store.url, 0)
        waiting.cancel()


async def test_slow_commit_notifies_process_that_began_to_wait_meanwhile(store: Store, opener: Opener) -> None:
    """The submission tested the lock when no process waited; the process that waits has claimed for the last time."""
    waiting = await opener()
    with slow_commits(store.url) as lock:
        submitting = asyncio.create_task(put(store))
        await until(lock, "select count(*) from pg_locks where classid = %s and not granted", _SLOW, 1)
        await quiet(waiting, ["queue:default"])
        await until_holders(lock, store.url, 1)
        woken = asyncio.create_task(waiting.queueing.wait(["queue:default"], timeout=_LONG))
        lock.execute("select pg_advisory_unlock_all()")
        await submitting
        async with asyncio.timeout(_PATIENCE):
            await woken


@contextmanager
def slow_commits(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session with a lock for which each transaction that submits waits as it commits."""
    with session(url) as other:
        other.autocommit = True
        other.execute(
            f"""create function wait() returns trigger language plpgsql as $$
                begin perform pg_advisory_xact_lock_shared({_SLOW}, 0); return null; end $$;
            create constraint trigger wait after insert on job deferrable initially deferred
                for each row execute function wait();
            select pg_advisory_lock({_SLOW}, 0)""".encode()
        )
        yield other


async def until_holders(asker: psycopg.Connection[Any], url: str, number: int) -> None:
    """Waits until so many sessions hold the lock of the processes that wait."""
    await until(asker, _HOLDERS, f'"{parse_url(url).schema}".', number)


async def until(asker: psycopg.Connection[Any], counting: LiteralString, argument: object, number: int) -> None:
    """Waits until this statement counts so many."""
    async with asyncio.timeout(_PATIENCE):
        while asker.execute(counting, [argument]).fetchall() != [(number,)]:  # noqa: ASYNC110 - another session has it
            await asyncio.sleep(0.01)


def received_topics(listener: psycopg.Connection[Any]) -> list[str]:
    """The topics of the next notification."""
    (notification,) = listener.notifies(timeout=_PATIENCE, stop_after=1)
    return notification.payload.split("\n")[1:]


def count_notifications(asker: psycopg.Connection[Any], since: datetime) -> int:
    """Connections whose latest statement does nothing but notify."""
    asked = "select count(*) from pg_stat_activity where query like 'select pg_notify%%' and query_start > %s"
    ((count,),) = asker.execute(asked, [since]).fetchall()
    return int(count)
