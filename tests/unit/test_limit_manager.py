"""``app.limits`` on SQLite: declared, changed, reset and bounded."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Conflict, Holdfast, Invalid, JobFilter, NotFound, QueueFull
from holdfast.app.limits import MAX_OF_ONE
from holdfast.core.errors import ConfigError
from holdfast.core.events import DeclarationIgnored
from holdfast.core.limit_options import LimitOptions, draft_limit
from holdfast.core.limits import MAX_LIMITS, Limit, LimitValues


def with_app(tmp_path: Path, work: Callable[[Holdfast], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with Holdfast(f"sqlite:///{tmp_path}/jobs.db", **settings) as app:
            await work(app)

    asyncio.run(run())


def drafts(**options: Any) -> dict[str, Limit]:
    return {"mail": draft_limit("mail", LimitOptions(queue="mail", **options))}


def test_limit_is_declared_once() -> None:
    app = Holdfast("sqlite:///unused.db")
    app.limit("mail", queue="mail", concurrency=1)
    with pytest.raises(ConfigError, match="declared twice"):
        app.limit("mail", queue="mail", concurrency=2)


def test_operators_values_stay_until_they_are_reset(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.reconcile(drafts(concurrency=5))
        assert (await app.limits.get("mail")).owner == "code"
        changed = await app.limits.change("mail", concurrency=50)
        assert (changed.values.concurrency, changed.declared) == (50, LimitValues(concurrency=5))
        await app.limits.change("mail", rate="10/s")
        await app.limits.reconcile(drafts(concurrency=6, by="args.t"))
        kept = await app.limits.get("mail")
        assert (kept.values.concurrency, kept.values.rate, kept.by) == (50, 10, "args.t")
        reset = await app.limits.reset("mail")
        assert (reset.values, reset.declared) == (LimitValues(concurrency=6), None)
        assert await app.limits.reset("mail") == reset

    with_app(tmp_path, work)


def test_reconcile_writes_nothing_that_is_there(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.reconcile(drafts(concurrency=5))
        first = await app.limits.get("mail")
        await app.limits.reconcile(drafts(concurrency=5))
        assert await app.limits.get("mail") == first
        await app.limits.reconcile(drafts(concurrency=6))
        assert (await app.limits.get("mail")).revision > first.revision

    with_app(tmp_path, work)


def test_operators_limit_of_a_declared_name_stays(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        kept: list[Any] = []
        app.events.subscribe(kept.append, DeclarationIgnored)
        mine = await app.limits.add("mail", queue="mail", concurrency=1)
        await app.limits.reconcile(drafts(concurrency=5))
        assert await app.limits.get("mail") == mine
        assert [each.declared for each in kept] == ["limit mail"]
        with pytest.raises(Conflict, match="an operator made limit mail"):
            await app.limits.reset("mail")

    with_app(tmp_path, work)


@pytest.mark.parametrize(("owner", "left"), [(None, ["mail", "mine"]), ("shop", ["mine"])])
def test_limit_that_code_no_longer_declares(tmp_path: Path, owner: str | None, left: list[str]) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.add("mine", queue="mail", concurrency=1)
        await app.limits.reconcile(drafts(concurrency=5))
        await app.limits.reconcile({})
        assert [each.name for each in await app.limits.find_all()] == left

    with_app(tmp_path, work, schedule_owner=owner)


@pytest.mark.parametrize("options", [{"depth": 5}, {"concurrency": 1}], ids=["depth", "ninth"])
def test_limit_that_takes_the_place_of_a_removed_one_is_in_force(tmp_path: Path, options: dict[str, Any]) -> None:
    """A queue has one limit with a depth, and at most eight."""
    names = [f"other{n}" for n in range(MAX_OF_ONE - 1)]
    others = {name: draft_limit(name, LimitOptions(queue="mail", rate="1/s")) for name in names}
    old, new = ({name: draft_limit(name, LimitOptions(queue="mail", **options))} for name in ("old", "new"))

    async def work(app: Holdfast) -> None:
        ignored: list[object] = []
        app.events.subscribe(ignored.append, DeclarationIgnored)
        await app.limits.reconcile({**others, **old})
        await app.limits.reconcile({**others, **new})
        assert {each.name for each in await app.limits.find_all()} == {*others, "new"}
        assert ignored == []

    with_app(tmp_path, work, schedule_owner="shop")


def test_jobs_of_a_removed_limit_wait_without_it(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.add("mail", queue="mail", by="args.t")
        job = await app.enqueue("work", {"t": 1}, queue="mail")
        assert (await app.get(job.id)).partition == "mail=1"
        await app.limits.remove("mail")
        assert (await app.get(job.id)).partition is None
        with pytest.raises(NotFound):
            await app.limits.remove("mail")

    with_app(tmp_path, work)


def test_submission_on_a_connection_obeys_the_depth_of_a_key(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    app.limits.sync.add("quota", queue="default", by="args.t", depth=1)
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        app.sync.enqueue("work", {"t": "a"}, connection=connection)
        connection.commit()
        with pytest.raises(QueueFull, match="full for a: 1 of 1"):
            app.sync.enqueue("work", {"t": "a"}, connection=connection)
        app.sync.enqueue("work", {"t": "b"}, connection=connection)
        connection.commit()
    assert app.sync.count(JobFilter()) == 2
    app.sync.close()


def test_change_names_the_wrong_value(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.add("mail", queue="mail", concurrency=5, rate="10/s")
        for values, words in (
            ({"concurency": 5}, "did you mean concurrency"),
            ({}, "there are these"),
            ({"queue": "other"}, "there are these"),
            ({"concurrency": -1}, "concurrency"),
            ({"concurrency": None, "rate": None}, "concurrency"),
            ({"shares": {"a": 2}}, "shares"),
        ):
            with pytest.raises(Invalid, match=words):
                await app.limits.change("mail", **values)
        assert (await app.limits.change("mail", rate="100/s")).values.burst == 10  # the default one of the new rate
        assert (await app.limits.change("mail", weight=20)).values.burst == 20
        with pytest.raises(Invalid, match="give burst too"):
            await app.limits.change("mail", weight="args.n")
        assert (await app.limits.change("mail", weight="args.n", burst=30)).values.burst == 30
        assert (await app.limits.change("mail", concurrency=4, rate="5/s")).values.burst == 30
        assert (await app.limits.change("mail", rate=None, weight=None)).values == LimitValues(concurrency=4)
        with pytest.raises(NotFound):
            await app.limits.change("other", concurrency=1)

    with_app(tmp_path, work)


def test_argument_that_a_task_does_not_take_is_refused(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        @app.task("send")
        async def send(tenant: str, pages: int = 1) -> None: ...

        with pytest.raises(Invalid, match="did you mean tenant"):
            await app.limits.add("send", task="send", by="args.tenat")
        await app.limits.add("send", task="send", by="args.tenant")
        with pytest.raises(Invalid, match="takes tenant, pages"):
            await app.limits.change("send", weight="args.size")
        await app.limits.add("unknown", task="elsewhere", by="args.anything")

    with_app(tmp_path, work)


def test_use_and_pause_of_a_key_need_its_values(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.add("crm", queue="crm", by="args.tenant")
        for call in (app.limits.use("crm"), app.limits.pause("crm", 5), app.limits.resume("crm")):
            with pytest.raises(Invalid, match=r"give values of args\.tenant"):
                await call
        with pytest.raises(Invalid, match="pause_for"):
            await app.limits.pause("crm", -1, "acme")
        await app.limits.pause("crm", timedelta(minutes=1), "acme", 7)
        acme, seven, other = await app.limits.use("crm", "acme", "7", "x")
        assert (acme.free_at_us > 0, seven.free_at_us > 0, other.free_at_us) == (True, True, 0)
        await app.limits.pause("crm", 0, "acme")  # no time at all: no pause, and no end of one
        await app.limits.resume("crm", "7")
        assert [each.paused for each in await app.limits.use("crm", "acme", 7)] == [True, False]

    with_app(tmp_path, work)


def test_number_of_limits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(app: Holdfast) -> None:
        for number in range(MAX_OF_ONE):
            await app.limits.add(f"l-{number}", queue="mail", concurrency=1)
        with pytest.raises(Invalid, match="has 8 limits"):
            await app.limits.add("one-more", queue="mail", concurrency=1)
        monkeypatch.setattr("holdfast.app.limits.MAX_LIMITS", MAX_OF_ONE)
        with pytest.raises(Invalid, match="remove one first"):
            await app.limits.add("one-more", queue="other", concurrency=1)
        await app.limits.change("l-0", concurrency=2)

    assert MAX_LIMITS == 1000
    with_app(tmp_path, work)


def test_writers_at_once_lose_no_change(tmp_path: Path) -> None:
    async def work(app: Holdfast) -> None:
        await app.limits.add("crm", queue="crm", by="args.tenant", concurrency=1)
        changes = [{"concurrency": 7}, {"rate": "5/s"}, {"weight": 2}, {"shares": {"a": 2}}]
        await asyncio.gather(*[app.limits.change("crm", **change) for change in changes])
        values = (await app.limits.get("crm")).values
        assert (values.concurrency, values.rate, values.weight, values.shares) == (7, 5, 2, {"a": 2})

    with_app(tmp_path, work)


def test_many_keys_stay_bounded_in_the_store(tmp_path: Path) -> None:
    number = 3000

    async def work(app: Holdfast) -> None:
        await app.limits.add("crm", queue="default", by="args.tenant", concurrency=1, rate="1000/s")
        for begin in range(0, number, 1000):
            batch = [app.draft_job("work", {"tenant": f"t-{n}"}) for n in range(begin, begin + 1000)]
            await (await app.open_store()).queueing.submit(batch)
        handled = Counter[str]()
        while jobs := await _claim_and_end(app):
            handled.update(jobs)
        assert (len(handled), set(handled.values())) == (number, {1})
        await asyncio.sleep(0.01)  # every token has come
        for _ in range(number // 1000 + 1):
            await (await app.open_store()).maintenance.prune({}, limit=1000)

    with_app(tmp_path, work)
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        counts = [
            connection.execute(f"select count(*) from {table}").fetchone()[0]  # noqa: S608
            for table in ("holdfast_partition", "holdfast_bucket")
        ]
    assert max(counts) <= 500


async def _claim_and_end(app: Holdfast) -> list[str]:
    from holdfast.core.models import JobState, Settlement
    from holdfast.stores.base import ClaimRequest

    store = await app.open_store()
    request = ClaimRequest("w", {"*": 500}, limit=500, lease_for=timedelta(minutes=1))
    jobs = (await store.queueing.claim(request)).jobs
    ends = [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in jobs]
    await store.queueing.settle(ends)
    return [json.loads(job.payload)["tenant"] for job in jobs]


def test_second_depth_by_key_of_a_queue_or_task_is_refused(tmp_path: Path) -> None:
    async def work() -> list[Limit]:
        async with Holdfast(f"sqlite:///{tmp_path}/jobs.db") as app:
            for name, options in {
                "whole": {"queue": "mail"},
                "keyed": {"queue": "mail", "by": "args.a"},
                "task": {"task": "a"},
                "rest": {"task": "b", "by": "args.a"},
            }.items():
                await app.limits.add(name, depth=5, **options)
            await app.limits.add("turns", queue="mail", by="args.b")
            for call in (
                app.limits.add("second", queue="mail", by="args.b", depth=5),
                app.limits.add("second", task="a", by="args.b", depth=5),
                app.limits.change("turns", depth=5),
            ):
                with pytest.raises(Invalid, match=r"depth: 5 is one too many; limit (keyed|task) has one"):
                    await call
            await app.limits.change("keyed", depth=None)
            await app.limits.change("turns", depth=5)
            return await app.limits.find_all()

    assert [limit.name for limit in asyncio.run(work()) if limit.is_counted] == ["rest", "task", "turns"]
