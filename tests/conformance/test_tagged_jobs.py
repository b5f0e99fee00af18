"""The jobs of a tag: counts by state, a wait for their ends, and a stream of them that a cursor continues."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast, Invalid, JobCancelled, JobFailed, NotFound, WaitTimeout
from holdfast.app.tagged_jobs import StreamPosition
from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, NewJob, Options, Reason
from holdfast.stores.base import Store
from tests.conformance.support import new_job, put, settle, stored, take

TAG = "run 7/ü%'{x}*"


def tagged(**fields: object) -> NewJob:
    return new_job(options=Options(tags=("other", TAG)), **fields)


async def test_jobs_of_a_tag_are_counted_by_state(store: Store, clock: ManualClock) -> None:
    created = clock()
    await put(store, tagged(), tagged(queue="other"), tagged(task="convert"), new_job())
    clock.advance(1)
    dead, running = await take(store, 2)
    await settle(store, dead, JobState.DEAD, reason=Reason.ERROR, error="no")
    counted = await store.query.count_states(JobFilter(tag=TAG))
    assert (counted.total, counted.ended, counted.first_created_us) == (3, 1, created)
    assert {state: n for state, n in counted.states.items() if n} == {
        JobState.DEAD: 1,
        JobState.RUNNING: 1,
        JobState.QUEUED: 1,
    }
    assert list(counted.states) == list(JobState)  # the same order in every store
    assert await store.query.count(JobFilter(tag=TAG)) == 3
    assert await store.query.count(JobFilter(tag=TAG), limit=2) == 2
    assert (await store.query.count_states(JobFilter(tag=TAG, states=(JobState.DEAD,)))).total == 1
    assert (await store.query.count_states(JobFilter(tag=TAG, queue="other"))).total == 1
    assert (await store.query.count_states(JobFilter())).states[JobState.QUEUED] == 2
    none = await store.query.count_states(JobFilter(tag="run 7"))
    assert (none.total, none.first_created_us) == (0, None)
    asked = [running.id, new_id(), dead.id]
    assert await store.query.get_many(asked) == [await stored(store, running.id), None, await stored(store, dead.id)]


async def test_stream_of_a_tag_has_each_end_once(store: Store, home: str, clock: ManualClock) -> None:
    ids = await put(store, *[tagged() for _ in range(5)], new_job())
    jobs = {job.id: job for job in await take(store, 6)}
    for job_id in (ids[0], ids[1], ids[5]):
        await settle(store, jobs[job_id], result="7")
    async with Holdfast(home, now=clock) as app:
        stream = app.stream_tag(TAG)
        first, second = await anext(stream), await anext(stream)
        await stream.aclose()
        assert {first.job.id, second.job.id} == {ids[0], ids[1]}
        assert (first.result(), first.job.result) == (7, "7")
        clock.advance(0.5)
        await settle(store, jobs[ids[2]], JobState.DEAD, reason=Reason.ERROR, error="no")
        stream = app.stream_tag(TAG, cursor=first.cursor)
        again, third = await anext(stream), await anext(stream)
        await stream.aclose()
        assert (again.job.id, third.job.id) == (second.job.id, ids[2])
        with pytest.raises(JobFailed, match="no"):
            third.result()
        clock.advance(10)
        await store.admin.replay([ids[2]])
        (replayed,) = await take(store, 1)
        await settle(store, replayed)
        await settle(store, jobs[ids[3]])
        await store.admin.cancel([ids[4]])
        await settle(store, jobs[ids[4]], JobState.CANCELLED, reason=Reason.CANCELLED)
        await store.admin.delete([ids[0], ids[3]])
        rest = [each async for each in app.stream_tag(TAG, cursor=third.cursor)]
        assert {each.job.id for each in rest} == {ids[2], ids[4]}
        (cancelled,) = [each for each in rest if each.job.id == ids[4]]
        with pytest.raises(JobCancelled):
            cancelled.result()
        assert [each async for each in app.stream_tag(TAG, cursor=rest[-1].cursor)] == []
        whole = [each.job.id async for each in app.stream_tag(TAG)]
        assert sorted(whole) == sorted([ids[1], ids[2], ids[4]])
        assert [each.job.id for each in await asyncio.to_thread(lambda: list(app.sync.stream_tag(TAG)))] == whole
        for cursor in ("invented", str(StreamPosition("invented")), str(StreamPosition("1.1")), str(StreamPosition(0))):
            with pytest.raises(Invalid, match="cursor"):
                await anext(app.stream_tag(TAG, cursor=cursor))
        with pytest.raises(NotFound, match="no job has the tag 'x'"):
            await anext(app.stream_tag("x"))


async def test_stream_of_a_tag_includes_ends_while_it_reads(store: Store, home: str, clock: ManualClock) -> None:
    ids = await put(store, *[tagged() for _ in range(500)])
    await store.admin.cancel(ids[:210])  # more than a page
    async with Holdfast(home, now=clock) as app:
        stream = app.stream_tag(TAG)
        early = [await anext(stream) for _ in range(200)]
        clock.advance(5)
        await store.admin.cancel(ids[210:])
        found = [each.job.id for each in early] + [each.job.id async for each in stream]
        assert sorted(found) == sorted(ids)
        rest = [each async for each in app.stream_tag(TAG, cursor=early[-1].cursor)]
        assert [each.job.id for each in rest] == found[200:]
        size = len(rest[-1].cursor)
        assert size < (2_600 if store.url.startswith("postgresql") else 6_000)


async def test_wait_for_a_tag_includes_jobs_added_meanwhile(store: Store, home: str, clock: ManualClock) -> None:
    (deleted,) = await put(store, tagged())
    async with Holdfast(home, now=clock) as app:
        with pytest.raises(NotFound, match="no job has the tag"):
            await app.wait_for_tag("x")
        with pytest.raises(WaitTimeout, match="1 of 1 jobs of tag"):
            await app.wait_for_tag(TAG, timeout=0.01)
        waiting = asyncio.create_task(app.wait_for_tag(TAG))
        streaming = asyncio.create_task(anext(app.stream_tag(TAG)))
        (added,) = await put(store, tagged())
        await store.admin.delete([deleted])
        (job,) = await take(store, 1)
        assert job.id == added
        await settle(store, job)
        counted = await waiting
        assert (counted.total, counted.ended) == (1, 1)
        assert (await streaming).job.id == added
