"""What surrounds a handler: middleware, lifespans, dependencies, context, threads, processes."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from holdfast import Context, Dead, Holdfast, HoldfastError, current_job, provided
from holdfast.core.models import JobFilter, JobState
from tests.unit import executor_tasks
from tests.worker.support import harness


class Client:
    """A dependency that says whether it is still open."""

    open = True


Next = Callable[[Context], Awaitable[Any]]


async def test_middlewares_wrap_each_other_in_the_order_they_were_registered(app: Holdfast) -> None:
    seen: list[str] = []

    @app.middleware
    async def outer(job: Context, call_next: Next) -> Any:
        seen.append(f"outer {job.job.task}")
        value = await call_next(job)
        seen.append("outer again")
        return value + "!"

    @app.middleware
    async def inner(job: Context, call_next: Next) -> Any:
        seen.append("inner")
        return await call_next(job)

    @app.task("hello")
    async def hello() -> str:
        seen.append("handler")
        return "hello"

    @app.task("blocking")
    def blocking() -> str:
        return "blocked"

    async with harness(app) as harnessed:
        job, other = await hello.enqueue(), await blocking.options(delay=1).enqueue()
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == "hello!"
        assert await other.result(timeout=0) == "blocked!"
    assert seen[:4] == ["outer hello", "inner", "handler", "outer again"]


async def test_a_middleware_may_end_the_attempt(app: Holdfast) -> None:
    @app.middleware
    async def guard(job: Context, call_next: Next) -> Any:
        try:
            return await call_next(job)
        except KeyError as error:
            raise Dead(f"translated {error}") from error

    @app.middleware
    async def refuse(job: Context, call_next: Next) -> Any:
        if "refused" in job.tags:
            raise ValueError("not today")
        return await call_next(job)

    @app.task("work", max_attempts=1)
    async def work() -> None:
        raise KeyError("k")

    async with harness(app) as harnessed:
        translated, refused = await work.enqueue(), await work.options(tags=["refused"]).enqueue()
        await harnessed.run_until_idle()
        assert (await translated.job()).reason == "non_retryable"
        assert (await refused.job()).error == "ValueError: not today"


async def test_a_middleware_that_fails_around_a_command_costs_no_runner(app: Holdfast) -> None:
    @app.middleware
    async def broken(job: Context, call_next: Next) -> Any:
        raise ValueError("broken middleware")

    async with harness(app, commands="argv", concurrency=1, max_attempts=1) as harnessed:
        jobs = [await app.run_command("true") for _ in range(3)]
        await harnessed.run_until_idle()
        errors = [(await job.job()).error for job in jobs]
    assert errors == ["ValueError: broken middleware"] * 3


async def test_lifespans_surround_the_work(app: Holdfast) -> None:
    seen: list[str] = []

    @app.lifespan
    @asynccontextmanager
    async def resources(_: Holdfast) -> AsyncIterator[None]:
        seen.append("open")
        yield
        seen.append("closed")

    @app.task("work")
    async def work() -> None:
        seen.append("work")

    async with harness(app) as harnessed:
        await work.enqueue()
        hand = await harnessed.start()
        await harnessed.run_until_idle()
        hand.worker.stop()
        await harnessed.advance(0)
    assert seen == ["open", "work", "closed"]


async def test_dependencies_are_made_once_a_worker_and_closed(app: Holdfast) -> None:
    made: list[Client] = []

    @app.provide
    async def client() -> AsyncIterator[Client]:
        made.append(Client())
        yield made[-1]
        made[-1].open = False

    seen: list[tuple[Client, bool, int]] = []

    @app.task("use")
    async def use(number: int, http: Client = provided()) -> None:
        seen.append((http, http.open, number))

    async with harness(app) as harnessed:
        for number in range(3):
            await use.enqueue(number)
        await harnessed.run_until_idle()
    assert len(made) == 1
    assert sorted(seen, key=lambda each: each[2]) == [(made[0], True, number) for number in range(3)]
    assert not made[0].open


async def test_context_variables_do_not_leak_from_job_to_job(app: Holdfast) -> None:
    variable = contextvars.ContextVar("variable", default="clean")
    seen: list[str] = []

    @app.task("dirty")
    async def dirty() -> None:
        seen.append(variable.get())
        variable.set("dirty")
        await asyncio.sleep(0)
        assert variable.get() == "dirty"

    @app.task("dirty.thread")
    def dirty_thread() -> None:
        seen.append(variable.get())
        variable.set("dirty")

    async with harness(app, concurrency=1) as harnessed:
        for _ in range(3):
            await dirty.enqueue()
            await dirty_thread.enqueue()
        await harnessed.run_until_idle()
    assert seen == ["clean"] * 6


async def test_the_current_job(app: Holdfast) -> None:
    @app.task("who")
    async def who() -> list[Any]:
        await asyncio.sleep(0)
        return await deeper()

    async def deeper() -> list[Any]:
        job = current_job()
        return [job.id, job.attempts, dict(job.metadata), await asyncio.create_task(inside())]

    async def inside() -> str:
        return current_job().id

    @app.task("who.thread")
    def who_thread() -> str:
        return current_job().id

    async with harness(app) as harnessed:
        job, threaded = await who.options(metadata={"a": 1}).enqueue(), await who_thread.enqueue()
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == [job.id, 1, {"a": 1}, job.id]
        assert await threaded.result(timeout=0) == threaded.id
        with pytest.raises(HoldfastError):
            current_job()


async def test_sync_handlers_run_in_threads_side_by_side(app: Holdfast) -> None:
    together = threading.Barrier(3, timeout=60)

    @app.task("blocking")
    def blocking(ctx: Context, number: int) -> list[Any]:
        together.wait()
        return [number, threading.current_thread() is threading.main_thread(), ctx.attempts]

    async with harness(app, concurrency=3, patience=5) as harnessed:
        jobs = [await blocking.enqueue(number) for number in range(6)]
        await harnessed.run_until_idle()
        assert [await job.result(timeout=0) for job in jobs] == [[number, False, 1] for number in range(6)]


async def test_waiting_handlers_run_together_and_busy_ones_yield(app: Holdfast) -> None:
    together = asyncio.Barrier(400)
    turns = [0]  # jobs run within each turn of the loop

    @app.task("waiting")
    async def waiting() -> None:
        await together.wait()

    @app.task("quick")
    async def quick() -> None:
        if turns[-1] == 0:
            asyncio.get_running_loop().call_soon(turns.append, 0)
        turns[-1] += 1

    async with harness(app, concurrency=400) as harnessed:
        await app.enqueue_many(waiting.new_job() for _ in range(400))
        await harnessed.run_until_idle()
        await app.enqueue_many(quick.new_job() for _ in range(400))
        await harnessed.run_until_idle()
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 800
    assert sum(turns) == 400
    assert max(turns) <= 150  # else the next claim would leave only when the buffer is empty


async def test_handlers_may_enqueue(app: Holdfast) -> None:
    @app.task("child")
    async def child(number: int) -> int:
        return number * 2

    @app.task("parent")
    async def parent() -> str:
        return (await child.enqueue(21)).id

    @app.task("parent.thread")
    def parent_thread() -> str:
        return child.sync.enqueue(4).id

    async with harness(app, patience=5) as harnessed:
        jobs = [await parent.enqueue(), await parent_thread.enqueue()]
        await harnessed.run_until_idle()
        children = [app.handle(await job.result(timeout=0)) for job in jobs]
        assert [await each.result(timeout=0) for each in children] == [42, 8]


@pytest.fixture
def process_app(app: Holdfast) -> Holdfast:
    """An application with tasks that a child process can import."""
    for name in ("add", "fail", "snooze"):
        app.registry.register(getattr(executor_tasks, name))
    return app


async def test_scopes_surround_handlers_in_their_own_thread_or_process(app: Holdfast) -> None:
    app.handler_scope(executor_tasks.note_place)
    app.handler_scope(executor_tasks.NotePlace)

    def note() -> list[str]:
        executor_tasks.places.append(executor_tasks.place())
        return list(executor_tasks.places)

    async def note_async() -> list[str]:
        return note()

    app.task("thread", max_attempts=1)(note)
    app.task("async", max_attempts=1)(note_async)
    for task in (executor_tasks.list_places, executor_tasks.list_places_async):
        app.registry.register(task)
    here = executor_tasks.place()
    async with harness(app, concurrency=1, patience=10) as harnessed:
        for name in ("thread", "async", "list_places", "list_places_async"):
            job = await app.enqueue(name)
            await harnessed.run_until_idle()
            first, second, where = await job.result(timeout=0)
            is_async = "async" in name
            assert (first, second) == (f"entered {where}", f"{'awaited' if is_async else 'entered'} {where}"), name
            assert (where == here) == (name == "async")
            left = [f"{'left' if not is_async else 'left awaited'} {where}", f"left {where}"]
            assert executor_tasks.places[3:] == left or name.startswith("list")


async def test_an_error_of_a_scope_fails_the_attempt(app: Holdfast) -> None:
    ran: list[bool] = []

    @app.handler_scope
    @contextmanager
    def refuse(job: Context) -> Iterator[None]:
        raise ConnectionError(f"no session for {job.job.task}")
        yield

    @app.task("work", max_attempts=1)
    def work() -> None:
        ran.append(True)

    async with harness(app) as harnessed:
        job = await app.enqueue("work")
        await harnessed.run_until_idle()
        assert ((await job.job()).state, (await job.job()).error) == ("dead", "ConnectionError: no session for work")
    assert not ran


async def test_tasks_run_in_processes(process_app: Holdfast) -> None:
    app = process_app
    async with harness(app, concurrency=1, patience=10, max_attempts=1) as harnessed:
        good = await app.enqueue("add", {"a": 2, "b": 3})
        bad = await app.enqueue("fail", {"how": "value"})
        await harnessed.run_until_idle()
        assert await good.result(timeout=0) == 5
        assert ((await bad.job()).state, (await bad.job()).error) == ("dead", "ValueError: no good")
