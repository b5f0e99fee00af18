"""A slow filter delays no other request, is refused in time, and leaves nothing running behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.core.errors import Busy, HoldfastError, TooBroad, Unavailable
from holdfast.core.models import JobState
from holdfast.stores.common.named_sql import load_statements
from holdfast.stores.common.requests import CHOICE_SECONDS, Chosen
from holdfast.stores.postgres import store as postgres_store
from holdfast.stores.redis import pool as redis_links
from holdfast.stores.sqlite import store as sqlite_store
from holdfast.stores.sqlite.admin import SqliteAdmin
from holdfast.stores.sqlite.query import SqliteQuery
from holdfast.views import explain
from holdfast.web import bulk, jobs
from tests.conformance.support import heartbeat
from tests.support.load import slowness
from tests.support.postgres import shared
from tests.web.client import JSON, Api

ENDLESS = {
    sqlite_store: "with recursive c (n) as (select 1 union all select n + 1 from c) select n, '' from c where n < 0",
    postgres_store: "select 1 from pg_sleep(30)",
}
"""What a search looks like that has to look at very many jobs."""
_SEARCHES = ("find", "find_unended", "count", "choose")
SOON = 2.5
"""Seconds on an idle machine."""


@pytest.fixture
def slow(home: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API whose store finds nothing by a filter, ever."""

    def statements(endless: str) -> Callable[[Any], dict[str, str]]:
        return lambda path: {**load_statements(path), **dict.fromkeys(_SEARCHES, endless)}

    for module, endless in ENDLESS.items():
        monkeypatch.setattr(module, "load_statements", statements(endless))
    if home.startswith("redis"):
        monkeypatch.setattr(redis_links, "_SEARCH", 0.0)
    with Api(home, hurried=True) as api:
        yield api


def test_slow_filter_is_refused_without_delaying_others(slow: Api, home: str) -> None:
    job, _ = slow.submit(), slow.dead()

    async def timed(method: str, path: str, **given: Any) -> tuple[httpx.Response, float]:
        begun = time.monotonic()
        return await slow.send(method, path, **given), time.monotonic() - begun

    async def asked() -> tuple[list[tuple[httpx.Response, float]], list[tuple[httpx.Response, float]]]:
        searches = [asyncio.ensure_future(timed("GET", "/v1/jobs?error=a")) for _ in range(12)]
        await asyncio.sleep(0.05)
        submission = {"content": '{"task": "work", "payload": {}}', "headers": JSON}
        others = [timed("POST", "/v1/jobs", **submission), timed("GET", f"/v1/jobs/{job['id']}")]
        if not home.startswith("redis"):  # its searches take turns with everybody else's calls, a piece at a time
            others += [timed("GET", path) for path in ("/v1/jobs?state=dead", "/v1/queues/default/dead")]
            others += [timed("POST", "/v1/queues/default/dead/replay")]
        return await asyncio.gather(*others), await asyncio.gather(*searches)

    others, searches = slow.run(asked())

    assert [answer.status_code for answer, _ in others] == [201, *[200] * (len(others) - 1)]
    assert max(seconds for _, seconds in others) < 0.5 * slowness()
    refused = [answer for answer, _ in searches if answer.status_code == 422]
    assert {answer.json()["code"] for answer in refused} == {"too_broad"}
    assert "narrow" in refused[0].json()["remedy"]
    assert {answer.status_code for answer, _ in searches} <= {422, 503}  # who found no turn may try again
    assert max(seconds for _, seconds in searches) < SOON * slowness()
    running = "select count(*) from pg_stat_activity where state = 'active' and query like '%pg_sleep(30)%'"
    assert shared().execute(f"{running} and pid <> pg_backend_pid()") == [(0,)]


def test_page_whose_jobs_all_match_is_full(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SEARCH_FOR", 0.0)
    monkeypatch.setattr(jobs, "_PAGE_FOR", 60.0)
    with Api(home, hurried=True) as api:
        api.post("/v1/batches", {"jobs": [{"task": "work", "payload": {}}] * 120}, 201)
        for query in ("", "&queue=default", "&state=queued", "&task=work"):
            assert len(api.get(f"/v1/jobs?limit=100{query}")["jobs"]) == 100, query


def test_dry_run_and_queue_position_are_bounded_in_time(slow: Api, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHOICE_SECONDS", 0.0 if home.startswith("redis") else 0.2)
    job = slow.submit()
    body = '{"filter": {"error": "spring"}, "dry_run": true}'

    refused = slow.refused("POST", "/v1/jobs/cancel", 422, content=body, headers=JSON)

    assert refused["code"] == "too_broad"
    later = slow.submit()
    slow.run(beat(slow))
    assert (
        slow.get(f"/v1/jobs/{later['id']}/why")["reasons"][0]["text"] == "it waits behind up to 1 job of queue default"
    )
    slow.ask("DELETE", f"/v1/jobs/{later['id']}")
    assert [each["code"] for each in slow.get(f"/v1/jobs/{job['id']}/why")["reasons"]] == ["next"]


async def beat(api: Api) -> None:
    """A worker that serves every queue is there."""
    await (await api.app.open_store()).queueing.heartbeat(heartbeat(queues="*"), [], lease_for=timedelta(minutes=1))


def test_position_in_a_very_long_queue_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "_COUNTED", 2)
    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        first, _, _ = api.submit(), api.submit(), api.submit()
        api.run(beat(api))
        reasons = api.get(f"/v1/jobs/{first['id']}/why")["reasons"]

    text = "its place in the line is not known: over 2 jobs of queue default are ready"
    assert [(each["code"], each["text"]) for each in reasons] == [("place_unknown", text)]


def test_dead_letters_are_counted_and_replayed_without_scanning_others(slow: Api) -> None:
    job_ids = [slow.dead(), slow.dead()]

    would = slow.post("/v1/queues/default/dead/replay", {"filter": {"task": "work"}, "dry_run": True})
    done = slow.post("/v1/queues/default/dead/replay", {"limit": 1})
    again = slow.post("/v1/jobs/replay", {"filter": {"state": ["dead", "cancelled"], "task": "work"}})

    assert (would["count"], would["more"]) == (2, False)
    assert (done["changed"][0]["id"], done["more"]) == (job_ids[0], True)
    assert ([each["id"] for each in again["changed"]], again["more"]) == (job_ids[1:], False)


def test_dry_run_counts_within_the_time_of_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, asked = SqliteQuery.count, []

    async def limited(self: SqliteQuery, where: Any, *, limit: int, seconds: float) -> int:
        asked.append(seconds)
        if limit > bulk.MAX_JOBS:
            raise TooBroad(seconds)
        return await count(self, where, limit=limit, seconds=seconds)

    monkeypatch.setattr(bulk, "MAX_JOBS", 2)
    monkeypatch.setattr(SqliteQuery, "count", limited)
    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        for _ in range(3):
            api.submit()
        would = api.post("/v1/jobs/cancel", {"filter": {"task": "work"}, "dry_run": True})

    assert (would["count"], would["more"], set(asked)) == (2, True, {CHOICE_SECONDS})


FAILURES = [TooBroad(1.0), Busy("others look for jobs"), Unavailable("the store has just gone")]


@pytest.mark.parametrize("error", FAILURES, ids=["too broad", "busy", "away"])
def test_changes_before_a_failed_search_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HoldfastError
) -> None:
    """A filter without a state is looked for state by state."""
    choose = SqliteAdmin._choose

    async def limited(self: SqliteAdmin, selection: Any, *arguments: Any, **named: Any) -> Chosen:
        if selection.states != (JobState.SCHEDULED,):
            raise error
        return await choose(self, selection, *arguments, **named)

    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        _, scheduled = api.submit(), api.submit(delay=3600)
        monkeypatch.setattr(SqliteAdmin, "_choose", limited)
        done = api.post("/v1/jobs/cancel", {"filter": {"task": "work"}})

    assert ([each["id"] for each in done["changed"]], done["more"]) == ([scheduled["id"]], True)


def test_changes_before_a_failed_count_of_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **options: object) -> int:
        raise Unavailable("the store has just gone")

    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        api.submit()
        api.submit(delay=3600)
        monkeypatch.setattr(SqliteQuery, "count", away)
        done = api.post("/v1/jobs/cancel", {"filter": {"task": "work"}, "limit": 1})

    assert (len(done["changed"]), done["more"]) == (1, True)
