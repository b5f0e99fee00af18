"""The bridge: a real Celery application submits to Holdfast what is registered there, and the rest to its broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sentry_sdk
from celery import Celery, Task, _state, chain, group
from celery.beat import ScheduleEntry, Scheduler
from celery.result import AsyncResult
from celery.schedules import schedule
from redis import Redis as Client
from sentry_sdk.integrations.celery import CeleryIntegration

from holdfast import ConfigError, Holdfast, Invalid, JobState
from holdfast.integrations.celery import _WORKFLOWS, add_bridge
from holdfast.testing import Harness
from tests.support.redis import shared

DATABASE = 9


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Holdfast]:
    made = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    yield made
    made.sync.close()


@pytest.fixture
def shop(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An application of Celery with a bridge, two tasks in Holdfast and one only here."""
    # Celery adds tasks of other applications in this process, as of a page of the documentation, to each new one.
    own = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", own)
    url = f"redis://127.0.0.1:{shared().port}/{DATABASE}"
    made = Celery("shop", broker=url)
    route = {"queue": "reports", "exchange": "all", "routing_key": "reports.day", "priority": 4}
    made.conf.update(timezone="Europe/Zurich", task_routes={"routed": route})

    def send(to: str, copies: int = 1) -> str:
        return f"{copies} to {to}"

    for name in ("mail.send", "routed", "old.name", "only.celery"):
        made.task(send, name=name, shared=False)
    for name in ("mail.send", "routed", "new.name"):
        app.task(name, queue="mail")(send)
    add_bridge(made, app, names={"old.name": "new.name"})
    yield made
    with Client.from_url(url) as client:
        client.flushdb()


def waiting(shop: Celery) -> int:
    """Messages in Celery's broker."""
    with shop.connection_for_write() as connection:
        return int(connection.default_channel.client.llen("celery"))


def test_options_of_celery_become_those_of_a_job(app: Holdfast, shop: Celery) -> None:
    mail = shop.tasks["mail.send"]
    soon, id = datetime.now(UTC) + timedelta(hours=1), str(uuid4())

    job = app.sync.get(mail.delay("a@b.c", copies=2).id)
    assert (job.task, job.payload, job.queue, job.state) == (
        "mail.send",
        '{"to":"a@b.c","copies":2}',
        "mail",
        JobState.QUEUED,
    )
    timed = mail.apply_async(("a",), countdown=3600, expires=7200, queue="bulk", priority=6, task_id=id)
    job = app.sync.get(id)
    assert (timed.id, job.queue, job.priority, job.state) == (id, "bulk", -6, JobState.SCHEDULED)
    assert abs(job.run_at - soon) < timedelta(minutes=1)  # type: ignore[operator]
    assert abs(job.expires_at - soon) > timedelta(minutes=59)  # type: ignore[operator]
    naive = app.sync.get(mail.apply_async(("a",), eta=datetime(2030, 1, 31, 9)).id)  # noqa: DTZ001 - as Celery takes it
    assert naive.run_at == datetime(2030, 1, 31, 8, tzinfo=UTC)  # winter in Zurich
    routed = app.sync.get(shop.send_task("routed", ("a",), headers={}).id)
    assert (routed.queue, routed.priority) == ("reports", -4)
    assert app.sync.get(mail.s("a").set(countdown=60).delay().id).state is JobState.SCHEDULED
    assert app.sync.get(mail.apply_async(("a",), countdown=-5).id).state is JobState.QUEUED
    assert app.sync.get(shop.tasks["old.name"].delay("a").id).task == "new.name"
    assert waiting(shop) == 0


def test_tasks_unknown_to_holdfast_and_retries_stay_in_celery(app: Holdfast, shop: Celery) -> None:
    assert shop.tasks["only.celery"].delay("a").id
    shop.tasks["mail.send"].apply_async(("a",), retries=1)  # as task.retry() does in a worker

    assert (waiting(shop), app.sync.count()) == (2, 0)


def test_result_of_celery_for_a_bridged_job_warns_once(shop: Celery, caplog: pytest.LogCaptureFixture) -> None:
    left = shop.tasks["only.celery"].delay("a")
    assert shop.AsyncResult(left.id) == left
    assert caplog.messages == []
    for job in (shop.tasks["mail.send"].delay("a"), shop.tasks["mail.send"].delay("a")):
        assert isinstance(shop.tasks["mail.send"].AsyncResult(job.id), AsyncResult)

    (message,) = caplog.messages
    assert "stays PENDING in Celery; ask Holdfast: app.handle(id).sync.state()" in message


def test_revoke_cancels_jobs_and_passes_other_ids_on(
    app: Holdfast, shop: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on: list[tuple[object, bool]] = []
    monkeypatch.setattr(
        shop.control,
        "broadcast",
        lambda *_, arguments, **__: passed_on.append((arguments["task_id"], arguments["terminate"])),
    )
    mail = shop.tasks["mail.send"]
    first, second, third, kept = (mail.delay("a").id for _ in range(4))
    left = shop.tasks["only.celery"].delay("a")

    shop.control.revoke(first)
    mail.AsyncResult(second).revoke()
    shop.control.revoke([third, left.id, "named"], terminate=True)
    left.revoke()

    assert [app.sync.get(id).state for id in (first, second, third)] == [JobState.CANCELLED] * 3
    assert app.sync.get(kept).state is JobState.QUEUED
    assert passed_on == [([left.id, "named"], True), (left.id, False)]


@pytest.mark.parametrize("terminate", [False, True])
def test_revoke_stops_a_running_job_only_with_terminate(app: Holdfast, shop: Celery, terminate: bool) -> None:
    async def revoke_running() -> bool:
        async with Harness(app) as harness:

            @app.task("slow")
            async def slow() -> None:
                await harness.clock.sleep(3600)

            job = await slow.enqueue()
            await harness.advance(60)
            shop.control.revoke(job.id, terminate=terminate)
            running = await app.get(job.id)
            await app.cancel(job.id)
            return running.cancelling

    assert asyncio.run(revoke_running()) is terminate


def test_delay_works_on_an_event_loop(app: Holdfast, shop: Celery) -> None:
    async def serve() -> str:
        return str(shop.tasks["mail.send"].delay("a").id)

    assert app.sync.get(asyncio.run(serve())).task == "mail.send"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {"headers": {"headers": {"tenant": "a"}, "baggage": "b"}},
            r"headers: \{'tenant': 'a'\} .* pass the values as arguments",
        ),
        ({"serializer": "pickle"}, "serializer: 'pickle' .*leave it out"),
        ({"time_limit": 5}, r"time_limit: 5 .*@app\.task\(timeout=30\)"),
        ({"routing_key": "a.b"}, "routing_key: 'a.b' .*name the queue"),
        ({"nonsense": 5}, "nonsense: 5 .*leave it out, or send this task to Celery"),
        ({"task_id": "fixed"}, "^task_id: 'fixed' .*give a UUID, or leave it out$"),
        ({"countdown": "soon"}, "delay: 'soon'"),
    ],
)
def test_option_without_equivalent_names_the_remedy(
    app: Holdfast, shop: Celery, options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(Invalid, match=remedy):
        shop.tasks["mail.send"].apply_async(("a",), **options)
    assert (waiting(shop), app.sync.count()) == (0, 0)


def test_options_of_the_decorator_are_those_of_the_task_here(app: Holdfast, shop: Celery) -> None:
    governed = {"time_limit": 9, "soft_time_limit": 5, "serializer": "pickle", "compression": "zlib"}
    mail = shop.task(shop.tasks["only.celery"].run, name="new.name", shared=False, **governed)

    assert app.sync.get(mail.delay("a").id).task == "new.name"
    with pytest.raises(Invalid, match=r"soft_time_limit: 4 .*@app\.task\(timeout=30\)"):
        mail.apply_async(("a",), soft_time_limit=4)
    assert app.sync.count() == 1


def test_headers_of_beat_and_sentry_are_dropped(app: Holdfast, shop: Celery) -> None:
    entry = ScheduleEntry("nightly", "mail.send", schedule=schedule(60), args=("a",), app=shop)
    Scheduler(shop, lazy=True).apply_async(entry, advance=False)
    assert app.sync.count() == 1

    mail = shop.tasks["mail.send"]
    original = Task.apply_async, Celery.send_task
    client = sentry_sdk.Client(default_integrations=False, integrations=[CeleryIntegration()])
    try:
        with sentry_sdk.new_scope() as scope:
            scope.set_client(client)
            mail.delay("b")
            with pytest.raises(Invalid, match=r"headers: \{'tenant': 'a'\}"):
                mail.apply_async(("c",), headers={"tenant": "a"})
    finally:
        Task.apply_async, Celery.send_task = original
    assert (waiting(shop), app.sync.count()) == (0, 2)


def test_workflows_stay_in_celery_as_a_whole(app: Holdfast, shop: Celery, caplog: pytest.LogCaptureFixture) -> None:
    mail, only = shop.tasks["mail.send"], shop.tasks["only.celery"]

    chain(mail.si("a"), mail.si("b")).delay()
    group(only.si("a"), mail.si("b"), mail.si("c")).delay()
    mail.apply_async(("a",), link=only.si("b"))
    mail.apply_async(("a",), chain=[], root_id=str(uuid4()))  # as a worker sends the last link of a chain
    body = mail.si("a")
    body.freeze()
    body.delay()  # as a worker sends the body of a chord

    assert (waiting(shop), app.sync.count()) == (7, 0)
    assert [record.getMessage().partition("; to move them, ")[::2] for record in caplog.records] == [
        ("task mail.send: messages with chain stay in Celery", _WORKFLOWS["chain"]),
        ("task mail.send: messages with group_id stay in Celery", _WORKFLOWS["group_id"]),
        ("task mail.send: messages with link stay in Celery", _WORKFLOWS["link"]),
    ]


def test_arguments_of_the_bridge_are_checked(app: Holdfast, shop: Celery) -> None:
    with pytest.raises(Invalid, match=r"argument .to. of task .mail\.send."):
        shop.tasks["mail.send"].delay(object())
    with pytest.raises(Invalid, match=r"celery_app: .*add_bridge\(celery_app, app\)"):
        add_bridge(app, shop)
    with pytest.raises(Invalid, match=r"app: <Celery .*give the application of Holdfast"):
        add_bridge(Celery("other"), shop)
    with pytest.raises(ConfigError, match=r"call add_bridge\(\) once"):
        add_bridge(shop, app)
    with pytest.raises(ConfigError, match="has no task 'none'"):
        add_bridge(Celery("other"), app, names={"a": "none"})
    assert (waiting(shop), app.sync.count()) == (0, 0)
