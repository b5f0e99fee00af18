"""A filter that takes long to look for holds up nobody else, is refused in time, and leaves nothing running behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.errors import TooBroad
from holdfast.job import JobState
from holdfast.stores.postgres import store as postgres_store
from holdfast.stores.redis import links as redis_links
from holdfast.stores.sql import load_statements
from holdfast.stores.sqlite import store as sqlite_store
from holdfast.stores.verbs import Chosen
from tests.support.postgres import shared
from tests.web.client import JSON, Api

ENDLESS = {
    sqlite_store: "with recursive c (n) as (select 1 union all select n + 1 from c) select n, '' from c where n < 0",
    postgres_store: "select 1 from pg_sleep(30)",
}
"""What a search looks like that has to look at very many jobs."""
SOON = 2.5
"""Seconds, with what a busy machine adds."""


@pytest.fixture
def slow(home: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API whose store finds nothing by a filter, ever."""

    def statements(endless: str) -> Callable[[Any], dict[str, str]]:
        return lambda path: {**load_statements(path), "find": endless, "count": endless}

    for module, endless in ENDLESS.items():
        monkeypatch.setattr(module, "load_statements", statements(endless))
    if home.startswith("redis"):
        monkeypatch.setattr(redis_links, "_SEARCH", 0.0)
    with Api(home) as api:
        yield api


def test_a_filter_that_takes_long_is_refused_and_holds_up_nobody_else(slow: Api) -> None:
    job = slow.submit()

    async def timed(method: str, path: str, **said: Any) -> tuple[httpx.Response, float]:
        begun = time.monotonic()
        return await slow.send(method, path, **said), time.monotonic() - begun

    async def asked() -> tuple[list[tuple[httpx.Response, float]], list[tuple[httpx.Response, float]]]:
        searches = [asyncio.ensure_future(timed("GET", "/v1/jobs?error=a")) for _ in range(12)]
        await asyncio.sleep(0.05)
        submission = {"content": '{"type": "work", "payload": {}}', "headers": JSON}
        others = [timed("GET", f"/v1/jobs/{job['id']}"), timed("POST", "/v1/jobs", **submission)]
        return await asyncio.gather(*others), await asyncio.gather(*searches)

    others, searches = slow.run(asked())

    assert [answer.status_code for answer, _ in others] == [200, 201]
    assert max(seconds for _, seconds in others) < 0.5
    refused = [answer for answer, _ in searches if answer.status_code == 422]
    assert {answer.json()["code"] for answer in refused} == {"too_broad"}
    assert "narrow" in refused[0].json()["remedy"]
    assert {answer.status_code for answer, _ in searches} <= {422, 503}  # who found no turn may try again
    assert max(seconds for _, seconds in searches) < SOON
    running = "select count(*) from pg_stat_activity where state = 'active' and query like '%pg_sleep(30)%'"
    assert shared().execute(f"{running} and pid <> pg_backend_pid()") == [(0,)]


def test_a_dry_run_and_the_place_in_the_line_take_no_longer(slow: Api) -> None:
    job = slow.submit()
    body = '{"filter": {"tag": "spring"}, "dry_run": true}'

    refused = slow.refused("POST", "/v1/jobs/cancel", 422, content=body, headers=JSON)

    assert refused["code"] == "too_broad"
    assert slow.get(f"/v1/jobs/{job['id']}/why")["reasons"]


def test_what_was_changed_before_the_search_took_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter without a state is looked for state by state."""
    choose = sqlite_store.SQLiteStore._chosen

    async def limited(self: sqlite_store.SQLiteStore, selection: Any, *arguments: Any, **named: Any) -> Chosen:
        if selection.states != (JobState.SCHEDULED,):
            raise TooBroad(1.0)
        return await choose(self, selection, *arguments, **named)

    with Api(f"sqlite:///{tmp_path}/jobs.db") as api:
        _, scheduled = api.submit(), api.submit(delay=3600)
        monkeypatch.setattr(sqlite_store.SQLiteStore, "_chosen", limited)
        done = api.post("/v1/jobs/cancel", {"filter": {"type": "work"}})

    assert ([each["id"] for each in done["changed"]], done["more"]) == ([scheduled["id"]], True)
