"""Back-pressure: submissions beyond the depth of a limit are refused, on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from holdfast import Holdfast, JobFilter, QueueFull
from holdfast.app import backpressure
from holdfast.core.models import NewJob, Submitted
from holdfast.stores.forwarding import ForwardingQueueing
from tests.worker.support import harness


async def test_full_queue_refuses_until_there_is_room(app: Holdfast) -> None:
    @app.task("work", queue="mail")
    async def work(number: int) -> None: ...

    async with harness(app) as harnessed:
        await app.limits.add("mail", queue="mail", depth=5)
        for number in range(5):
            await work.enqueue(number)
        with pytest.raises(QueueFull, match=r"queue mail is full: 5 of 5 jobs wait"):
            await work.enqueue(5)
        assert await app.count(JobFilter()) == 5
        await app.enqueue("work", {"number": 1}, queue="other")
        await harnessed.start()
        await harnessed.advance(1)
        await work.enqueue(6)


async def test_batch_that_does_not_fit_is_refused_whole(app: Holdfast) -> None:
    @app.task("work")
    async def work(number: int) -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=5)
        await app.enqueue_many([work.new_job(number) for number in range(3)])
        with pytest.raises(QueueFull, match=r"3 of 5 jobs wait and 3 are too many"):
            await app.enqueue_many([work.new_job(number) for number in range(3)])
        assert await app.count(JobFilter()) == 3
        await app.enqueue_many([work.new_job(number) for number in range(2)])


async def test_delayed_jobs_count_and_changes_hold_at_once(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=2)
        await asyncio.gather(*[work.options(delay=60).enqueue() for _ in range(2)])
        with pytest.raises(QueueFull):
            await work.enqueue()
        await app.limits.change("depth", depth=3)
        await work.enqueue()
        await app.limits.remove("depth")
        await work.enqueue()


async def test_depth_alone_does_not_slow_claims(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=10)
        handle = await work.enqueue()
        assert (await app.get(handle.id)).partition is None


# ── by the values of a key ──────────────────────────────────────────────────────────────────────────────────────────
async def test_full_key_is_refused_and_others_are_not(app: Holdfast) -> None:
    @app.task("work", queue="mail")
    async def work(tenant: str) -> None: ...

    async with harness(app) as harnessed:
        await app.limits.add("quota", queue="mail", by="args.tenant", depth=3)
        for delay in (0, 0, 60):
            await work.options(delay=delay).enqueue("acme")
        with pytest.raises(QueueFull, match=r"^limit quota is full for acme: 3 of 3 jobs wait; try again later$"):
            await work.enqueue("acme")
        await work.enqueue("globex")
        await app.enqueue("work", {"tenant": "acme"}, queue="other")
        assert await app.count(JobFilter()) == 5
        await harnessed.start()
        await harnessed.advance(1)
        await work.enqueue("acme")


async def test_task_has_a_depth_of_its_own_in_all_queues(app: Holdfast) -> None:
    @app.task("work")
    async def work(tenant: str) -> None: ...

    async with harness(app):
        await app.limits.add("all", task="work", depth=3)
        await app.limits.add("mail", queue="mail", by="args.tenant", depth=2)
        await app.enqueue_many([work.new_job("a"), work.options(queue="mail").new_job("a")])
        await work.options(queue="mail").enqueue("a")
        with pytest.raises(QueueFull, match="limit all is full: 3 of 3"):
            await work.enqueue("b")
        await app.limits.change("all", depth=9)
        with pytest.raises(QueueFull, match="limit mail is full for a: 2 of 2"):
            await work.options(queue="mail").enqueue("a")
        await app.enqueue("rest", {"tenant": "b"}, queue="mail")


async def test_depth_that_is_given_later_counts_jobs_that_wait(app: Holdfast) -> None:
    @app.task("work")
    async def work(tenant: str) -> None: ...

    async with harness(app):
        for name, by in (("alpha", "args.user"), ("beta", "args.item"), ("zeta", "args.tenant")):
            await app.limits.add(name, queue="default", by=by)
        await app.enqueue_many([work.new_job("acme") for _ in range(2)])
        await app.limits.change("zeta", depth=2)
        with pytest.raises(QueueFull, match="limit zeta is full for acme: 2 of 2"):
            await work.enqueue("acme")
        await app.limits.change("zeta", depth=None)
        await work.enqueue("acme")


async def test_batch_with_a_full_key_is_refused_whole(app: Holdfast) -> None:
    @app.task("work")
    async def work(tenant: str) -> None: ...

    async with harness(app):
        await app.limits.add("quota", queue="default", by="args.tenant", depth=2)
        await work.enqueue("acme")
        batch = [work.new_job(tenant) for tenant in ("a", "acme", "b", "acme", "c")]
        with pytest.raises(QueueFull, match="full for acme: 1 of 2 jobs wait and 2 are too many"):
            await app.enqueue_many(batch)
        assert await app.count(JobFilter()) == 1
        await app.enqueue_many(batch[:3])


async def test_keys_of_a_batch_are_counted_in_one_call(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "_MAX_COUNTS", 50)

    @app.task("work")
    async def work(tenant: int) -> None: ...

    async with harness(app):
        await app.limits.add("quota", queue="default", by="args.tenant", depth=2)
        depths = app._submitter.depths
        calls: list[int] = []
        count = depths._count

        async def recorded(names: Sequence[str], max_counts: Mapping[str, int]) -> dict[str, int]:
            calls.append(len(names))
            return await count(names, max_counts)

        monkeypatch.setattr(depths, "_count", recorded)
        await app.enqueue_many([work.new_job(number) for number in range(90)])
        assert calls == [90]
        await work.enqueue(1)
        assert len(depths._counts) == 1  # of many keys none is kept
        with pytest.raises(QueueFull):
            await work.enqueue(1)


async def test_concurrent_submissions_of_a_key_are_counted(app: Holdfast) -> None:
    @app.task("work")
    async def work(tenant: str) -> None: ...

    async with harness(app):
        await app.limits.add("quota", queue="default", by="args.tenant", depth=20)
        answers = await asyncio.gather(*[work.enqueue("acme") for _ in range(60)], return_exceptions=True)
        stored = await app.count(JobFilter())
        assert sum(isinstance(answer, QueueFull) for answer in answers) == 60 - stored
        assert 20 <= stored <= 22  # what is on its way to the store is not counted there


async def test_jobs_that_pass_during_a_count_are_added_to_it(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task("work")
    async def work(tenant: str) -> None: ...

    async with harness(app):
        await app.limits.add("quota", queue="default", by="args.tenant", depth=5)
        depths = app._submitter.depths
        depths.release_room(await depths.reserve_room([work.new_job("acme")]))

        async def count(names: Sequence[str], max_counts: Mapping[str, int]) -> dict[str, int]:
            await depths.reserve_room([work.new_job("acme")])
            return dict.fromkeys(names, 0)

        monkeypatch.setattr(depths, "_count", count)
        with pytest.raises(QueueFull, match="1 of 5 jobs wait and 5 are too many"):
            await depths.reserve_room([work.new_job("acme") for _ in range(5)])


GIVEN = "11111111-1111-4111-8111-111111111111"


async def test_full_queue_answers_a_known_submission_with_its_job(app: Holdfast) -> None:
    known: list[dict[str, Any]] = [{"key": "k"}, {"unique": "active"}, {"unique": "10m"}, {"id": GIVEN}]
    async with harness(app) as harnessed:
        await app.limits.add("depth", queue="default", depth=4)
        first = [await app.enqueue("work", {"n": n}, **options) for n, options in enumerate(known)]
        again = [await app.enqueue("work", {"n": n}, **options) for n, options in enumerate(known)]
        batch = await app.enqueue_many([app.draft_job("work", {"n": n}, **each) for n, each in enumerate(known)])
        for options in ({"key": "new"}, {"unique": "active"}, {"unique": "1h"}, {}):
            with pytest.raises(QueueFull):
                await app.enqueue("work", {"n": 9}, **options)
        with pytest.raises(QueueFull):
            await app.enqueue_many([app.draft_job("work", {}, key="k"), app.draft_job("work", {}, key="new")])
        harnessed.clock.advance(601)  # nothing is left of the span
        with pytest.raises(QueueFull):
            await app.enqueue("work", {"n": 2}, unique="10m")
    assert [(handle.id, handle.created) for handle in again] == [(handle.id, False) for handle in first]
    assert [handle.id for handle in batch] == [handle.id for handle in first]


async def test_jobs_on_their_way_to_the_store_count(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each submission counts anew, and none is stored before all have counted."""
    monkeypatch.setattr(backpressure, "_COUNTED_FOR", 0.0)
    stalled = asyncio.Event()
    submit_now = ForwardingQueueing.submit

    async def submit_late(family: ForwardingQueueing, jobs: Sequence[NewJob]) -> list[Submitted]:
        await stalled.wait()
        return await submit_now(family, jobs)

    async def submit() -> int:
        try:
            return len(await app.enqueue_many([app.draft_job("work", {"n": n}) for n in range(10)]))
        except QueueFull:
            return 0

    monkeypatch.setattr(ForwardingQueueing, "submit", submit_late)
    async with harness(app):
        await app.limits.add("depth", queue="default", depth=50)
        submitting = []
        for _ in range(8):
            submitting.append(asyncio.create_task(submit()))
            await asyncio.sleep(0.1)  # it has counted, and been let through or refused
        stalled.set()
        accepted = await asyncio.gather(*submitting)
        assert sum(accepted) == 50
        assert await app.count(JobFilter()) == 50
