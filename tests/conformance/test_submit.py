"""Submitting: what was answered is stored, whole, once, in order."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.batches import BATCH_TASK, BatchEnded
from holdfast.core.clock import ManualClock
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, NewJob, Options
from holdfast.stores.base import Store
from tests.conformance.support import (
    Opener,
    Submitted,
    after,
    new_job,
    put,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)

HOUR = timedelta(hours=1)


async def test_a_submitted_job_is_stored_as_it_was_given(store: Store, clock: ManualClock) -> None:
    options = Options(timeout=2.5, retry={"base": 5}, metadata={"who": "me", "n": [1, None]}, tags=("a", "b c"))
    new = NewJob(
        id=new_id(),
        task="email.send",
        payload='{"to":"a@b.c"}',
        queue="mail",
        priority=-7,
        max_attempts=3,
        key="k",
        options=options,
    )

    assert await store.queueing.submit([new]) == [Submitted(new.id, True)]

    job = await stored(store, new.id)
    assert (job.id, job.task, job.payload, job.queue) == (new.id, "email.send", '{"to":"a@b.c"}', "mail")
    assert (job.priority, job.max_attempts, job.key, job.options) == (-7, 3, "k", options)
    assert (job.state, job.claims, job.attempts, job.lost_leases) == (JobState.QUEUED, 0, 0, 0)
    assert job.run_at_us == job.created_at_us == clock()
    assert (job.worker, job.lease_until_us, job.started_at_us, job.ended_at_us) == (None, None, None, None)
    assert (job.reason, job.error, job.result, job.cancelling) == (None, None, None, False)


async def test_a_plain_job_carries_no_options(store: Store) -> None:
    (job_id,) = await put(store, new_job())

    assert (await stored(store, job_id)).options_or_default == Options()


async def test_an_unlimited_budget_stays_unlimited(store: Store) -> None:
    (job_id,) = await put(store, new_job(max_attempts=None))

    assert (await stored(store, job_id)).max_attempts is None


async def test_a_payload_is_kept_to_the_last_character(store: Store) -> None:
    payload = json.dumps({"nul": "a\0b", "big": 2**70, "emoji": "🦺", "quote": "'\"\\"}, ensure_ascii=False)
    (job_id,) = await put(store, new_job(payload=payload))

    assert (await stored(store, job_id)).payload == payload
    assert [job.payload for job in await take(store)] == [payload]


async def test_a_payload_with_a_raw_nul_character_is_kept(store: Store) -> None:
    """JSON text never holds one unescaped, but a store must not be the place that cuts it off."""
    (job_id,) = await put(store, new_job(payload='{"a":"x\0y"}'))

    assert (await stored(store, job_id)).payload == '{"a":"x\0y"}'


async def test_large_payloads_are_kept(store: Store) -> None:
    payload = json.dumps({"text": "x" * 262_000})
    (job_id,) = await put(store, new_job(payload=payload))

    assert (await stored(store, job_id)).payload == payload


async def test_a_resubmission_with_the_same_id_is_harmless(store: Store) -> None:
    new = new_job(payload='{"n":1}')
    await store.queueing.submit([new])

    again = await store.queueing.submit([new_job(id=new.id, payload='{"n":2}')])

    assert again == [Submitted(new.id, False)]
    assert (await stored(store, new.id)).payload == '{"n":1}'
    assert await take_ids(store) == [new.id]


async def test_a_resubmission_does_not_wake_an_ended_job(store: Store) -> None:
    new = new_job()
    await store.queueing.submit([new])
    await store.admin.cancel([new.id])

    assert await store.queueing.submit([new]) == [Submitted(new.id, False)]
    assert await state_of(store, new.id) is JobState.CANCELLED


async def test_a_resubmission_adds_nothing_to_the_job(store: Store) -> None:
    new = new_job()
    await store.queueing.submit([new])

    await store.queueing.submit(
        [new_job(id=new.id, options=Options(tags=("late",)), payload='{"a":"' + "x" * 5000 + '"}')]
    )

    assert await store.query.count(JobFilter(tag="late")) == 0
    assert (await stored(store, new.id)).payload == "{}"


async def test_the_same_id_twice_in_one_batch_is_one_job(store: Store) -> None:
    new, other = new_job(), new_job()

    answers = await store.queueing.submit([new, other, new])

    assert answers == [Submitted(new.id, True), Submitted(other.id, True), Submitted(new.id, False)]
    assert await store.query.count(JobFilter()) == 2


async def test_answers_come_in_the_order_of_the_questions(store: Store) -> None:
    old = [new_job() for _ in range(50)]
    await store.queueing.submit(old)
    batch = [job for pair in zip(old, [new_job() for _ in range(50)], strict=True) for job in pair]

    answers = await store.queueing.submit(batch)

    assert answers == [Submitted(job.id, position % 2 == 1) for position, job in enumerate(batch)]


async def test_an_empty_batch_is_an_empty_answer(store: Store) -> None:
    assert await store.queueing.submit([]) == []


async def test_a_batch_is_stored_whole_or_not_at_all(store: Store) -> None:
    """A job no store can hold, in the middle of a batch, takes the whole batch with it."""
    good = [new_job() for _ in range(4)]
    bad = new_job(payload='{"a":"\ud800"}')

    with pytest.raises(HoldfastError):
        await store.queueing.submit([*good[:2], bad, *good[2:]])

    assert await store.query.count(JobFilter()) == 0
    assert await put(store, *good) == [job.id for job in good]


@pytest.mark.parametrize("place", [0, 450, 700])
@pytest.mark.parametrize("refers", ["after", "batch", "ended"])
async def test_large_batch_with_one_wrong_reference_is_refused_whole(store: Store, refers: str, place: int) -> None:
    """Redis stores it in parts; the jobs of the other parts are not stored either."""
    batch = new_id()
    if refers == "ended":
        whole = new_job(BATCH_TASK, id=batch, is_batch=True)
        await put(store, whole, new_job(options=Options(batch=batch)))
        await store.admin.cancel([batch])
    known = await store.query.count(JobFilter())
    bad = after(batch) if refers == "after" else new_job(options=Options(batch=batch))
    jobs = [new_job() for _ in range(700)]
    jobs.insert(place, bad)

    with pytest.raises(BatchEnded if refers == "ended" else Invalid, match=batch):
        await store.queueing.submit(jobs)

    assert await store.query.count(JobFilter()) == known


async def test_large_batch_may_refer_to_its_own_jobs_and_to_known_ones(store: Store) -> None:
    """A repeated job needs nothing, though what it waited for was deleted."""
    gone, kept = await put(store, new_job(), new_job())
    known = [after(gone), after(gone, key="one")]
    await put(store, *known)
    await store.admin.delete([gone])
    whole = new_job(BATCH_TASK, is_batch=True)
    members = [new_job(options=Options(batch=whole.id)) for _ in range(300)]
    by_key = after(gone, key="one")
    waiting = [after(members[0].id), after(kept, members[299].id), after(whole.id)]

    answers = await store.queueing.submit([whole, known[0], by_key, *members, *waiting])

    assert [answer.created for answer in answers] == [True, False, False, *[True] * 303]
    assert answers[2].job_id == known[1].id


@pytest.mark.parametrize("fields", [{"priority": 2**70}, {"run_at_us": 2**63}, {"task": "\udcff"}, {"key": "\udcff"}])
async def test_what_a_store_cannot_hold_is_refused_by_us(store: Store, fields: dict[str, object]) -> None:
    with pytest.raises(HoldfastError):
        await store.queueing.submit([new_job(**fields)])

    assert await store.query.count(JobFilter()) == 0


async def test_refused_batch_does_not_affect_concurrent_submissions(store: Store) -> None:
    bad = new_job(payload='{"a":"\ud800"}')
    good = [new_job() for _ in range(20)]
    calls = [store.queueing.submit([job]) for job in good]

    answers = await asyncio.gather(*calls[:10], store.queueing.submit([bad]), *calls[10:], return_exceptions=True)

    assert isinstance(answers.pop(10), HoldfastError)
    assert answers == [[Submitted(job.id, True)] for job in good]


async def test_a_large_batch_is_one_answer(store: Store) -> None:
    jobs = [new_job() for _ in range(5000)]

    assert await put(store, *jobs) == [job.id for job in jobs]
    assert await store.query.count(JobFilter()) == 5000


async def test_a_delayed_job_is_scheduled_from_the_stores_own_clock(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR))

    job = await stored(store, job_id)

    assert (job.state, job.run_at_us, job.created_at_us) == (JobState.SCHEDULED, clock() + 3_600_000_000, clock())


async def test_a_job_with_an_instant_is_scheduled_for_it(store: Store, clock: ManualClock) -> None:
    when = clock() + 12_345_678
    (job_id,) = await put(store, new_job(run_at_us=when))

    job = await stored(store, job_id)

    assert (job.state, job.run_at_us) == (JobState.SCHEDULED, when)


@pytest.mark.parametrize("offset_us", [0, -1, -3_600_000_000])
async def test_a_job_whose_instant_has_come_is_ready_at_once(store: Store, clock: ManualClock, offset_us: int) -> None:
    (job_id,) = await put(store, new_job(run_at_us=clock() + offset_us))

    assert await state_of(store, job_id) is JobState.QUEUED


@pytest.mark.parametrize("tasks", [("work",), ("work", "other")])
async def test_a_delay_of_nothing_is_ready_at_once(store: Store, tasks: tuple[str, ...]) -> None:
    ids = await put(store, *[new_job(task, delay=timedelta(0)) for task in tasks])

    assert await states_of(store, ids) == [JobState.QUEUED] * len(tasks)


async def test_what_was_answered_is_seen_by_every_other_process(store: Store, opener: Opener) -> None:
    ids = await put(store, *[new_job() for _ in range(10)])

    other = await opener()

    assert [job_id for job_id in ids if await other.query.get(job_id) is None] == []
    assert await take_ids(other) == ids


async def test_what_was_answered_is_there_after_closing_and_opening_again(store: Store, opener: Opener) -> None:
    (job_id,) = await put(store)
    await store.close()

    assert await state_of(await opener(), job_id) is JobState.QUEUED


async def test_many_submitters_at_once_lose_nothing(store: Store, opener: Opener) -> None:
    stores = [store, *[await opener() for _ in range(3)]]
    jobs = [new_job() for _ in range(200)]

    answers = await asyncio.gather(*[stores[n % 4].queueing.submit([job]) for n, job in enumerate(jobs)])

    assert [(answer.job_id, answer.created) for (answer,) in answers] == [(job.id, True) for job in jobs]
    taken: list[str] = []
    async with asyncio.timeout(60):  # a transport that answers late gets some of them later
        while len(taken) < len(jobs):
            taken += await take_ids(store, 500)
            await store.maintenance.reannounce()
    assert sorted(taken) == sorted(job.id for job in jobs)


@pytest.mark.parametrize("options", [{}, {"key": "k"}, {"delay": HOUR}, {"payload": '{"text":"' + "x" * 600 + '"}'}])
async def test_answer_has_the_instant_at_which_a_lone_job_was_stored(
    store: Store, clock: ManualClock, options: dict[str, Any]
) -> None:
    """Only of a job that it creates: of one that is known, the instant is that of its own submission."""
    clock.advance(7)
    new = new_job(**options)
    (answer,) = await store.queueing.submit([new])
    assert answer.stored_at_us == clock() == (await stored(store, new.id)).created_at_us
    clock.advance(1)
    (again,) = await store.queueing.submit([new])
    assert (again.created, again.stored_at_us) == (False, None)


async def test_instants_of_a_batch_are_those_of_its_jobs_where_the_store_says_them(
    store: Store, clock: ManualClock
) -> None:
    known = new_job()
    await store.queueing.submit([known])
    clock.advance(1)
    answers = await store.queueing.submit([new_job(), known, new_job(key="k"), new_job(key="k")])
    assert [answer.created for answer in answers] == [True, False, True, False]
    assert {answer.stored_at_us for answer in answers if answer.created} <= {clock(), None}
    assert [answers[1].stored_at_us, answers[3].stored_at_us] == [None, None]


@pytest.mark.parametrize("place", [0, 40, 80])
async def test_a_known_job_among_many_new_ones_is_answered_as_known(store: Store, place: int) -> None:
    known = new_job()
    await store.queueing.submit([known])
    jobs = [new_job() for _ in range(80)]
    jobs.insert(place, known)

    answers = await store.queueing.submit(jobs)

    assert [(answer.job_id, answer.created) for answer in answers] == [(job.id, job is not known) for job in jobs]
    assert await store.query.count(JobFilter()) == 81
