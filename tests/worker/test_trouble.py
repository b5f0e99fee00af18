"""Stores that are away, settings that change, handlers that block, and the events of it all."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from holdfast import Holdfast, Job, JobFilter, JobState, Retry
from holdfast.core.events import (
    Event,
    HandlerStart,
    JobFailedEvent,
    JobSucceeded,
    LeaseAcquired,
    LoopBlocked,
    MetricsServed,
    SettingsChanged,
    SettingsRefused,
    StoreTrouble,
)
from holdfast.testing.harness import Harness, TestWorker
from holdfast.worker.metrics_server import MetricsServer
from holdfast.worker.ticker import Ticker
from holdfast.worker.worker import Worker
from tests.worker.support import Recorder, gaps, harness


async def test_the_events_of_a_job_s_life(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("flaky", retry=Retry.fixed(60))
    async def flaky() -> None:
        if len(events.of(HandlerStart)) == 1:
            raise ValueError("first")
        await harnessed.clock.sleep(2)

    async with harness(app, lease="30s") as harnessed:
        began = harnessed.now
        job = await flaky.enqueue()
        await harnessed.run_until_idle()
        (worker,) = harnessed.workers
    assert events.names(job.id) == [
        "job_created",
        "lease_acquired",
        "handler_start",
        "job_failed",
        "lease_acquired",
        "handler_start",
        "job_succeeded",
    ]
    (failed,), (succeeded,) = events.of(JobFailedEvent), events.of(JobSucceeded)
    assert (failed.task, failed.attempt, failed.reason, failed.error) == ("flaky", 1, "error", "ValueError: first")
    assert (failed.retry_at - began).total_seconds() == 60
    assert (succeeded.attempt, succeeded.seconds) == (2, 2.0)
    first = events.of(LeaseAcquired)[0]
    assert (first.worker_id, first.attempt, (first.locked_until - began).total_seconds()) == (worker.id, 1, 30)


@pytest.mark.parametrize("verbs", [(), ("claim",), ("settle",), ("find_expired_leases", "promote_due"), ("heartbeat",)])
async def test_a_store_that_is_away_for_a_while_costs_nothing(app: Holdfast, verbs: tuple[str, ...]) -> None:
    events = Recorder(app)
    runs: list[int] = []

    @app.task("work")
    async def work(number: int) -> int:
        runs.append(number)
        return number

    async with harness(app, lease="60s") as harnessed:
        hand = await harnessed.start()
        await harnessed.advance(1)
        hand.cut_off(*verbs)
        jobs = [await work.options(delay=number).enqueue(number) for number in range(10)]
        await harnessed.advance(20)
        hand.thaw()
        await harnessed.advance(30)
        assert [await job.result(timeout=0) for job in jobs] == list(range(10))
        assert not hand.running.done()
        assert {(await job.job()).attempts for job in jobs} == {1}
    assert sorted(runs) == list(range(10))
    trouble = events.of(StoreTrouble)
    assert trouble
    assert all("cut this worker off" in each.error for each in trouble)
    assert all(0 < each.retry_in <= 5.1 for each in trouble)
    assert len(trouble) < 60  # it waits between its tries


async def test_start_that_the_store_does_not_answer_in_time_is_reported_with_a_cause(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Recorder(app)

    async def run_out(ticker: Ticker) -> None:
        patch.undo()  # the ticker's own turns are answered
        raise TimeoutError  # as asyncio.timeout raises it: without a text

    worker = Worker(app)
    app.events.subscribe(lambda _: worker.stop(), StoreTrouble)
    with monkeypatch.context() as patch:
        patch.setattr(Ticker, "write_declared", run_out)
        await worker.run()
    (trouble,) = events.of(StoreTrouble)
    assert trouble.error == "writing the limits and schedules of the code: no answer"
    await app.close()


async def test_changed_settings_are_followed_within_five_seconds(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('concurrency = 1\nlease = "30s"\n')
    app = Holdfast(f"sqlite:///{tmp_path}/unused.db", path=file)
    events = Recorder(app)
    now_running: list[int] = []

    @app.task("long")
    async def long(number: int) -> None:
        now_running.append(number)
        await harnessed.clock.sleep(1000)

    async with harness(app, metrics_port=0) as harnessed:
        hand = await harnessed.start()
        for number in range(5):
            await long.enqueue(number)
        await harnessed.advance(10)
        assert len(now_running) == 1
        with MetricsServer(hand.worker.shared):
            file.write_text('concurrency = 4\nlease = "2m"\n')
            await harnessed.advance(5)
            (served,) = events.of(MetricsServed)
            assert "\nholdfast_worker_slots 4.0\n" in (await asyncio.to_thread(httpx.get, served.address)).text
        assert len(now_running) == 4
        assert hand.worker.shared.settings.lease.total_seconds() == 120
        file.write_text('concurrency = "many"\n')
        await harnessed.advance(20)
        assert hand.worker.shared.settings.concurrency == 4
    (changed,) = events.of(SettingsChanged)
    assert changed.changed.keys() >= {"concurrency", "lease"}
    (refused,) = events.of(SettingsRefused)
    assert "concurrency" in refused.problem
    assert events.of(StoreTrouble) == []


async def test_settings_that_contradict_the_code_are_refused_and_schedules_go_on(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text("")
    app = Holdfast(f"sqlite:///{tmp_path}/unused.db", path=file)
    app.limit("crm", queue="crm", concurrency=2)
    events = Recorder(app)
    ran: list[str] = []

    @app.task("work")
    async def work(tenant: str = "") -> None:
        ran.append(tenant)

    app.schedule("often", work.new_job(), every=10)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(21)
        assert len(ran) == 2
        for text, problem in (
            ('[limits.crm]\nqueue = "crm"\nconcurrency = 1\n', "limit 'crm' is declared in the code and as limits.crm"),
            ('[limits.own]\ntask = "work"\nby = "args.tenat"\n', "limit own: by: 'args.tenat' is not valid"),
        ):
            file.write_text(text)
            await harnessed.advance(30)
            assert problem in events.of(SettingsRefused)[-1].problem
        assert len(ran) == 8
        assert [limit.name for limit in await app.limits.find_all()] == ["crm"]
        file.write_text('[limits.own]\ntask = "work"\nby = "args.tenant"\n')
        await harnessed.advance(10)
        assert [limit.name for limit in await app.limits.find_all()] == ["crm", "own"]
    assert len(events.of(SettingsRefused)) == 2
    assert events.of(StoreTrouble) == []


async def test_a_changed_retry_policy_counts_from_the_next_failure(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('retry = "fixed:100"\n')
    app = Holdfast(f"sqlite:///{tmp_path}/unused.db", path=file)
    runs: list[datetime] = []

    @app.task("flaky", max_attempts=3)
    async def flaky() -> None:
        runs.append(harnessed.now)
        raise ValueError

    async with harness(app) as harnessed:
        await flaky.enqueue()
        await harnessed.advance(10)
        file.write_text('retry = "fixed:7"\n')
        await harnessed.run_until_idle()
    assert gaps(runs) == [100, 7]


async def test_unsupervised_worker_continues_and_warns_once(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.touch()
    app = Holdfast(f"sqlite:///{tmp_path}/unused.db", path=file)
    events = Recorder(app)

    @app.task("work")
    async def work() -> None: ...

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        file.write_text("recycle_jobs = 3\n")
        for _ in range(9):
            await work.enqueue()
            await harnessed.advance(5)
        assert not hand.running.done()
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 9
    (event,) = events.of(SettingsRefused)
    assert "holdfast worker start" in event.problem


async def test_handler_that_blocks_the_loop_keeps_its_lease(tmp_path: Path) -> None:
    """In real time: three short leases long."""
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", lease="2s", heartbeat="200ms", sweep="100ms", poll="100ms")
    events = Recorder(app)

    @app.task("spins")
    async def spins() -> str:
        job = Job("job-1", "email.send", "default", "{}", 4, 3, 5, 0, 0, 0, 0)  # a stranger that it has at hand
        end = time.monotonic() + 6.6
        while time.monotonic() < end:
            sum(range(1000))
        return job.id

    async with app:
        job = await spins.enqueue()
        worker = Worker(app, drain=True)
        await asyncio.wait_for(worker.run(), timeout=60)
        done = await job.job()
    assert (done.state, done.attempts, done.claims) == ("succeeded", 1, 1)
    blocked = events.of(LoopBlocked)
    assert blocked
    assert (blocked[0].job_id, blocked[0].task) == (job.id, "spins")
    assert "in spins" in blocked[0].stack
    assert blocked[0].seconds >= 2


async def test_manual_time_never_looks_like_a_blocked_loop(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("work")
    async def work() -> None:
        await harnessed.clock.sleep(300)

    async with harness(app) as harnessed:
        await work.enqueue()
        await harnessed.run_until_idle()
    assert events.of(LoopBlocked, StoreTrouble) == []


async def test_a_service_that_dies_takes_the_worker_down_loudly(app: Holdfast) -> None:
    async with Harness(app) as harnessed:
        hand: TestWorker = await harnessed.start()
        hand.worker.fetcher._store = object()  # type: ignore[assignment]  # a bug, made up
        await app.enqueue("anything")
        with pytest.raises(AttributeError):
            await harnessed.advance(60)
    assert hand.running.done()


async def test_runner_crash_stops_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Holdfast()

    @app.task("work")
    async def work() -> None: ...

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    async with Harness(app) as harness:
        monkeypatch.setattr("holdfast.worker.runner.timeout_of", broken)
        hand = await harness.start()
        await work.enqueue()
        with pytest.raises(ZeroDivisionError):
            await hand.running


async def test_raising_subscriber_is_reported_and_isolated(caplog: pytest.LogCaptureFixture) -> None:
    app = Holdfast()

    @app.task("work")
    async def work() -> None: ...

    def broken(_: Event) -> None:
        raise ZeroDivisionError("a bug of the observer")

    async with Harness(app) as harness:
        app.events.subscribe(broken, JobSucceeded, HandlerStart)
        job = await work.enqueue()
        await harness.run_until_idle()
        assert await job.state() is JobState.SUCCEEDED
    assert "a subscriber to job_succeeded raised" in caplog.text
