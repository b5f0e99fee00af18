"""What handlers log with their jobs, on its way into the store."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Sequence
from typing import Any

from holdfast import Context, Holdfast, Retry, current_job
from holdfast.core.errors import Invalid
from holdfast.core.events import LinesLost
from holdfast.core.job_logs import LogBatch, LogLine
from holdfast.core.models import Lease
from holdfast.testing import Harness
from holdfast.worker.context import WorkerState
from holdfast.worker.log_writer import LogWriter
from tests.unit import executor_tasks
from tests.worker.support import Recorder as Events
from tests.worker.support import harness


async def logged(app: Holdfast, job_id: str) -> list[tuple[int, str, str, str | None]]:
    """Attempt, level, text and fields of each line."""
    return [(line.attempt, line.level, line.text, line.fields) for line in await lines_of(app, job_id)]


async def lines_of(app: Holdfast, job_id: str) -> list[LogLine]:
    page = await app.logs(job_id)
    assert page.cursor is None
    return page.lines


async def texts(app: Holdfast, job_id: str) -> list[str]:
    return [line.text for line in await lines_of(app, job_id)]


async def ran(harnessed: Harness, name: str, **payload: Any) -> str:
    """The id of a job that has run."""
    job = await harnessed.app.enqueue(name, payload)
    await harnessed.run_until_idle()
    return job.id


async def test_every_kind_of_handler_logs_with_its_job(app: Holdfast) -> None:
    @app.task("coroutine")
    async def coroutine(ctx: Context) -> None:
        ctx.log("begun")
        await asyncio.sleep(0)
        current_job().log.error("ended", rows=3, why=None)

    @app.task("thread")
    def in_thread(ctx: Context) -> None:
        ctx.log.debug("begun")
        inner = threading.Thread(target=contextvars.copy_context().run, args=(lambda: current_job().log("inside"),))
        inner.start()
        inner.join()

    @app.task("silent")
    async def silent() -> None: ...

    async with harness(app) as harnessed:
        assert await logged(app, await ran(harnessed, "coroutine")) == [
            (1, "info", "begun", None),
            (1, "error", "ended", '{"rows":3,"why":null}'),
        ]
        assert await logged(app, await ran(harnessed, "thread")) == [
            (1, "debug", "begun", None),
            (1, "info", "inside", None),
        ]
        assert await logged(app, await ran(harnessed, "silent")) == []


async def test_a_child_process_logs_with_its_job(app: Holdfast) -> None:
    app.registry.register(executor_tasks.write_logs)

    @app.middleware
    async def around(context: Context, call_next: Any) -> Any:
        context.log("before")
        value = await call_next(context)
        context.log("after")
        return value

    async with harness(app, concurrency=1, patience=20) as harnessed:
        lines = await logged(app, await ran(harnessed, "write_logs", lines=2))
    assert lines == [
        (1, "info", "before", None),
        (1, "warning", "line", '{"number":0,"pid_differs":true}'),
        (1, "warning", "line", '{"number":1,"pid_differs":true}'),
        (1, "info", "\\ud800\\x00", None),
        (1, "info", "after", None),
    ]


async def test_attempt_with_too_many_logs_keeps_the_first_lines(app: Holdfast) -> None:
    app.registry.register(executor_tasks.write_logs)

    @app.task("chatty", max_attempts=2, retry=Retry.fixed(1))
    async def chatty(ctx: Context) -> None:
        for number in range(7):
            ctx.log(number)
        if ctx.attempts == 1:
            raise ValueError("again")

    many = "6 more lines were dropped: an attempt may keep 2 (job_lines)"
    async with harness(app, concurrency=1, patience=20, job_lines=2) as harnessed:
        lines = await logged(app, await ran(harnessed, "chatty"))
        (_, _, last) = await texts(app, await ran(harnessed, "write_logs", lines=7))
    dropped = "5 more lines were dropped: an attempt may keep 2 (job_lines)"
    each = [("info", "0", None), ("info", "1", None), ("warning", dropped, None)]
    assert lines == [(attempt, *line) for attempt in (1, 2) for line in each]
    assert last == many


async def test_where_no_lines_are_kept_logging_is_harmless(app: Holdfast) -> None:
    @app.task("chatty")
    async def chatty(ctx: Context) -> None:
        ctx.log("x")

    async with harness(app, job_lines=0) as harnessed:
        (line,) = await texts(app, await ran(harnessed, "chatty"))
    assert line == "1 more lines were dropped: an attempt may keep 0 (job_lines)"


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


async def test_any_logged_value_is_stored_as_readable_text(app: Holdfast) -> None:
    circle: list[object] = []
    circle.append(circle)

    @app.task("odd")
    async def odd(ctx: Context) -> None:
        ctx.log("NUL \0, half a character \ud800, a line\nbreak")
        ctx.log(Odd(), odd=Odd())
        ctx.log("x" * 5_000_000)
        ctx.log("fields", large="y" * 5000)
        ctx.log("circle", circle=circle)
        ctx.log("half", **{"na\0me": "\ud800"})
        ctx.log("text", text="fields may be called so", self=1)

    async with harness(app, job_line_size="1KiB") as harnessed:
        lines = await logged(app, await ran(harnessed, "odd"))
    cannot = "(Odd: it cannot be shown: RuntimeError)"
    assert [line[2:] for line in lines] == [
        ("NUL \\x00, half a character \\ud800, a line\nbreak", None),
        (cannot, f'{{"odd":"{cannot}"}}'),
        ("x" * 1024 + "… (5000000 characters)", None),
        ("fields (fields of 5012 bytes were left out)", None),
        ("circle", '{"circle": "[[...]]"}'),
        ("half", '{"na\\\\x00me": "\'\\\\ud800\'"}'),
        ("text", '{"text":"fields may be called so","self":1}'),
    ]


async def test_lines_are_written_while_the_handler_still_runs(app: Holdfast) -> None:
    go_on = asyncio.Event()

    @app.task("long")
    async def long(ctx: Context) -> None:
        ctx.log("begun")
        await go_on.wait()

    async with harness(app) as harnessed:
        job = await long.enqueue()
        await harnessed.advance(1)
        async with asyncio.timeout(60):
            while not await texts(app, job.id):
                await harnessed.advance(1)
        go_on.set()
        await harnessed.run_until_idle()


async def test_lines_wait_for_a_store_that_is_away(app: Holdfast) -> None:
    @app.task("one", retry=Retry.fixed(3600))
    async def one(ctx: Context, fails: bool) -> None:
        ctx.log("kept")
        if fails:
            raise ValueError("again")

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        hand.cut_off("append_logs", "settle")
        jobs = [await one.enqueue(fails) for fails in (True, False)]
        await harnessed.advance(2)
        assert [await texts(app, job.id) for job in jobs] == [[], []]
        hand.thaw()
        await harnessed.advance(10)
        assert [(await job.job()).state for job in jobs] == ["failed", "succeeded"]
        assert [await texts(app, job.id) for job in jobs] == [["kept"], ["kept"]]


async def test_store_that_refuses_logs_still_accepts_settlements(app: Holdfast) -> None:
    @app.task("one")
    async def one(ctx: Context) -> None:
        ctx.log("kept")

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        hand.cut_off("append_logs")
        job = await one.enqueue()
        await harnessed.advance(2)
        assert ((await job.job()).state, await texts(app, job.id)) == ("succeeded", [])
        hand.thaw()
        await harnessed.advance(10)
        assert await texts(app, job.id) == ["kept"]


async def test_lines_that_come_after_the_end_of_their_attempt_are_reported(app: Holdfast) -> None:
    seen = Events(app)

    @app.task("one", max_attempts=1)
    async def one(ctx: Context) -> None:
        ctx.log("late")
        ctx.log("later")
        raise ValueError("no")

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        hand.cut_off("append_logs")
        job = await one.enqueue()
        await harnessed.advance(2)
        assert ((await job.job()).state, seen.of(LinesLost)) == ("dead", [])
        hand.thaw()
        await harnessed.advance(10)
        assert await texts(app, job.id) == []
    assert [event.count for event in seen.of(LinesLost)] == [2]


class Refusing:
    """A store that never takes a line."""

    asked = 0

    @property
    def queueing(self) -> Refusing:
        return self

    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        self.asked += 1
        raise Invalid("text", "x", "no")


class Overtaken:
    """A store that takes lines more slowly than a handler logs them."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.writer: LogWriter

    @property
    def queueing(self) -> Overtaken:
        return self

    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        self.stored.append(sum(len(each.lines) for each in records))
        if len(self.stored) < 50:
            for number in range(600):
                self.writer.open_log(Lease(f"{len(self.stored)} {number}", 1))("more")
        return [True for _ in records]


async def test_lines_that_come_meanwhile_keep_no_settlement_waiting() -> None:
    app, store = Holdfast(), Overtaken()
    store.writer = LogWriter(WorkerState(app, app.settings, "w"), store)  # type: ignore[arg-type]
    for number in range(700):
        store.writer.open_log(Lease(f"{number}", 1))("first")

    assert await store.writer.flush() is None
    assert store.stored == [500, 500]

    writing = asyncio.create_task(store.writer.run())  # hears of the rest without another line
    while sum(store.stored) < 700 + 49 * 600:  # noqa: ASYNC110 - no event tells of this
        await asyncio.sleep(0.01)
    writing.cancel()


async def test_logs_refused_by_the_store_are_dropped_and_reported() -> None:
    app, store = Holdfast(), Refusing()
    seen = Events(app)
    recorder = LogWriter(WorkerState(app, app.settings, "w"), store)  # type: ignore[arg-type]

    assert await recorder.flush() is None
    assert store.asked == 0
    recorder.open_log(Lease("a", 1))("refused")
    assert await recorder.flush() is None

    assert (store.asked, [event.count for event in seen.of(LinesLost)]) == (1, [1])
