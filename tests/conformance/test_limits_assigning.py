"""Limits that reach jobs after their submission: replayed, running, edited, half assigned; on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from holdfast import Holdfast
from holdfast.app import limits
from holdfast.core.clock import ManualClock
from holdfast.core.errors import Unavailable
from holdfast.core.job_changes import JobChanges
from holdfast.core.limit_options import LimitOptions, draft_limit
from holdfast.core.limits import SEPARATOR, LimitChange
from holdfast.core.models import Job, JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.limited import end, get, job_of, limit
from tests.conformance.support import Opener, ended, failing, new_job, put, settle, take


async def dead(store: Store, *jobs: Job) -> None:
    for job in jobs:
        await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="x")


async def partitions(store: Store, ids: Sequence[str]) -> set[str | None]:
    return {(await get(store, job_id)).partition for job_id in ids}


# ── replays ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("place", [{"task": "work"}, {"queue": "default"}])
async def test_replayed_jobs_obey_a_later_limit(store: Store, place: dict[str, str]) -> None:
    await limit(store, "big", task="work", concurrency=100)
    ids = await put(store, *[job_of(1) for _ in range(3)])
    await dead(store, *await take(store, 9))
    await limit(store, "one", concurrency=1, **place)
    assert len((await store.admin.replay(ids)).changed) == 3
    assert await partitions(store, ids) == {SEPARATOR.join(("big", "one"))}
    assert len(await take(store, 9)) == 1


async def test_replayed_plain_jobs_obey_a_later_limit(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[job_of(tenant) for tenant in (1, 1, 2)])
    await dead(store, *await take(store, 9))
    await limit(store, task="work", by="args.tenant", concurrency=1)
    await store.admin.replay(ids)
    assert len(await take(store, 9)) == 2
    (known,) = await store.limits.read_limits()
    assert known.by == "args.tenant"


async def test_replayed_jobs_forget_a_removed_limit(store: Store) -> None:
    await limit(store, "a", concurrency=5)
    await limit(store, "b", task="work", concurrency=5)
    ids = await put(store, job_of(1))
    await dead(store, *await take(store, 9))
    await remove(store, "a")
    await store.admin.replay(ids)
    assert await partitions(store, ids) == {"b"}
    await dead(store, *await take(store, 9))
    await remove(store, "b")
    await store.admin.replay(ids)
    assert await partitions(store, ids) == {None}
    assert len(await take(store, 9)) == 1


async def remove(store: Store, name: str) -> None:
    (known,) = [each for each in await store.limits.read_limits() if each.name == name]
    assert await store.limits.write_limit(LimitChange(known, known.revision, remove=True)) is not None


async def test_replay_with_a_payload_never_starts_under_the_old_key(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, job_of(1))
    (running,) = await take(store, 9)
    for _ in range(20):
        (job_id,) = await put(store, job_of(2))
        await store.admin.cancel([job_id])

        async def claim_often() -> list[Job]:
            return [job for _ in range(8) for job in await take(other, 5)]

        _, taken = await asyncio.gather(store.admin.replay([job_id], payload='{"tenant":1}'), claim_often())
        assert taken == []
        await store.admin.cancel([job_id])
    await end(store, running)


# ── running jobs ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("before", [True, False])
async def test_running_jobs_count_in_a_later_limit(store: Store, clock: ManualClock, before: bool) -> None:
    if before:
        await limit(store, "big", task="work", concurrency=100)
    ids = await put(store, *[job_of(1, max_attempts=9) for _ in range(4)])
    jobs = await take(store, 3)
    await limit(store, "one", task="work", by="args.tenant", concurrency=1, weight=2)
    assert (await store.limits.assign_partitions(task="work")).changed == 4
    assert len(await partitions(store, ids)) == 1
    assert [use.used for use in await store.limits.bucket_use(["one=1", "big"])] == [6, 3 if before else 0]
    assert await take(store, 9) == []
    await store.queueing.settle([failing(job) for job in jobs])
    assert [use.used for use in await store.limits.bucket_use(["one=1", "big"])] == [0, 0]
    clock.advance(3600)
    assert len(await take(store, 9)) == 1
    assert [use.used for use in await store.limits.bucket_use(["one=1"])] == [2]
    assert await take(store, 9) == []


async def test_running_jobs_leave_a_removed_limit(store: Store) -> None:
    await limit(store, concurrency=5)
    await put(store, job_of(1))
    (job,) = await take(store, 9)
    await remove(store, "mail")
    assert (await store.limits.assign_partitions(queue="default")).changed == 1
    await limit(store, concurrency=1)
    assert [use.used for use in await store.limits.bucket_use(["mail"])] == [0]
    await end(store, job)
    assert (await store.health.repair()) == []


# ── edits at once ───────────────────────────────────────────────────────────────────────────────────────────────────
async def test_ended_jobs_are_left_out(store: Store) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED):
        await ended(store, state)
    (ready,) = await put(store, new_job())
    await limit(store, concurrency=1)

    assert (await store.limits.assign_partitions(queue="default")).changed == 1
    assert (await get(store, ready)).partition == "mail"


async def test_edits_at_once_leave_the_right_partition(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, "a", queue="a", by="args.tenant", concurrency=1)
    await limit(store, "b", queue="b", by="args.tenant", concurrency=1)
    ids = await put(store, *[job_of(1, queue="a") for _ in range(20)])
    for job_id in ids:
        await asyncio.gather(
            store.admin.edit(job_id, JobChanges(queue="b")),
            other.admin.edit(job_id, JobChanges(payload='{"tenant":2}')),
        )
    assert await partitions(store, ids) == {"b=2"}


# ── unfinished assignments ──────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def interrupted() -> Iterator[None]:
    """Changes of limits end after they are written, as if their process were killed."""

    async def fail(*_: object) -> int:
        raise Unavailable("killed")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "_assign", fail)
        with suppress(Unavailable):
            yield


async def test_declaration_finishes_an_interrupted_assignment(home: str, store: Store, clock: ManualClock) -> None:
    declared = {"one": draft_limit("one", LimitOptions(task="work", concurrency=1))}
    await put(store, *[job_of(1) for _ in range(3)])
    async with Holdfast(home, now=clock) as app, Holdfast(home, now=clock) as other:
        with interrupted():
            await app.limits.reconcile(declared)
        await other.limits.reconcile(declared)
        known = await other.limits.get("one")
        assert known.unassigned == ()
        await other.limits.reconcile(declared)
        assert await other.limits.get("one") == known
    assert len(await take(store, 9)) == 1


async def test_maintenance_finishes_an_interrupted_assignment(home: str, store: Store, clock: ManualClock) -> None:
    async with Holdfast(home, now=clock) as app, Holdfast(home, now=clock) as other:
        await app.limits.add("one", queue="elsewhere", concurrency=1)
        await put(store, *[new_job(queue="elsewhere", task="other"), *[job_of(1) for _ in range(3)]])
        with interrupted():
            await app.limits.add("one", task="work", concurrency=1, replace_existing=True)
        seen = await other.limits.resume_assignments({})
        assert (await other.limits.get("one")).unassigned == (("elsewhere", None), (None, "work"))
        assert await other.limits.resume_assignments(seen) == seen
        assert await other.limits.resume_assignments(seen) == {}
    assert len(await take(store, 9)) == 1
    assert len(await take(store, 9, {"elsewhere": 9})) == 1


async def test_depth_limit_given_a_concurrency_is_assigned(home: str, store: Store, clock: ManualClock) -> None:
    async with Holdfast(home, now=clock) as app:
        await app.limits.add("big", task="work", concurrency=100)
        await app.limits.add("depth", queue="default", depth=100)
        await put(store, *[job_of(1) for _ in range(3)])
        await app.limits.change("depth", concurrency=1)
    assert len(await take(store, 9)) == 1
