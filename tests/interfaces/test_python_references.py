"""The Python interface: ids that are none, filters that are none, options that are wrong, and values of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Invalid, Job, JobFilter, NotFound, Retry
from holdfast.worker import Worker
from tests.support.stores import MIGRATED

NO_IDS = ("nope", "", "0", "key:", "key:unknown", "key:a\0b", "a\0b", "ключ", "x" * 10_000, "0193e4a0")


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Holdfast]:
    with MIGRATED[request.param](tmp_path) as url:
        app = Holdfast(url)
        yield app
        app.sync.close()


CALLS: dict[str, Callable[[Holdfast, str], Any]] = {
    "get": lambda app, job_id: app.sync.get(job_id),
    "attempts": lambda app, job_id: app.sync.attempts(job_id),
    "lines": lambda app, job_id: app.sync.logs(job_id),
    "cancel": lambda app, job_id: app.sync.cancel(job_id),
    "cancel many": lambda app, job_id: app.sync.cancel([job_id]),
    "replay": lambda app, job_id: app.sync.replay(job_id),
    "delete": lambda app, job_id: app.sync.delete(job_id),
    "cancel one": lambda app, job_id: app.sync.cancel_one(job_id),
    "replay one": lambda app, job_id: app.sync.replay_one(job_id),
    "handle": lambda app, job_id: app.handle(job_id).sync.state(),
}


@pytest.mark.parametrize("call", CALLS)
def test_text_that_is_no_id_is_not_found(call: str, app: Holdfast) -> None:
    for text in NO_IDS:
        with pytest.raises(NotFound, match=r"there is no job|^id: .* is not valid; give a job's id"):
            CALLS[call](app, text)


def test_every_spelling_of_an_id_names_its_job(app: Holdfast) -> None:
    handle = app.sync.enqueue("work")

    assert app.sync.get(handle.id.upper()).id == app.handle(handle.id.upper()).id == handle.id
    assert app.sync.cancel_one(handle.id.upper()) == "cancelled"


def test_handle_by_an_id_says_that_it_created_no_job(app: Holdfast) -> None:
    submitted, unknown = app.sync.enqueue("work"), "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"

    assert submitted.created
    assert not app.handle(submitted.id).created
    assert not app.handle(unknown).created
    for call in (app.handle(unknown).sync.state, lambda: app.sync.get(unknown)):
        with pytest.raises(NotFound, match=f"there is no job {unknown}: .*its retention is over, .*not committed"):
            call()


def test_key_for_a_handle_is_answered_with_what_gives_the_id(app: Holdfast) -> None:
    handle = app.sync.enqueue("work", key="order-1")

    for call in (app.handle, app.sync.read_batch):
        with pytest.raises(NotFound, match=r"give .*\(await app\.get\('key:order-1'\)\)\.id"):
            call("key:order-1")
    assert app.handle(app.sync.get("key:order-1").id).id == handle.id


def test_unknown_key_among_several_is_refused_and_the_others_are_done(app: Holdfast) -> None:
    first, second = app.sync.enqueue("work", key="order-1"), app.sync.enqueue("work")

    for call, state in ((app.sync.cancel, "cancelled"), (app.sync.replay, "queued"), (app.sync.delete, "queued")):
        done = call(["key:order-1", "key:gone", second.id, "key:a\0b"])
        assert done.changed == [(first.id, state), (second.id, state)]
        assert done.refused == [("key:gone", None), ("key:a\0b", None)]


@pytest.mark.parametrize("call", ["find", "count", "cancel", "replay", "delete"])
def test_dict_in_place_of_a_filter_is_refused(call: str, app: Holdfast) -> None:
    handle = app.sync.enqueue("work", queue="mail")

    with pytest.raises(Invalid, match="JobFilter"):
        getattr(app.sync, call)({"queue": "mail"})
    assert [job.id for job in app.sync.find(JobFilter(queue="mail")).jobs] == [handle.id]


WRONG_OPTIONS: list[tuple[str, Any]] = [
    ("delay", -1),
    ("delay", "5"),
    ("delay", True),
    ("priority", 200),
    ("priority", "high"),
    ("key", ""),
    ("key", 7),
    ("key_for", -1),
    ("queue", "No Name"),
    ("run_at", "tomorrow"),
    ("max_attempts", 0),
    ("timeout", 0),
    ("retry", 3),
    ("tags", [""]),
    ("tags", "mail"),
    ("metadata", []),
    ("id", "nope"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS)
def test_wrong_option_is_refused_where_it_is_written(name: str, value: Any, tmp_path: Path) -> None:
    @Holdfast(f"sqlite:///{tmp_path}/jobs.db").task("mail.send")
    async def send() -> None: ...

    with pytest.raises(Invalid, match=f"^{name}: .* is not valid; (give|write|use) ") as caught:
        send.options(**{name: value})
    assert caught.value.field == name


def test_delay_beside_run_at_is_refused_where_it_is_written(tmp_path: Path) -> None:
    @Holdfast(f"sqlite:///{tmp_path}/jobs.db").task("mail.send")
    async def send() -> None: ...

    with pytest.raises(Invalid, match="give delay or run_at, not both"):
        send.options(delay=1, run_at="2030-01-01T00:00:00Z")


def test_unknown_option_is_answered_with_the_nearest(tmp_path: Path) -> None:
    @Holdfast(f"sqlite:///{tmp_path}/jobs.db").task("mail.send")
    async def send() -> None: ...

    with pytest.raises(TypeError, match="did you mean retry"):
        send.options(retri=3)  # type: ignore[call-arg]


def test_options_follow_settings_that_change_afterwards(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", max_attempts=3)

    @app.task("mail.send")
    async def send() -> None: ...

    urgent = send.options(priority=5)
    first = urgent.new_job()
    app.settings = app.settings.replace_values(max_attempts=7)
    second = urgent.new_job()

    assert (first.max_attempts, second.max_attempts) == (3, 7)
    assert first.id != second.id


@dataclass
class Invoice:
    number: int
    total: Decimal


def test_job_offers_arguments_and_return_value(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("invoice.create", retry=Retry.immediate())
    async def create(number: int, prices: list[Decimal], after: timedelta) -> Invoice:
        return Invoice(number, sum(prices, Decimal(0)))

    async def run() -> tuple[Job, Job, Invoice]:
        async with app:
            handle = await create.enqueue(7, [Decimal("3.20"), Decimal("4.10")], after=timedelta(seconds=3))
            waiting = await handle.job()
            await Worker(app, drain=True).run()
            return waiting, await handle.job(), await handle.result(timeout=30)

    waiting, job, result = asyncio.run(run())

    arguments = {"number": 7, "prices": ["3.20", "4.10"], "after": "PT3S"}
    assert (waiting.decode_arguments(), waiting.return_value()) == (arguments, None)
    assert job.return_value() == {"number": 7, "total": "7.30"}
    assert result == Invoice(7, Decimal("7.30"))
