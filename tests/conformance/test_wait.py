"""Waiting: early is allowed, late is not. The only tests of this suite that look at a real clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from datetime import timedelta

from holdfast.core.models import JobState, NewJob, Reason
from holdfast.core.workers import WorkerCommand
from holdfast.stores.base import Store
from tests.conformance.limited import limit
from tests.conformance.support import LEASE, Opener, ending, heartbeat, new_job, put, running, settle, stored, take
from tests.support.load import slowness

LONG = 120.0
"""Too long for a test, in seconds."""


def soon() -> float:
    """Seconds that are far from ``LONG``, and more on a loaded machine."""
    return 3.0 * slowness()


async def quiet(waiting: Store, topics: list[str]) -> None:
    """Wait until there is no old news left, that an ear has only now begun to listen being some: returning early is
    allowed, but not for ever."""
    in_a_row = 0
    for _ in range(20):
        started = time.monotonic()
        await waiting.queueing.wait(topics, timeout=0.05)
        in_a_row = in_a_row + 1 if time.monotonic() - started >= 0.04 else 0
        if in_a_row == 3:
            return
    raise AssertionError("wait keeps returning without news")


async def seconds_until_woken(waiting: Store, topics: list[str], notifications: Awaitable[object]) -> float:
    """How long ``wait`` lasted when ``news`` happened after it had begun."""
    await quiet(waiting, topics)
    for _ in range(10):
        waiter = asyncio.create_task(waiting.queueing.wait(topics, timeout=LONG))
        await asyncio.sleep(0.05)
        if not waiter.done():  # else it was late news of what the test did before
            break
    assert not waiter.done(), "keeps waking before there is any news"
    started = time.monotonic()
    await notifications
    await waiter
    return time.monotonic() - started


async def test_waiting_without_news_ends_at_the_timeout(store: Store) -> None:
    (job_id,) = await put(store)
    topics = ["queue:default", f"job:{job_id}", "worker:w"]
    await quiet(store, topics)
    started = time.monotonic()

    await store.queueing.wait(topics, timeout=0.2)

    assert 0.15 <= time.monotonic() - started < soon()


async def test_waiting_for_nothing_is_a_sleep(store: Store) -> None:
    started = time.monotonic()

    await store.queueing.wait([], timeout=0.1)
    await store.queueing.wait(["queue:default"], timeout=0)

    assert time.monotonic() - started < soon()


async def test_submission_wakes_waiter_in_the_same_process(store: Store) -> None:
    assert await seconds_until_woken(store, ["queue:default"], put(store)) < soon()


async def test_submission_wakes_waiter_in_another_process(store: Store, opener: Opener) -> None:
    assert await seconds_until_woken(await opener(), ["queue:default"], put(store)) < soon()


async def test_submission_wakes_waiter_for_every_queue(store: Store, opener: Opener) -> None:
    notifications = put(store, new_job(queue="never seen before"))

    assert await seconds_until_woken(await opener(), ["queue:*"], notifications) < soon()


async def test_submission_wakes_waiter_although_its_event_loop_ends(store: Store, opener: Opener) -> None:
    """An async view has an event loop of its own where a server without one calls it: asyncio.run, for each request."""
    submitting = opener.unopened()

    async def view(job: NewJob) -> None:
        await submitting.open()
        await put(submitting, job)

    for job in (new_job(key="later", delay=timedelta(hours=1)), new_job(key="now")):
        submission = asyncio.to_thread(asyncio.run, view(job))
        assert await seconds_until_woken(store, ["queue:default"], submission) < soon()


async def test_submission_wakes_all_waiters(store: Store, opener: Opener, carried: bool) -> None:
    """A transport wakes one for each id it carries."""
    others = [store, *[await opener() for _ in range(4)]]
    for each in others:
        await quiet(each, ["queue:default"])
    started = time.monotonic()
    waiters = [
        asyncio.create_task(each.queueing.wait(["queue:default"], timeout=LONG)) for each in others for _ in range(3)
    ]
    await asyncio.sleep(0.05)

    jobs = [new_job() for _ in waiters] if carried else [new_job()]
    await put(store, *jobs)
    await asyncio.gather(*waiters)

    assert time.monotonic() - started < soon()


async def test_submission_between_last_claim_and_wait_is_not_missed(store: Store, opener: Opener) -> None:
    """The gap every idle worker passes through: it saw an empty queue, and goes to sleep."""
    worker, submitter = await opener(), store
    for each in (submitter, worker):
        assert await take(worker) == []
        (job_id,) = await put(each)
        started = time.monotonic()
        await worker.queueing.wait(["queue:default"], timeout=LONG)
        assert time.monotonic() - started < soon()
        assert [job.id for job in await take(worker)] == [job_id]


async def test_end_of_a_job_wakes_its_waiter(store: Store, opener: Opener) -> None:
    job = await running(store)

    assert await seconds_until_woken(await opener(), [f"job:{job.id}"], settle(store, job)) < soon()


async def test_end_of_a_job_wakes_waiter_in_the_same_process(store: Store) -> None:
    job = await running(store)

    assert await seconds_until_woken(store, [f"job:{job.id}"], settle(store, job)) < soon()


async def test_cancellation_wakes_waiter_for_the_job(store: Store, opener: Opener) -> None:
    (job_id,) = await put(store)

    assert await seconds_until_woken(await opener(), [f"job:{job_id}"], store.admin.cancel([job_id])) < soon()


async def test_a_released_job_wakes_its_queue(store: Store, opener: Opener) -> None:
    job = await running(store)
    notifications = settle(store, job, JobState.QUEUED, reason=Reason.RELEASED, refund=True)

    assert await seconds_until_woken(await opener(), ["queue:default"], notifications) < soon()


async def test_a_retry_without_a_delay_wakes_its_queue(store: Store, opener: Opener) -> None:
    job = await running(store)
    notifications = settle(store, job, JobState.FAILED, error="boom", delay=timedelta(0))

    assert await seconds_until_woken(await opener(), ["queue:default"], notifications) < soon()


async def test_a_replay_wakes_its_queue(store: Store, opener: Opener) -> None:
    job = await running(store)
    await settle(store, job, JobState.DEAD, error="boom")

    assert await seconds_until_woken(await opener(), ["queue:default"], store.admin.replay([job.id])) < soon()


async def test_resuming_wakes_the_queue(store: Store, opener: Opener) -> None:
    await store.admin.pause("default")
    await put(store)

    assert await seconds_until_woken(await opener(), ["queue:default"], store.admin.resume("default")) < soon()


async def test_an_order_wakes_its_worker(store: Store, opener: Opener) -> None:
    await store.queueing.heartbeat(heartbeat("w"), [], lease_for=LEASE)

    assert (
        await seconds_until_woken(await opener(), ["worker:w"], store.admin.send_command(WorkerCommand.STOP, ["w"]))
        < soon()
    )


async def test_a_cancellation_wakes_the_worker_that_runs_the_job(store: Store, opener: Opener) -> None:
    (job_id,) = await put(store)
    await take(store, worker="w")

    assert await seconds_until_woken(await opener(), ["worker:w"], store.admin.cancel([job_id])) < soon()
    assert (await stored(store, job_id)).cancelling


async def test_a_cancelled_wait_leaves_the_store_usable(store: Store) -> None:
    waiter = asyncio.create_task(store.queueing.wait(["queue:default"], timeout=LONG))
    await asyncio.sleep(0.02)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)

    assert await seconds_until_woken(store, ["queue:default"], put(store)) < soon()


async def test_waiter_that_stops_leaves_others_listening(store: Store, opener: Opener) -> None:
    """The hint stays prompt for the ones still waiting: best of three, far below any poll underneath."""
    waiting = await opener()
    lasted = []
    for _ in range(3):
        await quiet(waiting, ["queue:default"])
        stays = asyncio.create_task(waiting.queueing.wait(["queue:default"], timeout=LONG))
        await asyncio.sleep(0.02)
        await waiting.queueing.wait(["worker:w"], timeout=0.02)
        await asyncio.sleep(0.02)
        started = time.monotonic()
        await put(store)
        await stays
        lasted.append(time.monotonic() - started)

    assert min(lasted) < 0.2 * slowness()


async def test_closing_a_store_does_not_wait_for_waiters(opener: Opener) -> None:
    store = await opener()
    waiter = asyncio.create_task(store.queueing.wait(["queue:default"], timeout=LONG))
    await asyncio.sleep(0.02)
    started = time.monotonic()

    await store.close()

    assert time.monotonic() - started < soon()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)


async def test_end_under_a_limit_of_a_task_wakes_waiters_for_other_queues(store: Store, opener: Opener) -> None:
    """Also if the process that ends the job has never submitted one."""
    await limit(store, task="work", concurrency=1)
    waiting, ending_store = await opener(), await opener()
    await put(store, new_job(queue="a"), new_job(queue="a"), new_job(queue="b"))
    (first,) = await take(ending_store, 1, {"a": 1})
    assert await take(waiting, 1, {"b": 1}) == []
    ended = ending_store.queueing.settle([ending(first)])
    assert await seconds_until_woken(waiting, ["queue:b"], ended) < soon()

    (second,) = await take(ending_store, 1, {"a": 1})
    failed = ending_store.queueing.settle([ending(second, JobState.DEAD, reason=Reason.ERROR, error="boom")])
    assert await seconds_until_woken(waiting, ["queue:b"], failed) < soon()
