"""Many dependencies: long chains, wide fans, and races."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.models import Job, JobState, Options, Reason, UniqueKey
from holdfast.stores.base import Store
from tests.conformance.support import Opener, ending, new_job, put, running, settle, states_of, take, take_ids
from tests.conformance.test_dependencies import CANCELLED, END, FAILURE, WAITING, after, dependencies_of, end, put_after


async def test_long_chain_falls_at_once(store: Store) -> None:
    chain = [new_job()]
    for _ in range(1999):
        chain.append(after(chain[-1].id))
    await put(store, *chain)
    await store.admin.cancel([chain[0].id])
    assert await states_of(store, [chain[n].id for n in (0, 1, 1000, 1999)]) == [CANCELLED] * 4
    await store.admin.replay([chain[0].id])
    assert await states_of(store, [chain[n].id for n in (1, 1000, 1999)]) == [WAITING] * 3


async def test_kept_job_brings_back_all_its_waiters(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store)
    waiters = await put(store, *[after(first) for _ in range(1000)])
    last = "ffffffff-ffff-7fff-bfff-ffffffffffff"  # in the order of ids too
    await put(store, after(first, on=Condition.FAILURE, id=last, queue="later"))
    (job,) = await take(store)
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    clock.advance(11)
    assert await store.maintenance.prune({"dead": timedelta(seconds=10)}, limit=1000) == 0
    await store.admin.replay([first])
    assert await states_of(store, waiters) == [WAITING] * 1000


async def test_waiter_far_behind_a_job_with_two_keys_waits_for_what_was_answered(store: Store) -> None:
    unique = Options(unique=UniqueKey(key="\x1fu", during="active"))
    (holder,) = await put(store, new_job(options=unique))
    for others in ([], [new_job(key="one")]):  # takes the key that its job did not need
        twin = new_job(key="one", options=unique)
        waiter = after(twin.id)
        answers = await put(store, twin, *others, *[new_job() for _ in range(450)], waiter)
        assert answers[0] == holder
        waits = await store.workflow.read_waits(waiter.id)
        assert [each.job_id for each in waits.dependencies] == [holder]


async def test_first_of_many_dependencies_on_each_job_counts(store: Store) -> None:
    firsts = await put(store, *[new_job() for _ in range(12)])
    repeated = [Dependency(firsts[n % 12], END if n < 12 else FAILURE) for n in range(60)]
    last = new_job(after=tuple(repeated))
    await put(store, last)
    found = await dependencies_of(store, last.id)
    assert [(each.job_id, each.on) for each in found] == [(job_id, END) for job_id in sorted(firsts)]


async def test_wide_fan_in_starts_once(store: Store, opener: Opener) -> None:
    others = [store, await opener()]
    firsts = await put(store, *[new_job() for _ in range(1000)])
    last = await put_after(store, *firsts)
    jobs = await take(store, 1000)
    pieces = [jobs[n : n + 100] for n in range(0, 1000, 100)]
    await asyncio.gather(
        *[others[n % 2].queueing.settle([ending(job) for job in piece]) for n, piece in enumerate(pieces)]
    )
    assert await take_ids(store) == [last]
    assert await take_ids(store) == []


async def test_submissions_and_ends_race(store: Store, opener: Opener) -> None:
    other = await opener()
    firsts = [await running(store) for _ in range(30)]

    async def submit(jobs: Sequence[Job]) -> list[str]:
        return [await put_after(other, *{job.id for job in pair}) for pair in pairwise(jobs)]

    seconds, _ = await asyncio.gather(submit(firsts), asyncio.gather(*[end(store, job) for job in firsts]))
    assert sorted(await take_ids(store)) == sorted(seconds)
