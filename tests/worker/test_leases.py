"""Leases: lost ones, dead and frozen workers, jobs that kill their process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from holdfast import Context, Holdfast, Retry
from holdfast.core.events import JobDead, JobFailedEvent, LeaseLostEvent, StoreTrouble, SweepComplete
from holdfast.core.ids import new_id
from holdfast.core.metric_events import StoreAnswered
from holdfast.core.models import Claim, JobFilter, JobState
from holdfast.stores.base import ClaimRequest
from holdfast.stores.forwarding import ForwardingMaintenance
from holdfast.testing import Harness
from holdfast.testing.store_probe import WatchedQueueing
from tests.worker.support import Recorder, forever, gaps, harness, lose


async def test_lost_lease_cancels_the_handler_and_refuses_its_writes(app: Holdfast) -> None:
    events = Recorder(app)
    ended: list[str] = []

    @app.task("long", max_attempts=3)
    async def long(ctx: Context) -> str:
        if ctx.attempts > 1:
            return "second"
        try:
            await harnessed.clock.sleep(100)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "first"

    async with harness(app, concurrency=1) as harnessed:
        job = await long.enqueue()
        first = await harnessed.start()
        first.freeze()
        await harnessed.advance(29)
        assert (await job.job()).worker == first.worker.id
        second = await harnessed.start()
        await harnessed.advance(30)
        assert await job.result(timeout=0) == "second"
        first.thaw()
        await harnessed.advance(2)
        assert ended == ["cancelled"]
        done = await job.job()
    assert (done.state, done.attempts, done.claims, done.worker) == ("succeeded", 2, 2, second.worker.id)
    assert events.names(job.id).count("job_succeeded") == 1
    (lost,) = events.of(LeaseLostEvent)
    assert (lost.job_id, lost.worker_id) == (job.id, first.worker.id)


async def test_attempt_that_ends_after_its_worker_gave_it_up_is_settled_once(app: Holdfast) -> None:
    events = Recorder(app)
    swallowed: list[int] = []

    @app.task("long", max_attempts=3)
    async def long() -> None:
        while True:
            try:
                await harnessed.clock.sleep(1000)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed.append(1)

    async with harness(app, concurrency=1, grace="1s") as harnessed:
        job = await long.enqueue()
        first = await harnessed.start()
        await harnessed.advance(5)
        first.worker.stop("test")
        await harnessed.advance(30)
        await first.running
    assert events.names(job.id).count("job_released") == 1
    assert not events.of(LeaseLostEvent)
    assert first.worker.shared.in_flight["default"] == 0


async def test_a_settlement_that_comes_too_late_changes_nothing(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("long")
    async def long(ctx: Context) -> int:
        if ctx.attempts == 1:
            await harnessed.clock.sleep(5)
        return ctx.attempts

    async with harness(app, concurrency=1) as harnessed:
        job = await long.enqueue()
        first = await harnessed.start()
        first.freeze()
        await harnessed.advance(10)  # its handler ended at 5; the settlement is held up
        await harnessed.start()
        await harnessed.advance(60)
        first.thaw()
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == 2
    (lost,) = events.of(LeaseLostEvent)
    assert (lost.job_id, lost.worker_id) == (job.id, first.worker.id)


async def test_jobs_of_a_claim_answered_late_are_released(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Recorder(app)
    claim = WatchedQueueing.claim

    async def answer_late(queueing: WatchedQueueing, request: ClaimRequest) -> Claim:
        answer = await claim(queueing, request)
        if any(job.claims == 1 for job in answer.jobs):
            harnessed.clock.advance(25)
        return answer

    monkeypatch.setattr(WatchedQueueing, "claim", answer_late)

    @app.task("work")
    async def work(ctx: Context) -> int:
        return ctx.claims

    async with harness(app, lease="30s") as harnessed:
        jobs = [await work.enqueue() for _ in range(3)]
        await harnessed.run_until_idle()
        ended = [await job.job() for job in jobs]
    assert [(job.attempts, job.claims) for job in ended] == [(1, 2)] * 3
    assert not events.of(LeaseLostEvent)


async def test_buffered_jobs_of_a_blocked_loop_are_released(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("block")
    async def block(ctx: Context) -> None:
        harnessed.clock.advance(25 * (ctx.claims == 1))  # the other job of the claim waits in the buffer meanwhile

    async with harness(app, concurrency=2, lease="30s") as harnessed:
        jobs = [await block.enqueue() for _ in range(2)]
        await harnessed.run_until_idle()
        ended = [await job.job() for job in jobs]
    assert sorted((job.attempts, job.claims) for job in ended) == [(1, 1), (1, 2)]
    assert not events.of(LeaseLostEvent)


async def test_job_of_a_dead_worker_runs_elsewhere_in_time(app: Holdfast) -> None:
    events = Recorder(app)
    runs: list[datetime] = []

    @app.task("work")
    async def work() -> None:
        runs.append(harnessed.now)
        if len(runs) == 1:
            await forever()

    async with harness(app, lease="30s", sweep="5s") as harnessed:
        job = await work.enqueue()
        first = await harnessed.start()
        first.freeze()
        await harnessed.start()
        await harnessed.advance(120)
        (gap,) = gaps(runs)
        lost = (await app.attempts(job.id))[0]
        recovered = [event.recovered for event in events.of(SweepComplete) if event.recovered]
    assert 30 <= gap <= 30 + 5 * 1.2
    assert recovered == [1]
    (failed,) = events.of(JobFailedEvent)
    assert (failed.reason, failed.error) == ("crashed", f"{lost.error}; ready for its next attempt")
    assert first.worker.id in failed.error


async def test_job_of_a_dead_worker_is_found_in_time_while_very_much_is_pruned(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Recorder(app)
    pruned: list[int] = []

    async def prune(maintenance: ForwardingMaintenance, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        await harnessed.clock.sleep(0.5)
        pruned.append(limit)
        return limit  # there is always more

    monkeypatch.setattr(ForwardingMaintenance, "prune", prune)

    @app.task("work", max_attempts=3)
    async def work() -> None:
        await forever()

    async with harness(app, lease="30s", sweep="5s") as harnessed:
        await harnessed.start(queues="other")
        await harnessed.advance(65)
        first = await harnessed.start()
        handle = await work.enqueue()
        await harnessed.advance(0.5)
        first.freeze()
        for _ in range(36 * 2):
            await harnessed.advance(0.5)
        assert [event.job_id for event in events.of(JobFailedEvent)] == [handle.id]
        assert len(pruned) > 15, "each takes half a second, and half a second of pause: sweeps go on with the rest"


def watch_sweeps(app: Holdfast, harnessed: Harness) -> list[float]:
    """Returns a list to which each sweep of the application's workers adds its instant."""
    sweeps: list[float] = []

    def note_sweep(answered: StoreAnswered) -> None:
        if answered.verb == "reannounce":
            sweeps.append(harnessed.clock.monotonic())

    app.events.subscribe(note_sweep, StoreAnswered)
    return sweeps


async def test_workers_sweep_soon_after_their_start_and_not_together(app: Holdfast) -> None:
    async with harness(app, sweep="1000s") as harnessed:
        sweeps = watch_sweeps(app, harnessed)
        began = harnessed.clock.monotonic()
        for _ in range(4):
            await harnessed.start()
        for _ in range(76):
            await harnessed.advance(4)
        assert len(sweeps) == 4
        assert min(sweeps) < max(sweeps)
        assert min(sweeps) - began >= 100


async def test_sweeps_follow_the_setting(app: Holdfast) -> None:
    async with harness(app, sweep="60s") as harnessed:
        sweeps = watch_sweeps(app, harnessed)
        shared = (await harnessed.start()).worker.shared
        shared.apply_settings(shared.settings.replace_values(sweep="2s"))
        await harnessed.advance(60)
        sweeps.clear()
        for _ in range(20):
            await harnessed.advance(1)
        assert 10 <= len(sweeps) <= 13


async def test_pruning_has_its_time_beside_a_slow_part_of_a_sweep(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Recorder(app)

    async def prune(maintenance: ForwardingMaintenance, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        return limit

    async def reannounce(maintenance: ForwardingMaintenance) -> int:
        await harnessed.clock.sleep(4)
        return 0

    monkeypatch.setattr(ForwardingMaintenance, "prune", prune)
    monkeypatch.setattr(ForwardingMaintenance, "reannounce", reannounce)
    async with harness(app, sweep="5s") as harnessed:
        await harnessed.start()
        await harnessed.advance(60)
        for _ in range(40):
            await harnessed.advance(0.5)
        pruned = [event.pruned for event in events.of(SweepComplete) if event.pruned]
        assert pruned
        assert min(pruned) > 10_000, "in 1.5 s, with pauses of 10 ms"


async def test_job_that_loses_every_lease_ends_dead(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("poison", max_attempts=3)
    async def poison() -> None: ...

    async with harness(app) as harnessed:
        job = await poison.enqueue()
        for _ in range(2):
            await lose(app, job, harnessed.clock)
        store = await app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest(
                "last", {"*": 1}, limit=1, lease_for=harnessed.app.settings.lease, max_must_start=1, isolated=True
            )
        )
        assert [each.id for each in claim.jobs] == [job.id]
        await harnessed.run_until_idle()
        dead = await job.job()
        recorded = await app.attempts(job.id)
    assert (dead.state, dead.reason, dead.attempts) == ("dead", "crashed", 3)
    assert "lease expired" in (dead.error or "")
    assert "attempt 3" in (dead.error or "")
    assert [each.reason for each in recorded] == ["crashed"] * 3
    (reported,) = events.of(JobDead)
    assert (reported.job_id, reported.reason, reported.error) == (job.id, "crashed", dead.error)


async def test_a_job_that_lost_two_leases_runs_alone(app: Holdfast) -> None:
    together: dict[str, int] = {}
    now_running: set[str] = set()

    @app.task("work")
    async def work(name: str) -> None:
        now_running.add(name)
        for each in now_running:
            together[each] = max(together.get(each, 0), len(now_running))
        await harnessed.clock.sleep(10)
        now_running.discard(name)

    async with harness(app, concurrency=4) as harnessed:
        suspect = await work.enqueue("suspect")
        for _ in range(2):
            await lose(app, suspect, harnessed.clock)
        for number in range(8):
            await work.enqueue(f"innocent {number}")
        await harnessed.run_until_idle()
        assert await suspect.state() == "succeeded"
        assert (await suspect.job()).attempts == 3
    assert len(together) == 9
    assert together["suspect"] == 1
    assert max(together.values()) > 1


async def test_a_job_that_lost_one_lease_is_not_quarantined(app: Holdfast) -> None:
    runs: dict[str, datetime] = {}

    @app.task("work")
    async def work(name: str) -> None:
        runs[name] = harnessed.now
        await harnessed.clock.sleep(10)

    async with harness(app, concurrency=4) as harnessed:
        suspect = await work.enqueue("suspect")
        await lose(app, suspect, harnessed.clock)
        for number in range(3):
            await work.enqueue(f"innocent {number}")
        await harnessed.run_until_idle()
    assert len(set(runs.values())) == 1


async def test_suspects_start_before_other_jobs_of_their_claim_and_in_order(app: Holdfast) -> None:
    started: list[str] = []

    @app.task("work")
    async def work(name: str) -> None:
        started.append(name)
        await harnessed.clock.sleep(10)

    async with harness(app, concurrency=5) as harnessed:
        suspects = [await work.enqueue(f"suspect {number}") for number in range(3)]
        for each in suspects:
            await lose(app, each, harnessed.clock)
        await work.options(priority=50).enqueue("urgent")
        await work.enqueue("innocent")
        await harnessed.run_until_idle()
    assert started == ["suspect 0", "suspect 1", "suspect 2", "urgent", "innocent"]


async def test_leases_are_kept_as_long_as_the_handler_runs(app: Holdfast) -> None:
    @app.task("long")
    async def long() -> str:
        await harnessed.clock.sleep(600)
        return "done"

    async with harness(app, lease="30s") as harnessed:
        job = await long.enqueue()
        await harnessed.run_until_idle()
        done = await job.job()
    assert (done.state, done.attempts, done.claims) == ("succeeded", 1, 1)


async def test_worker_that_cannot_renew_stops_before_its_lease_ends(app: Holdfast) -> None:
    ended: list[tuple[str, datetime]] = []

    @app.task("long")
    async def long(ctx: Context) -> None:
        if ctx.attempts > 1:
            ended.append(("second began", harnessed.now))
            return
        try:
            await harnessed.clock.sleep(1000)
        except asyncio.CancelledError:
            ended.append(("first cancelled", harnessed.now))
            raise

    async with harness(app, lease="30s") as harnessed:
        await long.enqueue()
        first = await harnessed.start()
        began = harnessed.now
        first.cut_off("heartbeat")
        await harnessed.start()
        await harnessed.advance(90)
    assert [what for what, _ in ended] == ["first cancelled", "second began"]
    assert 24 <= (ended[0][1] - began).total_seconds() < 30 <= (ended[1][1] - began).total_seconds()


@pytest.mark.parametrize("verb", ["claim", "heartbeat"])
async def test_lease_counts_from_the_call_if_the_answer_is_late(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    asked: list[datetime] = []
    cancelled: list[datetime] = []
    call = getattr(WatchedQueueing, verb)

    async def answer_late(queueing: WatchedQueueing, *given: Any, **options: Any) -> Any:
        began = harnessed.now
        answer = await call(queueing, *given, **options)
        if not asked and (answer.jobs if verb == "claim" else answer.statuses):
            asked.append(began)
            harnessed._workers[0].cut_off("heartbeat")
            harnessed.clock.advance(8)
        return answer

    monkeypatch.setattr(WatchedQueueing, verb, answer_late)

    @app.task("long")
    async def long(ctx: Context) -> None:
        try:
            await harnessed.clock.sleep(1000 if ctx.attempts == 1 else 0)
        except asyncio.CancelledError:
            cancelled.append(harnessed.now)
            raise

    async with harness(app, lease="30s") as harnessed:
        await long.enqueue()
        await harnessed.start()
        await harnessed.advance(60)
    assert 24 <= (cancelled[0] - asked[0]).total_seconds() < 30


async def test_the_lost_job_s_policy_is_not_asked(app: Holdfast) -> None:
    """A lost lease goes on at once: the job was not at fault, as far as anybody knows."""
    runs: list[datetime] = []

    @app.task("work", retry=Retry.fixed(3600))
    async def work() -> None:
        runs.append(harnessed.now)

    async with harness(app) as harnessed:
        job = await work.enqueue()
        await lose(app, job, harnessed.clock)
        lost_at = harnessed.now
        await harnessed.run_until_idle()
    assert runs == [lost_at]


async def test_job_that_ends_during_a_heartbeat_disturbs_it_in_nothing(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Recorder(app)
    ending, call, heartbeats = asyncio.Event(), WatchedQueueing.heartbeat, []

    async def answer_late(queueing: WatchedQueueing, *given: Any, **options: Any) -> Any:
        answer = await call(queueing, *given, **options)
        heartbeats.append(answer.statuses)
        if answer.statuses:
            ending.set()
            await harnessed.clock.sleep(2)  # meanwhile its job is settled
        return answer

    monkeypatch.setattr(WatchedQueueing, "heartbeat", answer_late)

    @app.task("short")
    async def short() -> None:
        await ending.wait()

    async with harness(app) as harnessed:
        handle = await short.enqueue()
        await harnessed.start()
        await harnessed.advance(120)
        assert await handle.state() is JobState.SUCCEEDED
        assert len(heartbeats) > 3, "it goes on"
        assert events.of(StoreTrouble) == []


async def test_child_of_a_parent_that_returns_never_repeats_a_fencing_token(app: Holdfast) -> None:
    """The id of a child derives from its parent's: if a client gave that one, both may return after a deletion."""
    runs: list[tuple[str, int]] = []

    @app.task("child")
    async def child(context: Context) -> None:
        runs.append((context.id, context.claims))

    @app.task("parent")
    async def parent(context: Context) -> None:
        await context.call(child)

    given = new_id()
    async with harness(app) as harnessed:
        await harnessed.start()
        for _ in range(2):
            handle = await parent.options(id=given).enqueue()
            await harnessed.run_until_idle()
            assert await handle.state() is JobState.SUCCEEDED
            assert len((await app.delete(JobFilter())).changed) == 2
            await harnessed.advance(1)
    (first_id, first), (second_id, second) = runs
    assert first_id == second_id
    assert 0 < first < second
