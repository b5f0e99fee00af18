"""The application itself: where its settings come from, what it tells, whose clock it waits by."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery.schedules import crontab as celery_crontab

from holdfast import Holdfast, JobFilter, ResultTimeout, Settings
from holdfast.core.clock import ManualClock
from holdfast.core.errors import ConfigError, Conflict, Invalid
from holdfast.core.events import Event, JobCreated, JobDuplicate
from holdfast.stores import open_store
from holdfast.worker import Worker


def test_application_arguments_override_given_settings(tmp_path: Path) -> None:
    given = Settings.load(url=f"sqlite:///{tmp_path}/one.db", lease=40)

    app = Holdfast(f"sqlite:///{tmp_path}/two.db", settings=given, concurrency=3)

    assert app.settings.url == f"sqlite:///{tmp_path}/two.db"
    assert (app.settings.concurrency, app.settings.lease) == (3, given.lease)
    assert Holdfast(settings=given).settings is given


def test_a_wrong_value_or_setting_of_celery_is_refused() -> None:
    with pytest.raises(Invalid, match="concurrency"):
        Holdfast(settings=Settings.load(), concurrency=0)
    with pytest.raises(ConfigError, match="'broker' is not a setting; here it is the url of the store"):
        Holdfast(broker="redis://127.0.0.1")


def test_submission_inside_a_transaction_emits_no_event(tmp_path: Path) -> None:
    """It may be rolled back, and then it never was."""
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", strict_idempotency=True)
    heard: list[Event] = []
    app.events.subscribe(heard.append, JobCreated, JobDuplicate)
    first = app.sync.enqueue("work", key="k")
    heard.clear()

    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as connection:
        connection.execute("begin")
        app.sync.enqueue("work", connection=connection)
        assert app.sync.enqueue("work", key="k", connection=connection).id == first.id
        app.sync.enqueue_many([app.draft_job("work", {}), app.draft_job("work", {})], connection=connection)
        with pytest.raises(Conflict, match="'k' already stands"):
            app.sync.enqueue("other", key="k", connection=connection)
        connection.execute("rollback")

    assert heard == []
    assert app.sync.count() == 1
    app.sync.close()


def test_task_or_function_instead_of_a_name_is_refused(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    def send(to: str) -> None: ...

    task = app.task("mail.send")(send)
    for submit in (app.sync.enqueue, app.draft_job):
        with pytest.raises(Invalid, match=r"^task: .* give its name, 'mail\.send', or call send\.enqueue\(…\)"):
            submit(task, {"to": "a"})
        with pytest.raises(Invalid, match=r"^task: <function .* register the function with @app\.task\(\)"):
            submit(send, {"to": "a"})
        with pytest.raises(Invalid, match=r"^task: NewJob.* to submit drafted jobs: app\.enqueue_many"):
            submit(task.new_job("a"), {})
    with pytest.raises(Invalid, match=r"^task: <Task mail\.send .* give the task's name, as text"):
        app.limit("mail", task=task, concurrency=1)
    with pytest.raises(AttributeError, match=r"has no attribute 'options'; give all options in one call"):
        _ = task.options(delay=60).options
    with pytest.raises(Invalid, match=r"^selection: .* give an id, such as handle\.id, a list of ids, or a JobFilter"):
        app.sync.cancel(5)


def test_value_of_a_signal_that_cannot_be_stored_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^value: a value of type object "):
        Holdfast(f"sqlite:///{tmp_path}/jobs.db").sync.signal("approved", object())


def test_scope_or_lifespan_without_its_decorator_is_refused(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    def generator(given: object) -> Iterator[None]:
        yield

    async def async_generator(given: object) -> AsyncIterator[None]:
        yield

    async def coroutine(given: object) -> None: ...

    for function in (generator, async_generator, coroutine):
        with pytest.raises(ConfigError, match=r"^handler_scope .*: decorate it with contextlib\.contextmanager first"):
            app.handler_scope(function)
        with pytest.raises(ConfigError, match=r"^lifespan .*: decorate it with contextlib\.asynccontextmanager first"):
            app.lifespan(function)


def test_an_unknown_option_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^option: 'dealy' .* did you mean delay\?"):
        Holdfast(f"sqlite:///{tmp_path}/jobs.db").draft_job("work", {}, dealy=60)


@pytest.mark.parametrize("limit", [0, -1, True, "5", 1_000_001])
def test_an_operation_on_no_jobs_at_all_is_refused(limit: object, tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    job = app.sync.enqueue("work")
    for operate in (app.sync.cancel, app.sync.replay, app.sync.delete):
        for selection in (job.id, JobFilter()):
            with pytest.raises(Invalid, match=r"^limit: .* give a whole number from 1 to 1000000"):
                operate(selection, limit=limit)
    assert app.sync.get(job.id).state == "queued"
    app.sync.close()


class _Leaping(ManualClock):
    """An hour less a hundredth of a second passes between any two looks at it."""

    def monotonic(self) -> float:
        self.advance(3599.99)
        return super().monotonic()


def test_a_result_is_awaited_by_the_applications_clock(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", clock=_Leaping())
    job = app.sync.enqueue("work")

    with pytest.raises(ResultTimeout, match="after 3600 s"):
        job.sync.result(timeout=3600)
    app.sync.close()


def test_result_timeout_without_a_worker_says_to_start_one(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    remedy = "no living worker is registered; start one: holdfast worker start$"
    for job, state in ((app.sync.enqueue("work"), "queued"), (app.sync.enqueue("work", delay=60), "scheduled")):
        with pytest.raises(ResultTimeout, match=f"is {state} after 0 s; {remedy}"):
            job.sync.result(timeout=0)
    app.sync.close()


def test_result_timeout_with_a_live_worker_says_it_continues(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", queues="default")

    @app.task("wait")
    async def wait() -> str:
        with pytest.raises(ResultTimeout, match=r"is queued after 0 s; it goes on$"):
            await later.result(timeout=0)
        return "seen"

    async def run() -> str:
        async with app:
            await Worker(app, drain=True).run()
            return await first.result(timeout=0)

    first = wait.sync.enqueue()
    later = app.sync.enqueue("wait", queue="elsewhere")
    assert asyncio.run(run()) == "seen"


def test_misspelt_keyword_suggests_the_right_one(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("work")
    def work() -> None: ...

    with pytest.raises(
        TypeError, match=r"options\(\) got an unexpected keyword argument 'dealy'; did you mean delay\?"
    ):
        work.options(dealy=3)  # type: ignore[call-arg]  # the mistake that is meant
    with pytest.raises(TypeError, match=r"did you mean max_attempts\?"):
        app.task("other", max_attempt=3)  # type: ignore[call-arg]  # the mistake that is meant


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, r"await task\.enqueue\(…\), or task\.sync") for name in ("delay", "send", "kiq", "defer")),
        *((name, r"await task\.options\(delay=60, .*enqueue") for name in ("apply_async", "schedule", "perform_in")),
        ("s", r"task\.new_job"),
        ("call_local", r"task\(…\)"),
        ("run", r"task\(…\)"),
        ("starmap", r"app\.enqueue_many"),
        ("AsyncResult", r"app\.handle\(id\)"),
    ],
)
def test_method_of_another_queue_is_answered_with_ours(name: str, hint: str, tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("work")
    def work() -> None: ...

    for thing in (work, work.options(delay=60), work.sync):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*{hint}"):
            getattr(thing, name)
    with pytest.raises(AttributeError) as plain:
        work.nonsense  # type: ignore[attr-defined]  # noqa: B018 - the mistake that is meant
    assert str(plain.value) == "'BoundTask' object has no attribute 'nonsense'"
    assert not hasattr(work, "__wrapped__")


def test_attribute_of_another_queues_application_is_answered_with_ours(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    for name, hint in (
        ("shared_task", r"@app\.task\(\)"),
        ("send_task", r"await app\.enqueue\(name"),
        ("conf", r"settings=Settings.*beat_schedule: app\.schedule"),
        ("control", r"app\.cancel\(id\).*app\.workers\(\)"),
        ("add_periodic_task", r"app\.schedule\("),
        ("tasks", r"app\.registry\.task_names\(\)"),
    ):
        for thing in (app, app.sync):
            with pytest.raises(AttributeError, match=f"'Holdfast' object has no attribute '{name}'; .*{hint}"):
                getattr(thing, name)
    with pytest.raises(AttributeError, match=r"no async method 'schedules' to block on; .*use \.schedules itself"):
        app.sync.schedules  # type: ignore[attr-defined]  # noqa: B018 - the mistake that is meant
    with pytest.raises(AttributeError, match=r"no async method 'enqueue_stream' .*; .* \.sync\.enqueue_many"):
        app.sync.enqueue_stream  # type: ignore[attr-defined]  # noqa: B018 - the mistake that is meant


def test_method_of_a_result_of_another_queue_is_answered_with_ours(tmp_path: Path) -> None:
    handle = Holdfast(f"sqlite:///{tmp_path}/jobs.db").handle("0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77")

    for name, hint in (
        ("get", r"handle\.result\("),
        ("ready", r"handle\.state\(\)"),
        ("info", r"app\.saved_values\(handle\.id\)"),
        ("revoke", r"handle\.cancel\(\)"),
        ("return_value", r"handle\.result\("),
        ("get_result", r"handle\.result\("),
        ("latest_result", r"handle\.result\("),
        ("get_status", r"handle\.state\(\)"),
        ("is_finished", r"handle\.state\(\)"),
        ("meta", r"handle\.job\(\)\)\.options_or_default\.metadata"),
        ("requeue", r"handle\.replay\(\)"),
    ):
        for thing in (handle, handle.sync):
            with pytest.raises(AttributeError, match=f"'JobHandle' object has no attribute '{name}'; .*{hint}"):
                getattr(thing, name)


def test_import_of_a_name_of_celery_is_answered_with_ours() -> None:
    refused = "cannot import name '{}' from 'holdfast'"
    with pytest.raises(ImportError, match=refused.format("shared_task") + r"; to register a task: @app\.task\(\)"):
        from holdfast import shared_task  # type: ignore[attr-defined]  # noqa: F401 - the mistake that is meant
    with pytest.raises(ImportError, match=refused.format("crontab") + "; to declare a schedule: .*cron="):
        from holdfast import crontab  # type: ignore[attr-defined]  # noqa: F401 - the mistake that is meant
    with pytest.raises(ImportError, match=refused.format("nonsense") + " "):
        from holdfast import nonsense  # type: ignore[attr-defined]  # noqa: F401 - the mistake that is meant


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("countdown", "here it is delay="),
        ("eta", "here it is run_at="),
        ("acks_late", "acknowledged when it has ended"),
        ("retry_kwargs", r"here it is max_attempts=… and retry=…"),
        ("serializer", "arguments are stored as JSON"),
        ("ttl", "here it is expires=…"),
        ("result_ttl", "keep_succeeded=…"),
        ("meta", "here it is metadata=…"),
        ("link_error", r"after=Dependency\(job\.id"),
        ("args", r"enqueue\(1, name=2\)"),
    ],
)
def test_option_of_another_queue_is_answered_with_ours(option: str, ours: str, tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("work")
    def work() -> None: ...

    given: dict[str, Any] = {option: 5}
    with pytest.raises(TypeError, match=f"'{option}'; .*{ours}"):
        work.options(**given)
    with pytest.raises(TypeError, match=f"'{option}'; .*{ours}"):
        app.task("other", **given)
    with pytest.raises(Invalid, match=f"option: '{option}' .*{ours}"):
        app.draft_job("work", {}, **given)
    with pytest.raises(Invalid, match=f"argument '{option}' .*{ours}"):
        work.new_job(**given)


def test_schedule_in_the_form_of_celery_is_answered_with_ours(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    job = app.draft_job("work", {})

    with pytest.raises(Invalid, match=r"option: 'schedule' .*cron=… or every=…"):
        app.schedule("nightly", job, schedule=10.0)
    with pytest.raises(Invalid, match=r'cron: .* here it is cron="\*/5 3 \* \* mon-fri"'):
        app.schedule("nightly", job, cron=celery_crontab(minute="*/5", hour=3, day_of_week="mon-fri"))
    with pytest.raises(Invalid, match=r"cron: 3 .*give text"):
        app.schedule("nightly", job, cron=3)
    with pytest.raises(Invalid, match=r"cron: <crontab: 0 0 13 .*give text"):  # cron would join the days by OR
        app.schedule("nightly", job, cron=celery_crontab(minute=0, hour=0, day_of_month=13, day_of_week="fri"))


@pytest.mark.parametrize(
    ("url", "provided"),
    [
        ("postgresql+asyncpg://a@b/c", r"leave out \+asyncpg: postgresql://"),
        ("sqlite+aiosqlite:///a.db", r"leave out \+aiosqlite: sqlite://"),
        ("postgre://a@b/c", r"the scheme 'postgre' is not known; .* did you mean postgres\?"),
        ("sqlite://own.db", r"url: own\.db stands where others name a host; .* sqlite:///own\.db"),
        ("mysql://a@b/c", r"the scheme 'mysql' is not known; give sqlite:///file\.db"),
    ],
)
def test_misspelt_url_suggests_the_right_one_where_it_is_written(url: str, provided: str) -> None:
    for misspelt in (open_store, Holdfast):
        with pytest.raises(ConfigError, match=provided):
            misspelt(url)


def test_submission_of_a_misspelt_task_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("shop.tasks.send_mail")
    def send_mail() -> None: ...

    for task in ("shop.tasks.send_mial", "shop.tasks.send_mial", "shop.tasks.send_mail", "shop.tasks.resize"):
        app.sync.enqueue(task)
    app.sync.close()

    (record,) = [each for each in caplog.records if each.name.startswith("holdfast")]
    assert "did you mean shop.tasks.send_mail?" in record.getMessage()
    assert "task shop.tasks.send_mial" in record.getMessage()


def test_arguments_of_wrong_kinds_are_refused_by_name(tmp_path: Path) -> None:
    app: Any = Holdfast(f"sqlite:///{tmp_path}/jobs.db")  # calls are wrong on purpose

    @app.task("work")
    async def work() -> None: ...

    async def run() -> None:
        async with app:
            job = await work.enqueue()
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "timeout": lambda: job.result(timeout="30"),
                "jobs": lambda: app.enqueue_many([job]),
                "jobs: <Task": lambda: app.enqueue_many([work]),
                "jobs: NewJob": lambda: app.enqueue_many(work.new_job()),
                "jobs: <JobHandle": lambda: app.submit(job),
                "tags": lambda: work.options(tags=5).enqueue(),
                "cron": lambda: app.schedules.add("s", work.new_job(), cron=0),
                "selection": lambda: app.cancel(None),
                "selection: <JobHandle": lambda: app.cancel(job),
                "from_step": lambda: app.replay(job.id, from_step=5),
                "batch_size": lambda: app.enqueue_many([work.new_job()], batch_size=1.5),
                "queue": lambda: app.enqueue_batch([work.new_job()], queue="a b"),
                "batch": lambda: app.enqueue_batch([work.new_job()], id=job.id, batch=job.id),
            }
            for text, call in calls.items():
                with pytest.raises(Invalid, match=f"^{text}"):
                    await call()
            for field in ("states", "tasks"):
                with pytest.raises(Invalid, match=f"^{field}"):
                    JobFilter(**{field: None})
            assert await app.count() == 1

    asyncio.run(run())


_FORKS = """
import asyncio, os, sys
from holdfast import Holdfast

app = Holdfast(sys.argv[1])

async def submit():
    async with app:
        await app.enqueue("work", {})

asyncio.run(submit())
files = [open(os.devnull) for _ in range(16)]  # they have the numbers of files that the application had
if (child := os.fork()) == 0:
    try:
        for each in files:
            os.fstat(each.fileno())
    except OSError:
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fork_behind_the_end_of_an_application_closes_no_other_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORKS, f"sqlite:///{tmp_path}/jobs.db"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
