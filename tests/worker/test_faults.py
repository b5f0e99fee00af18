"""Faults that are injected into workers, in virtual time, on every store."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from holdfast import Conflict, Context, Holdfast, JobState, Retry, Unavailable
from holdfast.core.events import FaultInjected, FaultsChanged, StoreTrouble
from holdfast.core.faults import FaultPlan
from holdfast.core.models import JobFilter
from tests.worker.support import Recorder, harness


async def errors_of(app: Holdfast, job_id: str) -> list[str | None]:
    return [attempt.error for attempt in await app.attempts(job_id)]


@pytest.mark.rows("S52")
async def test_faults_are_refused_unless_the_settings_allow_them(app: Holdfast) -> None:
    async with harness(app):
        with pytest.raises(Conflict, match="set allow_faults = true in a system that may break"):
            await app.faults.start([{"kind": "error"}], span=60)
        assert await app.faults.read() is None
        assert await app.count() == 0


@pytest.mark.rows("S52")
async def test_worker_whose_settings_do_not_allow_faults_gets_none(app: Holdfast) -> None:
    @app.task("send")
    async def send() -> str:
        return "sent"

    recorder = Recorder(app)
    async with harness(app) as harnessed:
        app.settings = app.settings.replace_values(allow_faults=True)
        await app.faults.start([{"kind": "permanent_error"}], span=60)
        app.settings = app.settings.replace_values(allow_faults=False)
        handle = await send.enqueue()
        await harnessed.advance(10)
        assert await handle.result(timeout=0) == "sent"
        assert harnessed.workers[0].invoker._middlewares is app.middlewares
        assert "holdfast-fault-injector" not in {task.get_name() for task in asyncio.all_tasks()}
    assert recorder.of(FaultInjected, FaultsChanged) == []


async def test_worker_without_faults_calls_no_code_of_theirs(app: Holdfast) -> None:
    """No call, no statement and no allocation of theirs: nothing in their modules runs, in any thread."""
    called: set[str] = set()

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        await context.step("charge", str, context.attempts)
        if context.attempts == 1:
            raise ValueError("again")

    @app.task("order.thread")
    def order_thread(context: Context) -> None:
        context.sync.step("charge", str)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    async with harness(app) as harnessed:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            handles = [await order.enqueue(), await order_thread.enqueue()]
            await harnessed.advance(10)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert [await handle.state() for handle in handles] == [JobState.SUCCEEDED] * 2
    assert any(name.endswith("holdfast/worker/step_writer.py") for name in called)
    assert [name for name in called if name.endswith(("fault_injector.py", "core/faults.py", "app/faults.py"))] == []


@pytest.mark.rows("S53")
async def test_latency_delays_the_handler(app: Holdfast) -> None:
    began: list[float] = []

    @app.task("send")
    async def send() -> None:
        began.append(harnessed.clock.monotonic())

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "latency", "seconds": 0.5}], span="1h")
        submitted = harnessed.clock.monotonic()
        handles = [await send.enqueue() for _ in range(3)]
        await harnessed.advance(10)
        for handle in handles:
            job = await handle.job()
            assert job.started_at_us is not None
            assert job.ended_at_us is not None
            assert job.ended_at_us - job.started_at_us >= 500_000
    assert all(at - submitted >= 0.5 for at in began)


async def test_latency_ends_with_the_faults(app: Holdfast) -> None:
    @app.task("send")
    async def send() -> None: ...

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "latency", "seconds": 3600}], span="2h")
        handle = await send.enqueue()
        await harnessed.advance(10)
        assert await handle.state() is JobState.RUNNING
        await app.faults.stop()
        await harnessed.advance(5)
        assert await handle.state() is JobState.SUCCEEDED


async def test_faults_end_at_their_time_though_the_plan_cannot_be_read(app: Holdfast) -> None:
    recorder = Recorder(app)

    async def cannot_read() -> FaultPlan | None:
        raise Unavailable("the store is away")

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "error"}], span="30s")
        await harnessed.advance(5)
        app.faults.read = cannot_read  # type: ignore[method-assign]
        await harnessed.advance(20)
        assert [event.active for event in recorder.of(FaultsChanged)] == [1]
        await harnessed.advance(10)
        assert [event.active for event in recorder.of(FaultsChanged)] == [1, 0]


@pytest.mark.rows("S52", "S54")
async def test_errors_of_the_first_attempts_are_retried_whatever_the_task_says_of_errors(app: Holdfast) -> None:
    runs: list[int] = []

    @app.task("send", retry=Retry.fixed(10), retry_on=(OSError,))
    async def send(context: Context) -> str:
        runs.append(context.attempts)
        return "sent"

    @app.task("other")
    async def other() -> None: ...

    recorder = Recorder(app)
    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "error", "task": "send", "attempts": 2}], span="1h", seed=7)
        handle, untouched = await send.enqueue(), await other.enqueue()
        await harnessed.advance(60)
        assert await handle.result(timeout=0) == "sent"
        assert runs == [3]
        assert await errors_of(app, handle.id) == ["InjectedError: a fault was injected: error before task send"] * 2
        assert await errors_of(app, untouched.id) == []
    assert [(event.kind, event.task) for event in recorder.of(FaultInjected)] == [("error", "send")] * 2
    assert [event.active for event in recorder.of(FaultsChanged)] == [1]


@pytest.mark.rows("S55")
async def test_permanent_error_is_not_retried(app: Holdfast) -> None:
    @app.task("send", max_attempts=5)
    async def send() -> None: ...

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "permanent_error", "queue": "default"}], span="1h")
        handle = await send.enqueue()
        await harnessed.advance(60)
        job = await handle.job()
        assert (job.state, job.reason, job.attempts) == (JobState.DEAD, "non_retryable", 1)


@pytest.mark.rows("S57", "S58")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_named_step_fails_and_the_job_goes_on_there(app: Holdfast, when: str) -> None:
    done: list[str] = []

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        for name in ("reserve", "charge", "ship"):
            await context.step(name, done.append, name)

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "error", "step": "charge", "attempts": 1, "when": when}], span="1h")
        handle = await order.enqueue()
        await harnessed.advance(60)
        assert await handle.state() is JobState.SUCCEEDED
        assert done == ["reserve", *["charge"] * (1 if when == "before" else 2), "ship"]
        expected = f"InjectedError: a fault was injected: error {when} step charge of task order"
        assert await errors_of(app, handle.id) == [expected]


async def test_step_keeps_its_arguments_whatever_they_are_called(app: Holdfast) -> None:
    seen: list[dict[str, str]] = []

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        await context.step("charge", lambda **given: seen.append(given), job="a", faults="b", function="c", self="d")

    @app.task("order.thread", retry=Retry.fixed(1))
    def order_thread(context: Context) -> None:
        context.sync.step("charge", lambda **given: seen.append(given), job="a", faults="b", function="c", self="d")

    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "error", "step": "charge", "attempts": 1}], span="1h")
        handles = [await order.enqueue(), await order_thread.enqueue()]
        await harnessed.advance(60)
        for handle in handles:
            assert await handle.state() is JobState.SUCCEEDED
            assert [str(error).partition(":")[0] for error in await errors_of(app, handle.id)] == ["InjectedError"]
    assert seen == [{"job": "a", "faults": "b", "function": "c", "self": "d"}] * 2


async def test_each_step_of_a_thread_may_fail(app: Holdfast) -> None:
    done: list[str] = []

    @app.task("order", retry=Retry.fixed(1))
    def order(context: Context) -> None:
        for name in ("reserve", "charge"):
            context.sync.step(name, done.append, name)

    async with harness(app, allow_faults=True) as harnessed:
        faults = [{"kind": "latency", "seconds": 0.01, "step": "*"}, {"kind": "error", "step": "*", "attempts": 1}]
        await app.faults.start(faults, span="1h")
        handle = await order.enqueue()
        await harnessed.advance(60)
        assert await handle.state() is JobState.SUCCEEDED
        assert done == ["reserve", "charge"]
        assert len(await errors_of(app, handle.id)) == 1


@pytest.mark.parametrize("kind", ["store_error", "lost_ack", "store_latency"])
async def test_faults_of_the_store_lose_no_job_and_repeat_none(app: Holdfast, kind: str) -> None:
    runs: list[int] = []

    @app.task("send")
    async def send(number: int) -> None:
        runs.append(number)

    recorder = Recorder(app)
    seconds = {"seconds": 0.1} if kind == "store_latency" else {}
    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": kind, "probability": 0.4, **seconds}], span="1h", seed=1)
        for number in range(30):
            await send.enqueue(number)
            await harnessed.advance(1)
        await harnessed.advance(60)
        counts = {state: await app.count(JobFilter(states=(state,), tasks=("send",))) for state in JobState}
        assert counts[JobState.SUCCEEDED] == 30
    assert sorted(runs) == list(range(30))
    assert {event.kind for event in recorder.of(FaultInjected)} == {kind}
    assert bool(recorder.of(StoreTrouble)) == (kind != "store_latency")


async def test_store_that_stays_away_ends_leases_and_the_jobs_run_again(app: Holdfast) -> None:
    runs: list[int] = []

    @app.task("long", max_attempts=5)
    async def long(context: Context) -> None:
        runs.append(context.claims)
        await harnessed.clock.sleep(90 if len(runs) == 1 else 1)

    async with harness(app, allow_faults=True) as harnessed:
        handle = await long.enqueue()
        await harnessed.advance(1)
        await app.faults.start([{"kind": "store_error"}], span=60)
        await harnessed.advance(200)
        job = await handle.job()
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 2)
        assert [attempt.reason for attempt in await app.attempts(handle.id)] == ["crashed"]
    assert runs == [1, 2]


async def test_faults_replace_each_other_and_end(app: Holdfast) -> None:
    recorder = Recorder(app)
    async with harness(app, allow_faults=True) as harnessed:
        await app.faults.start([{"kind": "error"}, {"kind": "crash", "task": "none"}], span=60, seed=3)
        await harnessed.advance(2)
        plan = await app.faults.start([{"kind": "permanent_error"}], span=20, seed=4)
        assert await app.faults.read() == plan
        assert isinstance(plan, FaultPlan)
        assert (plan.seed, plan.kinds) == (4, ["permanent_error"])
        await harnessed.advance(10)
        assert harnessed.workers[0].shared.active_faults == 1
        await harnessed.advance(15)
        assert await app.faults.read() is None
        assert not await app.faults.stop()
        await app.faults.start([{"kind": "error"}], span=60)
        await harnessed.advance(2)
        assert await app.faults.stop()
        await harnessed.advance(2)
        assert await app.faults.read() is None
    assert [event.active for event in recorder.of(FaultsChanged)] == [2, 1, 0, 1, 0]


@pytest.mark.rows("S58", "S70")
async def test_storm_of_failures_beside_successes_balances(app: Holdfast) -> None:
    runs: dict[str, int] = {"failing": 0, "working": 0}

    @app.task("work", max_attempts=5, retry=Retry.from_delays([1, 5, 25, 125]))
    async def work(context: Context) -> None:
        runs[context.job.queue] += 1

    async with harness(app, allow_faults=True, concurrency=50) as harnessed:
        await app.faults.start([{"kind": "error", "queue": "failing"}], span="1h")
        drafts = [work.options(queue=queue).new_job() for queue in ("failing", "working") for _ in range(500)]
        await app.enqueue_many(drafts)
        await harnessed.advance(170)
        ended = {
            queue: {str(s): await app.count(JobFilter(states=(s,), queue=queue)) for s in ("succeeded", "dead")}
            for queue in runs
        }
        assert ended == {"failing": {"succeeded": 0, "dead": 500}, "working": {"succeeded": 500, "dead": 0}}
        dead: list[Any] = (await app.find(JobFilter(states=(JobState.DEAD,)), limit=500)).jobs
        assert {job.attempts for job in dead} == {5}
    assert runs == {"failing": 0, "working": 500}
