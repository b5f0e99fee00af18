"""Receipts of signals in PostgreSQL beside transactions of others that change the job."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from holdfast.core.waits import SignalReceipt
from holdfast.stores.base import Store
from tests.conformance.support import running
from tests.conformance.test_signals import receive, results_of, send
from tests.support.spoiling import session


def blocks_another(connection: psycopg.Connection[Any]) -> bool:
    """True if another session waits for a lock of this one."""
    blocked = "select exists (select from pg_stat_activity where pg_backend_pid() = any(pg_blocking_pids(pid)))"
    ((answer,),) = connection.execute(blocked).fetchall()
    return bool(answer)


async def test_receipt_waits_for_the_end_of_its_lease_and_is_refused(store: Store) -> None:
    await send(store)
    job = await running(store)
    with session(store.url) as other:
        other.execute("update job set claims = claims + 1 where id = %s", [job.id])
        receiving = asyncio.create_task(receive(store, job))
        async with asyncio.timeout(60):
            while not receiving.done() and not blocks_another(other):  # noqa: ASYNC110 - no event tells of this
                await asyncio.sleep(0.01)
        other.commit()
    assert await receiving == SignalReceipt(has_lease=False)
    assert await results_of(store, job) == []
    assert len(await store.workflow.read_signals()) == 1
