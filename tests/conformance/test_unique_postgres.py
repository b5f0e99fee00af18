"""Uniqueness in PostgreSQL beside open transactions: a claim of the job that holds the key, and a caller's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import asyncpg
import pytest

from holdfast.core.batches import BATCH_TASK, BatchRefused
from holdfast.core.dependencies import Dependency
from holdfast.core.models import JobState, Options
from holdfast.core.unique import Unique
from holdfast.stores.base import Store
from holdfast.stores.postgres.external_tx import encode_batch
from holdfast.stores.postgres.store import PostgresStore
from tests.conformance.support import Submitted, new_job, stored, take

WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and $1 = any(pg_blocking_pids(pid))"


def policy(during: str, on_conflict: str) -> Unique:
    return Unique(during, by=["task", "queue"], on_conflict=on_conflict)


async def submit(store: Store, policy: Unique, payload: str) -> Submitted:
    (answer,) = await store.queueing.submit([policy.bind(new_job(payload=payload))])
    return cast("Submitted", answer)


@asynccontextmanager
async def changing(store: Store, job_id: str, change: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """While entered, another transaction has changed the job's row; then that is committed."""
    address = cast("PostgresStore", store).address
    link = await asyncpg.connect(address.shown.partition("?")[0])
    try:
        async with link.transaction():
            await link.execute(f'update "{address.schema}".job set {change} where id = $1', job_id)  # noqa: S608
            yield link
    finally:
        await link.close()


BEHIND = """select count(*) from pg_stat_activity where wait_event_type = 'Lock' and pg_blocking_pids(pid) &&
    array(select pid from pg_stat_activity where $1 = any(pg_blocking_pids(pid)))"""


@pytest.mark.parametrize("during", ["unstarted", "active"])
async def test_submission_beside_a_replay_is_decided_after_it(store: Store, during: str) -> None:
    first = await submit(store, policy(during, "keep"), '{"n":1}')
    (waiter,) = await store.queueing.submit([new_job(after=(Dependency(first.job_id),))])
    await store.admin.cancel([first.job_id])
    async with changing(store, waiter.job_id, "rank = 1") as link:
        replay = asyncio.create_task(store.admin.replay([first.job_id]))
        while not await link.fetchval(WAITING, link.get_server_pid()):  # noqa: ASYNC110 - no event tells of this
            await asyncio.sleep(0.01)
        second = asyncio.create_task(submit(store, policy(during, "keep"), '{"n":2}'))
        while not (second.done() or await link.fetchval(BEHIND, link.get_server_pid())):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    assert [job_id for job_id, _ in (await replay).changed] == [first.job_id]
    assert await second == Submitted(first.job_id, False)


async def test_batch_beside_a_job_that_takes_its_id_is_refused_whole(store: Store) -> None:
    address = cast("PostgresStore", store).address
    plain = new_job(has_client_id=True)
    batch = new_job(BATCH_TASK, id=plain.id, has_client_id=True, is_batch=True)
    link = await asyncpg.connect(address.shown.partition("?")[0])
    try:
        async with link.transaction():
            submit = f'select * from "{address.schema}".submit_batch($1)'  # noqa: S608
            await link.fetch(submit, encode_batch([plain], None))
            second = asyncio.create_task(store.queueing.submit([batch, new_job(options=Options(batch=batch.id))]))
            while not await link.fetchval(WAITING, link.get_server_pid()):  # noqa: ASYNC110 - no event tells of this
                await asyncio.sleep(0.01)
    finally:
        await link.close()
    with pytest.raises(BatchRefused, match=plain.id):
        await second
    assert [job.id for job in await take(store, 9)] == [plain.id]


@pytest.mark.parametrize("during", ["unstarted", "active"])
@pytest.mark.parametrize("on_conflict", ["replace", "reschedule"])
async def test_submission_beside_a_claim_is_decided_after_it(store: Store, during: str, on_conflict: str) -> None:
    first = await submit(store, policy(during, on_conflict), '{"n":1}')
    claim = "state = 2, claims = claims + 1, attempts = attempts + 1, worker = 'another', lease_until = created_at * 2"
    async with changing(store, first.job_id, claim) as link:
        second = asyncio.create_task(submit(store, policy(during, on_conflict), '{"n":2}'))
        while not await link.fetchval(WAITING, link.get_server_pid()):  # noqa: ASYNC110 - no event tells of this
            await asyncio.sleep(0.01)
    answer = await second
    if during == "active":
        assert answer == Submitted(first.job_id, False)
        return
    assert answer.created
    assert [(job.id, job.payload) for job in await take(store, 9)] == [(answer.job_id, '{"n":2}')]
    assert (await stored(store, first.job_id)).state is JobState.RUNNING


@pytest.mark.parametrize("on_conflict", ["replace", "reschedule"])
async def test_submission_does_not_wait_for_changes_of_other_jobs(store: Store, on_conflict: str) -> None:
    first = await submit(store, policy("unstarted", on_conflict), '{"n":1}')
    (other,) = await store.queueing.submit([new_job()])
    async with changing(store, other.job_id, "rank = 1"), asyncio.timeout(30):
        second = await submit(store, policy("unstarted", on_conflict), '{"n":2}')
    assert second == Submitted(first.job_id, False, changed=True)


async def test_submission_does_not_wait_for_the_end_of_a_running_job(store: Store) -> None:
    """A caller may complete it in a long transaction of its own."""
    first = await submit(store, policy("unstarted", "replace"), '{"n":1}')
    await take(store, 1)
    async with changing(store, first.job_id, "state = 5"):
        assert (await submit(store, policy("unstarted", "replace"), '{"n":2}')).created
