"""How news reaches other processes: along with a lone job, after the commit of everything else."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import psycopg

from holdfast.stores.base import Store
from holdfast.stores.postgres.pool import parse_url
from tests.conformance.support import new_job, put
from tests.support.spoiling import session

_PATIENCE = 60.0


async def test_single_job_notifies_in_its_transaction_and_batch_afterwards(store: Store) -> None:
    with session(store.url) as other:
        other.autocommit = True
        ((begun,),) = other.execute("select clock_timestamp()").fetchall()
        other.execute(f'listen "{parse_url(store.url).schema}_ready"'.encode())

        await put(store, new_job(queue="lone"))
        assert await asyncio.to_thread(received_topics, other) == ["queue:lone"]
        assert count_notifications(other, begun) == 0

        await put(store, new_job(queue="first"), new_job(queue="first"))
        assert await asyncio.to_thread(received_topics, other) == ["queue:first"]
        assert count_notifications(other, begun) == 1


def received_topics(listener: psycopg.Connection[Any]) -> list[str]:
    """The topics of the next notification."""
    (notification,) = listener.notifies(timeout=_PATIENCE, stop_after=1)
    return notification.payload.split("\n")[1:]


def count_notifications(asker: psycopg.Connection[Any], since: datetime) -> int:
    """Connections whose latest statement does nothing but notify."""
    asked = "select count(*) from pg_stat_activity where query like 'select pg_notify%%' and query_start > %s"
    ((count,),) = asker.execute(asked, [since]).fetchall()
    return int(count)
