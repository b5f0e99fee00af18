"""Waits in Redis: their keys, their repair, and bounds of what one script does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.errors import Invalid, Unavailable
from holdfast.core.ids import as_ulid, new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import Job, JobFilter, JobState, NewJob, Options, Reason, UniqueKey
from holdfast.core.steps import NewStep
from holdfast.core.unique import Unique
from holdfast.core.waits import ChildStatus, Signal, SignalReceipt, SignalWait
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import (
    WORKER,
    Opener,
    after,
    claim,
    ended,
    ending,
    everything_agrees,
    new_job,
    put,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)
from tests.support.keys import Keys

HOUR = timedelta(hours=1)
TEN_SECONDS = timedelta(seconds=10)
CANCELLED, SUCCEEDED, WAITING = JobState.CANCELLED, JobState.SUCCEEDED, JobState.WAITING


async def suspended(store: Store, delay: timedelta | None = HOUR, queue: str = "default") -> Job:
    """A job that waits for a signal of the topic ``t``."""
    job = await running(store, queue=queue)
    wait = SignalWait(NewStep(job.lease, "s", 1, True, None, WORKER), "t", HOUR)
    assert await store.workflow.receive_signal(wait) == SignalReceipt(time_left=HOUR)
    answer = await settle(store, job, WAITING, refund=True, reason=Reason.SIGNAL, delay=delay)
    assert answer.state is WAITING
    return job


async def parent_of(store: Store, *children: NewJob) -> Job:
    job = await running(store)
    assert await store.workflow.start_children(job.lease, children, WORKER) is not None
    assert (await settle(store, job, WAITING, refund=True, reason=Reason.CHILDREN)).state is WAITING
    return job


async def fill(store: Store) -> dict[str, str]:
    """Something in every structure of waits; ids by what they are."""
    (first,) = await put(store)
    (waiter,) = await put(store, after(first))
    (last,) = await put(store, after(waiter, on=Condition.END))
    done = await ended(store, SUCCEEDED)
    (half,) = await put(store, after(done, first))
    parent = await parent_of(store, new_job(), new_job())
    receiver = await suspended(store)
    await suspended(store, delay=None, queue="mail")
    for topic in ("kept", "other", "kept"):
        await store.workflow.send_signal(Signal(new_id(), topic, "1"))
    return {"first": first, "waiter": waiter, "last": last, "half": half, "parent": parent.id, "receiver": receiver.id}


async def prune(store: Store, *states: str) -> int:
    """Prunes until nothing is left to prune; returns the number of jobs."""
    pruned = 0
    while number := await store.maintenance.prune(dict.fromkeys(states or ("succeeded",), TEN_SECONDS), limit=1000):
        pruned += number
    return pruned


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_structures_of_waits_agree(store: Store, keys: Keys, clock: ManualClock) -> None:
    ids = await fill(store)
    await everything_agrees(store, keys)
    assert keys.zrange("schedule", 0, -1) == [ids["receiver"]]
    assert keys.hgetall(f"dependencies:{ids['waiter']}") == {ids["first"]: "success open 0"}
    assert keys.hget(f"job:{ids['waiter']}", "waits") == "1"
    await store.admin.cancel([ids["first"]])
    assert await states_of(store, [ids[name] for name in ("waiter", "last", "half")]) == [
        CANCELLED,
        JobState.SCHEDULED,
        CANCELLED,
    ]
    await everything_agrees(store, keys)
    await store.admin.replay([ids["first"]])
    await everything_agrees(store, keys)
    clock.advance(3600)
    assert ids["receiver"] in await take_ids(store)
    await everything_agrees(store, keys)


async def test_plain_jobs_have_no_fields_of_waits(store: Store, keys: Keys) -> None:
    (job_id,) = await put(store)
    await settle(store, (await take(store))[0])
    assert {"waits", "hasDependents", "waitNumber"}.isdisjoint(keys.hgetall(f"job:{job_id}"))


async def test_deletion_of_all_jobs_leaves_no_keys_of_waits(store: Store, keys: Keys, clock: ManualClock) -> None:
    await fill(store)
    await take(store, capacity={EVERY_QUEUE: 100})
    clock.advance(31)
    for job in await store.maintenance.find_expired_leases(limit=100):
        await settle(store, job, JobState.DEAD, reason=Reason.CRASHED, error="lost", lease_expired=True)
    while (await store.admin.delete(JobFilter())).changed:
        pass
    clock.advance(timedelta(days=31).total_seconds())
    await store.maintenance.prune({"succeeded": HOUR}, limit=100)
    left = {name for name in keys.all() if not name.startswith("done:")}
    assert left <= {"meta", "seq", "changes", "failures"}


async def test_success_of_a_waiter_clears_its_reason(store: Store) -> None:
    (first,) = await put(store)
    (second,) = await put(store, after(first))
    for _ in range(2):
        await settle(store, (await take(store))[0])
    assert ((await stored(store, second)).state, (await stored(store, second)).reason) == (SUCCEEDED, None)


# ── repair ────────────────────────────────────────────────────────────────────────────────────────────────────────────
STRUCTURES = ["dependencies:waiter", "dependents:first", "receiver:receiver", "receivers:t", "schedule", "due"]


@pytest.mark.parametrize(
    "name", [*STRUCTURES, "dependencies:parent", "signals", "signals_kept", "signals_kept:kept", "signals_sent"]
)
@pytest.mark.parametrize("other", [False, True], ids=["missing", "of another type"])
async def test_structure_of_waits_that_is_gone_is_repaired(store: Store, keys: Keys, name: str, other: bool) -> None:
    ids = await fill(store)
    kind, _, whose = name.partition(":")
    name = f"{kind}:{ids[whose]}" if whose in ids else name
    assert keys.delete(name) == 1
    if other:
        keys.set(name, "not ours")

    await store.health.repair()

    await everything_agrees(store, keys)


async def test_repair_starts_a_job_that_waits_for_nothing(store: Store, keys: Keys) -> None:
    ids = await fill(store)
    keys.delete(f"dependencies:{ids['waiter']}")
    await store.health.repair()
    assert await state_of(store, ids["waiter"]) is JobState.SCHEDULED


async def test_repair_cancels_waiters_of_a_job_that_is_gone(store: Store, keys: Keys) -> None:
    (first,) = await put(store)
    second, third = after(first), after(first, on=Condition.END)
    await put(store, second, third, fourth := after(second.id))
    keys.delete(f"job:{first}")

    await store.health.repair()
    found = await stored(store, second.id)
    assert (found.state, found.reason) == (CANCELLED, "dependency")
    assert found.error == f"job {first}, for which it waited, is deleted"
    assert (await stored(store, fourth.id)).error == f"job {second.id}, for which it waited, is cancelled"
    await everything_agrees(store, keys)
    assert await take_ids(store) == [third.id]


async def test_repair_ends_where_ended_jobs_have_waited_for_each_other(store: Store, keys: Keys) -> None:
    parent = await running(store)
    child = after(parent.id)
    await put(store, child)
    await store.workflow.start_children(parent.lease, [child], WORKER)
    await settle(store, parent, JobState.DEAD, reason=Reason.ERROR, error="boom")
    assert await states_of(store, [parent.id, child.id]) == [JobState.DEAD, CANCELLED]

    await everything_agrees(store, keys)


async def test_repair_keeps_which_job_stands_for_a_child(store: Store, keys: Keys) -> None:
    (holder,) = await put(store, Unique("active").bind(new_job()))
    child = Unique("active").bind(new_job())
    parent = await running(store)
    await store.workflow.start_children(parent.lease, [child], WORKER)
    assert keys.hgetall(f"dependencies:{parent.id}") == {holder: "end open 1", child.id: f"held {holder}"}
    assert await store.health.repair() == []
    await store.admin.cancel([holder])
    await everything_agrees(store, keys)
    assert await store.workflow.start_children(parent.lease, [child], WORKER) == [ChildStatus(holder, CANCELLED)]


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("state", ["succeeded", "dead", "cancelled"])
async def test_kept_jobs_hold_up_no_others(store: Store, keys: Keys, clock: ManualClock, state: str) -> None:
    (going_on,) = await put(store, new_job(delay=timedelta(days=1)))
    kept = [await ended(store, JobState(state)) for _ in range(5)]
    (waiter,) = await put(store, after(going_on, *kept, on=Condition.END))
    plain = [await ended(store, JobState(state)) for _ in range(5)]
    clock.advance(11)
    assert await prune(store, state) == 5
    assert await states_of(store, plain) == [None] * 5
    assert sorted(keys.zrange(f"kept:{state}", 0, -1)) == sorted(kept)
    await everything_agrees(store, keys)

    late = await ended(store, JobState(state))
    clock.advance(11)
    assert await prune(store, state) == 1
    assert await state_of(store, late) is None

    await store.admin.cancel([waiter])
    clock.advance(11)
    assert await prune(store, state) == 5 + (state == "cancelled")
    assert keys.exists(f"kept:{state}") == 0
    await everything_agrees(store, keys)


@pytest.mark.parametrize("state", ["succeeded", "dead"])
async def test_kept_job_that_is_replayed_is_kept_no_more(
    store: Store, keys: Keys, clock: ManualClock, state: str
) -> None:
    (going_on,) = await put(store, new_job(delay=timedelta(days=1)))
    kept = await ended(store, JobState(state))
    await put(store, after(going_on, kept, on=Condition.END))
    clock.advance(11)
    assert await prune(store, state) == 0
    assert keys.zrange(f"kept:{state}", 0, -1) == [kept]
    await store.admin.replay([kept], force=True)
    assert keys.exists(f"kept:{state}") == 0
    await everything_agrees(store, keys)


async def test_cancelled_job_that_a_replay_brings_back_is_kept_no_more(
    store: Store, keys: Keys, clock: ManualClock
) -> None:
    first = await ended(store, JobState.DEAD)
    (waiter,) = await put(store, after(first))
    plain = await ended(store, CANCELLED)
    clock.advance(11)
    assert await prune(store, "cancelled") == 1
    assert await states_of(store, [waiter, plain]) == [CANCELLED, None]
    assert keys.zrange("kept:cancelled", 0, -1) == [waiter]
    await everything_agrees(store, keys)
    clock.advance(11)
    assert await prune(store, "cancelled") == 0
    await store.admin.replay([first])
    assert keys.exists("kept:cancelled") == 0
    await everything_agrees(store, keys)


async def test_job_of_many_ended_waiters_is_pruned_in_parts(store: Store, keys: Keys, clock: ManualClock) -> None:
    first = await ended(store, SUCCEEDED)
    waiters = await put(store, *[after(first, on=Condition.FAILURE) for _ in range(2500)])
    assert keys.zcard(f"dependents:{first}") == 2500
    clock.advance(11)
    keys.client.config_resetstat()
    assert await prune(store) == 1
    calls = keys.client.info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] >= 3
    assert await state_of(store, first) is None
    assert keys.exists(f"dependents:{first}") == 0
    assert keys.hgetall(f"dependencies:{waiters[0]}") == {first: "failure failed 0"}
    await everything_agrees(store, keys)


async def test_pruning_looks_again_at_waiters_that_may_wait_again(store: Store, keys: Keys, clock: ManualClock) -> None:
    first = await ended(store, JobState.DEAD)
    waiters = await put(store, *[after(first) for _ in range(3)])
    keys.hset(f"job:{first}", "hasDependents", waiters[-1])  # as an earlier script has left it
    await put(store, after(first, id="00000000-0000-7000-8000-000000000000"))
    assert keys.hget(f"job:{first}", "hasDependents") == "1"

    keys.hset(f"job:{first}", "hasDependents", waiters[-1])
    await store.admin.replay([first])
    assert keys.hget(f"job:{first}", "hasDependents") == "1"

    (job,) = await take(store)
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    (callback,) = await put(store, after(first, on=Condition.FAILURE))
    keys.hset(f"job:{first}", mapping={"hasDependents": waiters[-1], "keptFor": callback})
    clock.advance(11)
    assert await prune(store, "dead") == 0
    assert keys.hget(f"job:{first}", "hasDependents") == "1"


async def test_chain_of_ten_thousand_falls_and_comes_back(store: Store, keys: Keys) -> None:
    chain = [new_job()]
    for _ in range(9_999):
        chain.append(after(chain[-1].id))
    await put(store, *chain)
    await store.admin.cancel([chain[0].id])
    assert keys.hgetall("counts") == {"cancelled:default": "10000"}
    await store.admin.replay([chain[0].id])
    assert keys.hgetall("counts") == {"queued:default": "1", "waiting:default": "9999"}
    await store.admin.delete([chain[0].id])
    assert keys.hgetall("counts") == {"cancelled:default": "9999"}


async def test_wide_fan_out_is_due_at_once(store: Store) -> None:
    (first,) = await put(store)
    others = await put(store, *[after(first) for _ in range(5000)])
    await settle(store, (await take(store))[0])
    taken: list[str] = []
    while ids := await take_ids(store, 1000):
        taken += ids
    assert taken == others


# ── submissions ───────────────────────────────────────────────────────────────────────────────────────────────────────
def apart(one: NewJob, other: NewJob) -> Sequence[NewJob]:
    """Puts jobs into different scripts of one submission."""
    return [one, *[new_job(delay=HOUR) for _ in range(250)], other]


async def test_dependency_on_an_earlier_part_is_found(store: Store) -> None:
    (holder,) = await put(store, new_job(key="k"))
    unique = Options(unique=UniqueKey(key="\x1fu", during="active"))
    (busy,) = await put(store, new_job(options=unique))
    for twin, owner in ((new_job(key="k"), holder), (new_job(options=unique), busy), (fresh := new_job(), fresh.id)):
        waiter = after(twin.id)
        await put(store, *apart(twin, waiter))
        assert (await store.workflow.read_waits(waiter.id)).dependencies == [
            DependencyInfo(owner, Condition.SUCCESS, DependencyState.OPEN, False)
        ]


async def test_dependency_on_a_key_whose_job_is_gone_is_met(store: Store, keys: Keys, clock: ManualClock) -> None:
    gone = await ended(store, SUCCEEDED, key="k", key_for=HOUR)
    clock.advance(11)
    assert await prune(store) == 1
    twin = new_job(key="k")
    for jobs in ([twin, after(twin.id)], apart(twin, after(twin.id))):
        await put(store, *jobs)
        assert (await store.workflow.read_waits(jobs[-1].id)).dependencies == [
            DependencyInfo(gone, Condition.SUCCESS, DependencyState.MET, False)
        ]
        assert await take_ids(store, 1) == [jobs[-1].id]
    await everything_agrees(store, keys)


async def test_known_job_is_submitted_again_without_its_dependencies(store: Store, clock: ManualClock) -> None:
    first = await ended(store, SUCCEEDED)
    waiter = after(first, key="k")
    await put(store, waiter)
    await store.admin.delete([first])
    assert await put(store, waiter) == [waiter.id]
    assert await put(store, after(first, key="k")) == [waiter.id]


# ── replays ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_replay_answers_waiting_for_a_job_that_waits_again(store: Store) -> None:
    (first,) = await put(store)
    (second,) = await put(store, after(first))
    await store.admin.cancel([second])
    assert (await store.admin.replay([second])).changed == [(second, WAITING)]
    assert await take_ids(store) == [first]


async def test_filtered_deletion_takes_what_it_has_cancelled(store: Store, keys: Keys) -> None:
    (first,) = await put(store)
    (second,) = await put(store, after(first))
    assert [job_id for job_id, _ in (await store.admin.delete(JobFilter())).changed] == [first, second]
    assert keys.exists("counts") == 0


# ── deadlines, notifications, memory ──────────────────────────────────────────────────────────────────────────────────
async def test_delivered_waiting_job_is_claimed_from_its_deadline_on(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    assert (await claim(store, ids=[job.id])).refused == 1
    clock.advance(3600)
    assert await take_ids(store, ids=[job.id]) == [job.id]


async def test_edited_waiting_job_keeps_its_deadline_in_the_new_queue(
    store: Store, keys: Keys, clock: ManualClock
) -> None:
    job = await suspended(store)
    await store.admin.edit(job.id, JobChanges(queue="mail", delay=timedelta(0)))
    await everything_agrees(store, keys)
    assert await take(store, capacity={"mail": 1}) == []
    clock.advance(3600)
    assert await take_ids(store, capacity={"mail": 1}) == [job.id]


async def test_waiter_of_a_dependent_is_woken_in_every_process(store: Store, opener: Opener) -> None:
    (first,) = await put(store)
    (second,) = await put(store, after(first))
    waiting = [
        asyncio.create_task(each.queueing.wait([f"job:{second}"], timeout=50)) for each in (store, await opener())
    ]
    await asyncio.sleep(0.3)
    await store.admin.cancel([first])
    await asyncio.wait_for(asyncio.gather(*waiting), timeout=60)
    assert await state_of(store, second) is CANCELLED


async def test_full_server_keeps_no_signals_and_ends_jobs(store: Store, keys: Keys) -> None:
    job = await suspended(store)
    (first,) = await put(store)
    (second,) = await put(store, after(first))
    (taken,) = await take(store)
    known = keys.all()
    keys.client.config_set("maxmemory", "1")
    try:
        with pytest.raises(Unavailable):
            await store.workflow.send_signal(Signal("id", "other", "1"))
        assert keys.all() == known
        await store.queueing.settle([ending(taken)])
    finally:
        keys.client.config_set("maxmemory", "0")
    assert await states_of(store, [job.id, second]) == [WAITING, JobState.SCHEDULED]
    assert (await store.workflow.send_signal(Signal("id", "t", "1"))).job_id == job.id
    await everything_agrees(store, keys)


# ── ULIDs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_waits_are_stored_as_ulids_and_reported_as_uuids(home: str, keys: Keys, clock: ManualClock) -> None:
    opener = Opener(home + "&ids=ulid", clock)
    store = await opener()
    first, missing = new_job(), new_id()
    second = after(first.id)
    await put(store, first, second)
    assert keys.hgetall(f"dependencies:{as_ulid(second.id)}") == {as_ulid(first.id): "success open 0"}
    assert (await store.workflow.read_waits(first.id)).dependents[0].job_id == second.id
    assert (await store.workflow.read_waits(second.id)).dependencies[0].job_id == first.id
    with pytest.raises(Invalid, match=missing):
        await put(store, after(missing))
    await store.admin.cancel([first.id])
    error = f"job {first.id}, for which it waited, is cancelled"
    assert (await stored(store, second.id)).error == error
    cancelled = await store.query.find(JobFilter(states=(CANCELLED,)))
    assert [each.error for each in cancelled.jobs] == [error, "cancelled"]
    child = new_job()
    parent = await running(store)
    assert [each.job_id for each in await store.workflow.start_children(parent.lease, [child], WORKER) or ()] == [
        child.id
    ]
    await settle(store, parent, WAITING, refund=True)
    receiver = await suspended(store)
    assert (await store.workflow.send_signal(Signal("id", "t", "1"))).job_id == receiver.id
    await opener.close()
