"""Idempotency keys: one job per key while the key lives, for everybody who asks."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState
from holdfast.stores.base import Store
from tests.conformance.support import Opener, Submitted, ended, new_job, put, running, settle, stored

DAY = timedelta(days=1)


async def prune_all(store: Store) -> int:
    return await store.maintenance.prune(
        {"succeeded": timedelta(0), "dead": timedelta(0), "cancelled": timedelta(0)}, limit=1000
    )


async def test_a_key_creates_one_job_and_every_caller_gets_it(store: Store) -> None:
    first = new_job(key="welcome-42", payload='{"n":1}')
    await store.queueing.submit([first])

    assert await store.queueing.submit([new_job(key="welcome-42", payload='{"n":2}')]) == [Submitted(first.id, False)]
    assert await store.query.count(JobFilter()) == 1
    assert (await stored(store, first.id)).payload == '{"n":1}'


async def test_different_keys_are_different_jobs(store: Store) -> None:
    keys = ["a", "A", "a ", " a", "a\0", "ä", "a\u0308", "%", "_", "'", "x" * 512]

    answers = await store.queueing.submit([new_job(key=key) for key in keys])

    assert all(answer.created for answer in answers)
    found = [await store.query.by_key(key) for key in keys]
    assert [job and job.id for job in found] == [answer.job_id for answer in answers]
    assert [job and job.key for job in found] == keys
    assert await store.query.by_keys(keys) == found


async def test_a_key_twice_in_one_batch_is_one_job(store: Store) -> None:
    first, second, plain = new_job(key="k"), new_job(key="k"), new_job()

    answers = await store.queueing.submit([first, plain, second])

    assert answers == [Submitted(first.id, True), Submitted(plain.id, True), Submitted(first.id, False)]
    assert await store.query.get(second.id) is None


@pytest.mark.parametrize("keys", [("payment-2", "payment-1"), ("payment", None)])
async def test_first_job_of_a_repeated_id_is_stored(store: Store, keys: tuple[str | None, str | None]) -> None:
    job_id = new_id()
    batch = [
        replace(new_job(key=key, payload=f'{{"amount":{n}}}'), id=job_id, has_client_id=True)
        for n, key in enumerate(keys, 1)
    ]
    batch += [new_job(key=f"payment-{n}", payload="{}") for n in (0, 3)]

    answers = await store.queueing.submit(batch)

    assert answers[:2] == [Submitted(job_id, True), Submitted(job_id, False)]
    assert (await stored(store, job_id)).payload == '{"amount":1}'


async def test_batch_of_old_and_new_keys_is_answered_in_order(store: Store) -> None:
    old = [new_job(key=f"k{n}") for n in range(20)]
    await store.queueing.submit(old)
    batch = [new_job(key=f"k{n}") for n in range(40)]

    answers = await store.queueing.submit(batch)

    assert answers[:20] == [Submitted(job.id, False) for job in old]
    assert answers[20:] == [Submitted(job.id, True) for job in batch[20:]]


async def test_resubmitting_a_keyed_job_by_its_id_is_harmless(store: Store) -> None:
    new = new_job(key="k")

    assert await store.queueing.submit([new]) == [Submitted(new.id, True)]
    assert await store.queueing.submit([new]) == [Submitted(new.id, False)]


async def test_key_submitted_with_a_known_id_belongs_to_that_job(store: Store) -> None:
    (job_id,) = await put(store)

    assert await store.queueing.submit([new_job(id=job_id, key="late")]) == [Submitted(job_id, False)]
    assert (await stored(store, job_id)).key == "late"
    assert await store.query.count(JobFilter()) == 1
    await store.admin.delete([job_id])
    assert await store.query.by_key("late") is None
    assert (await store.queueing.submit([new_job(key="late")]))[0].created


async def test_every_key_of_a_known_job_answers_with_it(store: Store) -> None:
    (job_id,) = await put(store)
    keys = ["first", "second", "third"]

    for key in keys:
        assert await store.queueing.submit([new_job(id=job_id, key=key)]) == [Submitted(job_id, False)]

    assert await store.queueing.submit([new_job(key=key) for key in keys]) == [Submitted(job_id, False)] * 3
    assert [job and job.id for job in await store.query.by_keys(keys)] == [job_id] * 3
    await store.admin.delete([job_id])
    answers = await store.queueing.submit([new_job(key=key, key_for=DAY) for key in keys])
    assert all(answer.created for answer in answers)


async def test_deleted_job_frees_every_key_it_was_given(store: Store) -> None:
    job_id = new_id()
    keys = [f"key-{number}" for number in range(300)]
    for key in keys:
        await store.queueing.submit([new_job(id=job_id, key=key)])

    await store.admin.delete([job_id])

    answers = await store.queueing.submit([new_job(key=key) for key in keys])
    assert all(answer.created for answer in answers)


async def test_by_key_finds_the_job(store: Store) -> None:
    (job_id,) = await put(store, new_job(key="k"))

    job = await store.query.by_key("k")

    assert job is not None
    assert (job.id, job.key) == (job_id, "k")
    assert await store.query.by_key("K") is None


async def test_by_keys_returns_whole_jobs_in_key_order(store: Store) -> None:
    ids = await put(store, *[new_job(key=f"k{number}", payload=f'{{"n":{number}}}') for number in range(250)])
    (unkeyed,) = await put(store)

    asked = ["k7", "nobody", *[f"k{number}" for number in range(249, -1, -1)], "k7", "K7"]
    found = await store.query.by_keys(asked)

    assert [job and job.id for job in found] == [ids[7], None, *reversed(ids), ids[7], None]
    assert found[0] == await stored(store, ids[7])
    assert found[2] == await stored(store, ids[249])
    assert unkeyed not in {job.id for job in found if job is not None}
    assert await store.query.by_keys([]) == []


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED])
async def test_a_key_is_kept_whatever_became_of_its_job(store: Store, state: JobState) -> None:
    job_id = await ended(store, state, key="k")

    assert await store.queueing.submit([new_job(key="k")]) == [Submitted(job_id, False)]


async def test_a_key_outlasts_its_lifetime_while_its_job_is_there(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(key="k", key_for=timedelta(minutes=1)))
    clock.advance(3600)
    await prune_all(store)

    assert await store.queueing.submit([new_job(key="k")]) == [Submitted(job_id, False)]


async def test_key_outlives_its_pruned_job_until_it_expires(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.SUCCEEDED, key="k", key_for=DAY)
    clock.advance(3600)
    assert await prune_all(store) == 1
    assert await store.query.get(job_id) is None

    assert await store.queueing.submit([new_job(key="k")]) == [Submitted(job_id, False)]
    assert await store.query.count(JobFilter()) == 0

    clock.advance(DAY.total_seconds())
    (answer,) = await store.queueing.submit([new_job(key="k")])
    assert answer.created


async def test_key_is_free_at_the_instant_it_expires(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED, key="k", key_for=timedelta(hours=2))
    clock.advance(3600)
    assert await prune_all(store) == 1
    clock.advance(3600)
    (answer,) = await store.queueing.submit([new_job(key="k")])
    assert answer.created


async def test_living_key_keeps_its_pruned_job_from_being_stored_again(store: Store, clock: ManualClock) -> None:
    """As by an outbox that repeats a submission with its id."""
    new = new_job(key="k", key_for=DAY)
    await ended(store, JobState.SUCCEEDED, id=new.id, key=new.key, key_for=new.key_for)
    clock.advance(3600)
    assert await prune_all(store) == 1

    assert await store.queueing.submit([new]) == [Submitted(new.id, False)]
    assert (await store.queueing.submit([new_job(key="other"), new]))[1] == Submitted(new.id, False)
    assert await store.query.count(JobFilter()) == 1

    clock.advance(DAY.total_seconds())
    assert await store.queueing.submit([new]) == [Submitted(new.id, True)]


async def test_expired_key_is_free_before_it_is_pruned(store: Store, clock: ManualClock) -> None:
    await put(store)
    job_id = await ended(store, JobState.SUCCEEDED, key="k", key_for=timedelta(hours=2))
    clock.advance(3600)
    await prune_all(store)
    clock.advance(3601)

    (answer,) = await store.queueing.submit([new_job(key="k")])

    assert answer.created
    assert answer.job_id != job_id


async def test_pruning_takes_the_dead_keys_and_leaves_the_living(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED, key="short", key_for=timedelta(hours=2))
    long = await ended(store, JobState.SUCCEEDED, key="long", key_for=DAY)
    clock.advance(60)
    assert await prune_all(store) == 2
    clock.advance(3 * 3600)
    await prune_all(store)

    assert (await store.queueing.submit([new_job(key="short")]))[0].created
    assert await store.queueing.submit([new_job(key="long")]) == [Submitted(long, False)]


async def test_a_key_without_a_lifetime_goes_with_its_job(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED, key="k")
    clock.advance(60)
    assert await prune_all(store) == 1

    assert await store.query.by_key("k") is None
    assert (await store.queueing.submit([new_job(key="k")]))[0].created


async def test_deleting_a_job_frees_its_key_whatever_lifetime_it_has(store: Store) -> None:
    (job_id,) = await put(store, new_job(key="k", key_for=DAY))

    await store.admin.delete([job_id])

    assert await store.query.by_key("k") is None
    assert (await store.queueing.submit([new_job(key="k")]))[0].created


async def test_by_key_of_a_pruned_job_finds_nothing(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED, key="k", key_for=DAY)
    clock.advance(60)
    await prune_all(store)

    assert await store.query.by_key("k") is None


async def test_a_key_survives_retries_and_replays(store: Store) -> None:
    job = await running(store, key="k")
    await settle(store, job, JobState.DEAD, error="boom")
    await store.admin.replay([job.id])

    assert (await stored(store, job.id)).key == "k"
    assert await store.queueing.submit([new_job(key="k")]) == [Submitted(job.id, False)]


async def test_taking_an_outlived_key_leaves_the_other_keys_of_its_job(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.SUCCEEDED, key="short", key_for=timedelta(hours=2))
    await store.queueing.submit([new_job(id=job_id, key="long", key_for=DAY)])
    clock.advance(3600)
    assert await prune_all(store) == 1
    clock.advance(3601)

    assert (await store.queueing.submit([new_job(key="short")]))[0].created
    assert await store.queueing.submit([new_job(key="long")]) == [Submitted(job_id, False)]


async def test_one_of_32_racing_submissions_of_a_key_creates(store: Store, opener: Opener) -> None:
    stores = [store, *[await opener() for _ in range(3)]]

    answers = await asyncio.gather(*[stores[n % 4].queueing.submit([new_job(), new_job(key="k")]) for n in range(32)])

    keyed = [answer for _, answer in answers]
    assert sum(answer.created for answer in keyed) == 1
    assert len({answer.job_id for answer in keyed}) == 1
    assert await store.query.count(JobFilter()) == 33


async def test_one_of_many_callers_takes_over_an_outlived_key(store: Store, opener: Opener, clock: ManualClock) -> None:
    stores = [store, *[await opener() for _ in range(3)]]
    keys = [f"k{number}" for number in range(16)]
    first = await put(store, *[new_job(key=key, key_for=timedelta(hours=2)) for key in keys])
    await store.admin.cancel(first)
    clock.advance(3600)
    assert await prune_all(store) == len(keys)
    clock.advance(3601)

    for key in keys:
        answers = await asyncio.gather(*[stores[n % 4].queueing.submit([new_job(key=key)]) for n in range(16)])

        (owner,) = {answer.job_id for (answer,) in answers}
        assert sum(answer.created for (answer,) in answers) == 1
        held = await store.query.by_key(key)
        assert held is not None
        assert held.id == owner
    assert await store.query.count(JobFilter()) == len(keys)
