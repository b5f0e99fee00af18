"""Limits in PostgreSQL beside open transactions of callers, and over several batches of queues."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any, cast

import asyncpg
import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import Assigned, Limit, LimitChange, LimitTable, LimitValues
from holdfast.stores.base import Store
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.external_tx import encode_batch
from holdfast.stores.postgres.limits import assign_partitions
from holdfast.stores.postgres.pool import PostgresPool
from holdfast.stores.postgres.store import PostgresStore
from tests.conformance.limited import limit
from tests.conformance.support import Opener, claim, ending, lose_all, new_job, put, running, settle, take


async def limit_queue(store: Store, **values: int) -> None:
    limit = Limit(name="mail", queue="default", by="args.tenant", values=LimitValues(**values))
    assert await store.limits.write_limit(LimitChange(limit, 0)) is not None


async def connect(store: Store) -> tuple[asyncpg.Connection[asyncpg.Record], str]:
    address = cast("PostgresStore", store).address
    link = await asyncpg.connect(address.shown.partition("?")[0])
    return link, f'"{address.schema}"'


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read"])
async def test_open_transaction_delays_no_job_of_its_partition(store: Store, isolation: str) -> None:
    await limit_queue(store, concurrency=9)
    (first,) = await put(store, new_job(payload='{"tenant":1}'))
    (job,) = LimitTable(await store.limits.read_limits()).bind([new_job(payload='{"tenant":1}')])
    link, schema = await connect(store)
    try:
        transaction = link.transaction(isolation=isolation)
        await transaction.start()
        await link.fetch(f"select * from {schema}.submit_batch($1)", encode_batch([job], None))  # noqa: S608
        assert [each.id for each in await take(store, 9)] == [first]
        (second,) = await put(store, new_job(payload='{"tenant":1}'))
        assert [each.id for each in await take(store, 9)] == [second]
        await transaction.commit()
    finally:
        await link.close()
    assert [each.id for each in await take(store, 9)] == [job.id]


async def test_first_claim_under_a_limit_beside_a_settlement_harms_neither(store: Store) -> None:
    await put(store, new_job(queue="plain"))
    (plain,) = await take(store, 1, {"plain": 1})
    await limit_queue(store, concurrency=1)
    (limited,) = await put(store, new_job(payload='{"tenant":1}'))
    pool = cast("PostgresStore", store)._resources.pool
    fetch, claimed = pool.fetch, []

    async def claim_before_the_answer(*given: Any, **values: Any) -> Any:
        rows = await fetch(*given, **values)
        if "channel" in values:  # a notification, sent by another task
            return rows
        pool.fetch = fetch
        claimed.extend(await take(store, 1))
        return rows

    pool.fetch = claim_before_the_answer
    (answer,) = await store.queueing.settle([ending(plain)])
    assert (answer.accepted, [job.id for job in claimed]) == (True, [limited])


async def test_jobs_under_limits_in_the_second_batch_of_queues_are_claimed(store: Store) -> None:
    """Each batch of queues is looked at by itself: plain jobs in the first one hide nothing of the second."""
    await limit(store, "slow", task="slow", concurrency=5)
    (wanted,) = await put(store, new_job(queue="q39", task="slow"))
    names = dict.fromkeys([f"q{number:02}" for number in range(40)], 10)
    found: set[str] = set()
    for _ in range(6):
        await put(store, *[new_job(queue=queue, task="quick") for queue in ("q00", "q39")])
        found |= {job.id for job in await take(store, 50, names)}
        await asyncio.sleep(0.06)
    assert wanted in found


async def test_edited_and_replayed_jobs_move_to_their_partitions(store: Store) -> None:
    await limit_queue(store, concurrency=1)
    edited, replayed = await put(store, *[new_job(payload='{"tenant":1}') for _ in range(2)])
    await store.admin.edit(edited, JobChanges(payload='{"tenant":2}'))
    await store.admin.cancel([replayed])
    await store.admin.replay([replayed], payload='{"tenant":3}')
    assert {each.id for each in await take(store, 9)} == {edited, replayed}
    found = [await store.query.get(each) for each in (edited, replayed)]
    assert [each.partition for each in found if each is not None] == ["mail=2", "mail=3"]
    (moved,) = await put(store, new_job(payload='{"tenant":2}'))
    await store.admin.edit(moved, JobChanges(queue="other"))
    assert [each.id for each in await take(store, 9, {"other": 9})] == [moved]


async def test_overdue_job_under_limits_is_not_started(store: Store, clock: ManualClock) -> None:
    await limit_queue(store, concurrency=1)
    await put(store, new_job(payload='{"tenant":1}', expires_in=timedelta(seconds=5)))
    clock.advance(6)
    (other,) = await put(store, new_job(payload='{"tenant":1}'))
    assert [each.id for each in await take(store, 9)] == [other]


async def test_claim_that_waits_for_room_is_not_due(store: Store) -> None:
    await limit_queue(store, concurrency=1)
    await put(store, *[new_job(payload='{"tenant":1}') for _ in range(2)])
    assert len(await take(store, 9)) == 1
    assert [(await claim(store, 9)).next_due for _ in range(2)] == [None, None]


async def test_due_job_that_another_process_makes_ready_meanwhile_is_claimed(
    store: Store, opener: Opener, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that begins with jobs under limits does not pass on to others because one was due."""
    other, method, promoted = await opener(), PostgresPool.fetch, []

    async def fetch(pool: PostgresPool, statement: NumberedStatement, **values: Any) -> Any:
        rows = await method(pool, statement, **values)
        if armed and not promoted and "claim_limited(" in statement.sql:
            promoted.append(await other.maintenance.promote_due(limit=100))
        return rows

    armed = False
    monkeypatch.setattr(PostgresPool, "fetch", fetch)
    await limit(store, "slow", task="slow", concurrency=5)
    _, *slow = await put(store, new_job(), new_job(task="slow"), new_job(task="slow", delay=timedelta(seconds=60)))
    assert len(await take(store, 1)) == 1
    clock.advance(60)
    armed = True
    assert [each.id for each in await take(store, 9)] == slow
    assert promoted == [1]


async def test_partition_that_an_older_process_promoted_is_listed(store: Store) -> None:
    await limit_queue(store, concurrency=1)
    (delayed,) = await put(store, new_job(payload='{"tenant":1}', delay=timedelta(days=1)))
    link, schema = await connect(store)
    try:
        await link.execute(f"update {schema}.job set state = 0")  # noqa: S608
    finally:
        await link.close()
    assert await take(store, 9) == []
    await store.maintenance.prune({}, limit=100)
    assert [each.id for each in await take(store, 9)] == [delayed]


@pytest.mark.parametrize(("isolation", "of_caller"), [("read_committed", "mail=1"), ("repeatable_read", None)])
async def test_snapshot_of_a_caller_is_not_used_for_other_jobs(
    store: Store, home: str, clock: ManualClock, isolation: str, of_caller: str | None
) -> None:
    link, _ = await connect(store)
    async with Holdfast(home, now=clock) as app:
        await app.open_store()
        try:
            async with link.transaction(isolation=isolation):
                await link.fetch("select from pg_class limit 1")
                await limit_queue(store, concurrency=1)
                ours = await app.enqueue("work", {"tenant": 1}, connection=link)
                plain = await app.enqueue("work", {"tenant": 1})
        finally:
            await link.close()
        found = [await store.query.get(each.id) for each in (ours, plain)]
    assert [each.partition for each in found if each is not None] == [of_caller, "mail=1"]


async def test_job_that_a_transaction_holds_gets_its_partition_later(store: Store) -> None:
    held, _ = await put(store, *[new_job(payload='{"tenant":1}') for _ in range(2)])
    link, schema = await connect(store)
    try:
        async with link.transaction():
            await link.execute(f"select 1 from {schema}.job where id = $1 for update", held)  # noqa: S608
            await limit_queue(store, concurrency=1)
            assert await store.limits.assign_partitions(queue="default") == Assigned(1, None, 1)
    finally:
        await link.close()
    assert await store.limits.assign_partitions(queue="default") == Assigned(1, None, 0)
    assert [job.id for job in await take(store, 9)] == [held]  # one at a time, and it came first


async def test_isolated_claim_passes_over_a_job_that_a_transaction_holds(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=5)
    ids = await put(store, *[new_job(payload=f'{{"tenant":{n}}}', max_attempts=9) for n in range(2)])
    for _ in range(2):
        assert len(await take(store, 9)) == 2
        await lose_all(store, clock)
        clock.advance(1)
    link, schema = await connect(store)
    try:
        async with link.transaction(), asyncio.timeout(30):
            await link.execute(f"select 1 from {schema}.job where id = $1 for update", ids[0])  # noqa: S608
            assert [job.id for job in await take(store, 9, isolated=True)] == [ids[1]]
    finally:
        await link.close()


async def test_completion_under_a_limit_of_a_task_notifies_every_queue(store: Store, clock: ManualClock) -> None:
    await limit(store, "slow", task="slow", concurrency=1)
    await limit(store, "mail", queue="b", concurrency=1)
    await put(store, new_job(queue="a", task="slow"), new_job(queue="b"))
    jobs = await take(store, 2, {"a": 1, "b": 1})
    link, schema = await connect(store)
    statement = cast("PostgresStore", store).sql["complete"].sql.replace("?", "$1")
    received: list[str] = []
    try:
        name = schema.strip('"')
        await link.add_listener(f"{name}_ready", lambda *given: received.append(given[-1]))
        for job in sorted(jobs, key=lambda job: job.queue):
            done = json.dumps({"at": clock(), "id": job.id, "claims": job.claims, "result": None})
            assert await link.fetchval(statement, done)
            await link.fetch("select 1")
    finally:
        await link.close()
    topics = [set(each.splitlines()[1:]) for each in received if each.startswith("sql")]
    assert topics == [{"queue:*", "due:*"}, {"queue:b", "due:b"}]


async def test_job_that_has_ended_is_not_left_without_its_partition(store: Store) -> None:
    """A look that counted it would be repeated until the job is pruned."""
    job = await running(store, payload='{"tenant":1}')
    await settle(store, job)
    await limit_queue(store, concurrency=1)
    limits: Any = store.limits
    assert await assign_partitions(limits._pool, limits._sql, [job.id]) == (0, [])


async def test_two_that_take_the_last_token_at_once_take_it_one_after_the_other(store: Store, opener: Opener) -> None:
    api = Limit(name="api", values=LimitValues(rate=1, period_us=1_000_000, burst=2))
    assert await store.limits.write_limit(LimitChange(api, 0)) is not None
    assert await store.limits.take_tokens("api", 1) == timedelta(0)
    other = await opener()
    link, schema = await connect(store)
    try:
        async with asyncio.timeout(60), link.transaction():
            await link.execute(f"select from {schema}.bucket for no key update")
            taking = asyncio.gather(*[each.limits.take_tokens("api", 1) for each in (store, other)])
            waiting = f"""select count(*) from pg_locks where not granted
                and (transactionid = pg_current_xact_id()::xid or relation = '{schema}.bucket'::regclass)"""  # noqa: S608
            while await link.fetchval(waiting) < 2:  # noqa: ASYNC110 - no event tells of this
                await asyncio.sleep(0.01)
    finally:
        await link.close()
    assert sorted(await taking) == [timedelta(0), timedelta(seconds=1)]


async def test_sweep_lists_a_few_partitions_at_a_time(store: Store) -> None:
    await limit_queue(store, concurrency=1)
    ids = await put(store, *[new_job(payload=f'{{"tenant":{n}}}') for n in range(3)])
    link, schema = await connect(store)
    try:
        await link.execute(f"delete from {schema}.partition")  # noqa: S608
        await link.execute(f"delete from {schema}.partition_inbox")  # noqa: S608
    finally:
        await link.close()
    await store.maintenance.prune({}, limit=2)
    first = await take(store, 9)
    assert [job.id for job in first] == ids[:2]
    await store.queueing.settle([ending(job) for job in first])
    await store.maintenance.prune({}, limit=2)
    assert [job.id for job in await take(store, 9)] == ids[2:]
