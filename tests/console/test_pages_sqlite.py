"""Pages: their form, hostile text in every field, empty and large states, mounting, and a store that is away."""

from __future__ import annotations

import asyncio
import gzip
import random
import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast.core.clock import ManualClock
from holdfast.core.errors import TooBroad, Unavailable
from holdfast.core.history import History, HistoryInterval, HistoryRow
from holdfast.core.ids import new_id
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.lifecycle import Failed, Lost, decide
from holdfast.core.models import JobState, NewJob
from holdfast.core.retry import Retry
from holdfast.stores.common import searches
from holdfast.stores.sqlite.query import SqliteQuery
from holdfast.web import jobs
from holdfast.web.console.cached import CachedRead, SharedRefreshes
from holdfast.web.console.charts import SPANS
from holdfast.web.console.rendering import asset_version
from holdfast.web.messages import ApiResponse
from tests.console.visitor import Visitor
from tests.console.world import HOSTILE, World, make_world
from tests.web.client import Api
from tests.web.keyed import Keys

LIVE = {"hx-trigger": "live"}
PAGES = (
    "",
    "/jobs",
    "/jobs?state=dead",
    "/errors",
    "/queues",
    "/workers",
    "/schedules",
    "/limits",
    "/limits/crm",
    "/batches",
    "/faults",
)


@pytest.mark.rows("X11", "X12")
def test_no_field_of_a_job_or_worker_becomes_markup(open_api: Api, visitor: Visitor) -> None:
    world = make_world(open_api, HOSTILE)
    jobs = [f"/jobs/{each}" for each in (world.queued, world.dead, world.running)]
    pages = {path: visitor.open_page(path) for path in (*PAGES, *jobs, "/limits/keyed?value=%3Cscript%3E")}
    for page in pages.values():
        assert not re.search(r"<script>|<img src=x|\u202e|\x07|>49<", page)
    pages["/errors/"] = visitor.open_page(f"/errors/{world.error}")
    for path in (*jobs, "/errors", "/errors/", "/workers"):
        assert "&lt;script&gt;alert(1)" in pages[path]


@pytest.mark.parametrize(
    "path",
    [
        "/jobs?queue=%3Cscript%3Ealert(1)%3C/script%3E",
        "/jobs?tag=%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E",
        "/jobs?error=%3Cscript%3E&state=dead",
        "/jobs?cursor=%3Cscript%3E",
        "/jobs?state=%3Cscript%3E",
        "/jobs?notice=%3Cscript%3E",
        "/jobs?job=javascript:alert(1)",
        "/jobs?%3Cscript%3E=1",
        "/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/limits/%3Cscript%3E",
        "/jobs?queue=%ff",
    ],
)
def test_hostile_addresses_become_no_markup(visitor: Visitor, path: str) -> None:
    answer = visitor.ask("GET", path, follow_redirects=True)
    assert answer.status_code in (200, 404, 422)
    assert not re.search(r"<script>|<img src=x", answer.text)


def test_headers_of_redirects_are_not_split(visitor: Visitor) -> None:
    answer = visitor.ask("GET", "/jobs?job=key%3Aa%0d%0aset-cookie:%20x=1")
    assert (answer.status_code, "set-cookie" in answer.headers) == (303, False)
    assert answer.headers["location"].endswith("a%0D%0Aset-cookie:%20x%3D1")


def test_empty_store_says_how_to_begin(visitor: Visitor) -> None:
    texts = {
        "": "No job that has ended in the last hour is counted yet.",
        "?span=7d": "No queue has a job yet.",
        "/jobs": "There are no jobs yet.",
        "/jobs?queue=none": "No job matches these filters.",
        "/queues": "No queue has a job",
        "/workers": "No worker is registered.",
        "/schedules": "There are no schedules",
        "/limits": "There are no limits",
        "/batches": "There are no batches yet.",
        "/batches?tag=none": "No batch matches these filters.",
        "/faults": "No faults are injected.",
    }
    for path, text in texts.items():
        assert text in visitor.open_page(path)


def test_overview_says_what_is_wrong_with_remedies(open_api: Api, visitor: Visitor) -> None:
    make_world(open_api)
    open_api.post("/v1/queues/mail/pause", {})
    page = visitor.open_page()
    assert "queue mail is paused and holds 1 job" in page
    assert "holdfast queue resume mail" in page
    assert "queue mail has 1 dead job" in page
    assert 'href="/console/jobs?state=dead"' in page


def test_time_until_a_long_queue_is_empty_is_a_lower_bound(open_api: Api, visitor: Visitor) -> None:
    open_api.succeed(open_api.submit(queue="long")["id"])
    open_api.succeed(open_api.submit(queue="short")["id"])
    open_api.submit(queue="short")
    jobs = [NewJob(id=new_id(), task="fill", payload="{}", queue="long") for _ in range(10_001)]
    open_api.run(open_api.run(open_api.app.open_store()).queueing.submit(jobs))
    for path in ("", "/queues"):
        rows = visitor.open_page(path).split("<tr")
        shown = {name: "over " in row for row in rows for name in ("long", "short") if f">{name}</a>" in row}
        assert shown == {"long": True, "short": False}


def test_jobs_are_paged_by_cursor(open_api: Api, visitor: Visitor) -> None:
    ids = [open_api.submit(tags=["red"])["id"] for _ in range(60)]
    first = visitor.open_page("/jobs?tag=red&state=queued")
    [older] = re.findall(r'href="/console(/jobs\?[^"]*cursor=[^"]*)" rel="next"', first)
    second = visitor.open_page(older.replace("&amp;", "&"))
    shown = [re.findall(r'id="job-([0-9a-f-]{36})"', page) for page in (first, second)]
    assert [len(each) for each in shown] == [50, 10]
    assert [*shown[0], *shown[1]] == ids[::-1]
    assert 'rel="next"' not in second
    assert "hx-get" in first
    assert "hx-get" not in second


def test_chart_shows_ended_jobs_of_visible_queues(
    open_api: Api, visitor: Visitor, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    minute = HistoryInterval.MINUTE.length_us
    rows = [
        HistoryRow(10 * minute, "mail", JobState.SUCCEEDED, 1500, 3.0, 1.0),
        HistoryRow(10 * minute, "mail", JobState.DEAD, 500, 0.0, 0.0),
        HistoryRow(20 * minute, "own", JobState.CANCELLED, 7, 0.0, 0.0),
    ]

    async def read_history(app: Any, since: str) -> History:
        assert since in SPANS
        return History(HistoryInterval.MINUTE, 0, 62 * minute, rows)

    monkeypatch.setattr(type(open_api.app), "read_history", read_history)
    page = visitor.open_page("?span=24h")
    text = "2,007 jobs ended in the last day: 1,500 succeeded, 7 cancelled, 500 dead; at most 2,000 in one minute."
    assert text in page
    assert '<rect class="succeeded" x="10" y="25.0" width="0.8" height="75.0">' in page
    assert '<rect class="dead" x="10" y="0.0" width="0.8" height="25.0">' in page
    limited = Visitor(open_api)
    limited.sign_in(keys.make("read", queues=("own",)))
    assert "7 jobs ended in the last hour: 7 cancelled; at most 7" in limited.open_page("?span=nonsense")


def test_many_open_pages_count_the_store_once(open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    counted = 0
    count = type(open_api.app).queues

    async def queues(app: Any) -> Any:
        nonlocal counted
        counted += 1
        return await count(app)

    monkeypatch.setattr(type(open_api.app), "queues", queues)
    monkeypatch.setattr(open_api.app._app, "clock", clock)
    for _ in range(10):
        visitor.open_page()
        visitor.open_page("/jobs")
    assert counted == 1
    clock.advance(2.1)
    visitor.open_page("/queues")
    assert counted == 2
    visitor.act("/queues/mail/pause")
    assert "Resume" in visitor.open_page("/queues")
    assert counted == 3


def test_refreshes_of_all_sessions_are_rendered_once(
    open_api: Api, visitor: Visitor, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, clock, listed = make_world(open_api), ManualClock(), 0
    find = SqliteQuery.find

    async def count_find(store: Any, *given: Any, **named: Any) -> Any:
        nonlocal listed
        listed += 1
        return await find(store, *given, **named)

    monkeypatch.setattr(SqliteQuery, "find", count_find)
    monkeypatch.setattr(open_api.app._app, "clock", clock)
    other, limited = Visitor(open_api), Visitor(open_api)
    other.sign_in(keys.make("admin"))
    limited.sign_in(keys.make("admin", queues=("mail",)))
    pages = [each.open_page("/jobs?state=dead", **LIVE) for each in (visitor, visitor, other)]
    assert (listed, world.dead in pages[0]) == (1, True)
    forms = [each.open_page("/queues", **LIVE) for each in (visitor, visitor, other)]
    tokens = [re.findall(r'name="token" value="([0-9a-f]{64})"', page) for page in forms]
    assert [set(each) for each in tokens] == [{visitor.token()}, {visitor.token()}, {other.token()}]
    assert "Sign out" not in pages[0]
    before = listed
    limited.open_page("/jobs?state=dead", **LIVE)
    assert listed == before + 1  # other rights
    clock.advance(3.1)
    other.open_page("/jobs?state=dead", **LIVE)
    assert listed == before + 2


def test_own_change_shows_in_the_next_refresh_and_a_visit_is_never_shared(open_api: Api, visitor: Visitor) -> None:
    world = make_world(open_api)
    path = f"/jobs/{world.dead}"
    assert "Replay" in visitor.open_page(path, **LIVE)
    open_api.post(f"/v1/jobs/{world.dead}/replay", {})
    assert 'class="state queued"' in visitor.open_page(path)
    assert 'class="state queued"' not in visitor.open_page(path, **LIVE)
    visitor.act(f"{path}/cancel")
    assert 'class="state cancelled"' in visitor.open_page(path, **LIVE)


def test_reads_that_a_change_overtakes_are_not_kept(open_api: Api) -> None:
    refreshes, texts = SharedRefreshes(open_api.app), iter(["old", "new"])

    async def render() -> ApiResponse:
        text = next(texts)
        if text == "old":
            refreshes.forget_answers()
        return ApiResponse(200, text.encode())

    answers = [open_api.run(refreshes.find_answer("page", render, "")).body for _ in range(3)]
    assert answers == [b"old", b"new", b"new"]

    async def count(app: Any) -> int:
        counts.append(len(counts))
        if len(counts) == 1:
            cached.forget_value()
        return counts[-1]

    counts: list[int] = []
    cached = CachedRead(open_api.app, count)
    assert [open_api.run(cached.read_value()) for _ in range(3)] == [0, 1, 1]


def test_read_that_fails_fails_once_for_all_that_wait_for_it(open_api: Api) -> None:
    reads = 0

    async def fail(app: Any) -> int:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        raise Unavailable("the store is away")

    async def read_at_once() -> list[Any]:
        return await asyncio.gather(*(cached.read_value() for _ in range(5)), return_exceptions=True)

    cached = CachedRead(open_api.app, fail)
    for number in (1, 2):
        assert [type(each) for each in open_api.run(read_at_once())] == [Unavailable] * 5
        assert reads == number


def test_search_that_takes_too_long_is_a_page_with_a_remedy(
    open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world(open_api)

    async def fail(*_: Any, **__: Any) -> Any:
        raise TooBroad(1.0)

    monkeypatch.setattr(SqliteQuery, "find", fail)
    assert "The search took too long" in visitor.open_page("/jobs?error=x", 422)
    page = visitor.open_page("/workers")
    assert ("worker-1" in page, "at most the latest 200" in page) == (True, True)
    assert ("process 7, version 2.4.1" in page, "90 MiB" in page) == (True, True)


def test_search_that_finds_little_in_time_says_that_it_goes_on(
    open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searches, "FIRST_PART", 1)
    monkeypatch.setattr(jobs, "_SEARCH_FOR", 0.0)
    job_id = open_api.submit(queue="rare")["id"]
    for _ in range(3):
        open_api.submit()

    page, pages = visitor.open_page("/jobs?queue=rare"), 1
    while job_id not in page:
        assert "None of the jobs looked at so far matches." in page
        [following] = re.findall(r'href="/console(/jobs\?[^"]*)" rel="next"', page)
        page, pages = visitor.open_page(unescape(following)), pages + 1

    assert pages > 1
    assert "None of the jobs" not in page
    assert "No job matches these filters." in visitor.open_page("/jobs?queue=rare&state=dead")


def test_queues_are_paged_by_name(open_api: Api, visitor: Visitor) -> None:
    for number in range(103):
        open_api.submit(queue=f"q{number:03}")
    first = visitor.open_page("/queues")
    [following] = re.findall(r'rel="next" href="/console(/queues[^"]*)"', first)
    second = visitor.open_page(following)
    assert [len(re.findall(r'id="queue-', page)) for page in (first, second)] == [100, 3]
    assert "91 more queues" in visitor.open_page()


def test_job_is_found_by_id_and_by_key(open_api: Api, visitor: Visitor) -> None:
    job = open_api.submit(key="order 7/ä")
    for named in (job["id"], "order 7/ä", "key:order 7/ä"):
        answer = visitor.ask("GET", "/jobs", params={"job": named}, follow_redirects=True)
        assert job["id"] in answer.text


def test_job_is_found_by_a_key_that_looks_like_an_id(open_api: Api, visitor: Visitor) -> None:
    key = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"
    job = open_api.submit(key=key)["id"]
    assert visitor.ask("GET", f"/jobs?job={key}").headers["location"] == f"/console/jobs/key:{key}"
    assert job in visitor.open_page(f"/jobs/key:{key}")
    assert visitor.ask("GET", f"/jobs?job={job}").headers["location"] == f"/console/jobs/{job}"


def test_job_page_has_what_there_is(open_api: Api, visitor: Visitor) -> None:
    world = make_world(open_api, "what happened")
    dead = visitor.open_page(f"/jobs/{world.dead}")
    for text in ("Why it is dead", "Traceback\nwhat happened", "Attempt 1", "red", "what happened", "Replay"):
        assert text in dead
    assert "what happened" in visitor.open_page(f"/jobs/{world.running}").partition("Log</h2>")[2]


def test_latest_lines_of_a_long_log_are_one_step_away(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit()["id"]
    page = visitor.open_page(f"/jobs/{job_id}?lines=latest")
    assert ("First lines" in page, "Latest lines of the log" in page) == (True, True)
    open_api.run(_attempt_with_lines(open_api, job_id, 1100))
    page = visitor.open_page(f"/jobs/{job_id}")
    assert (_shown_lines(page)[0], len(_shown_lines(page))) == ("line 1", 200)
    for _ in range(5):  # attempts without a line: an attempt that logs nothing hides none
        [latest] = re.findall(r'href="/console(/jobs/[^"]*)#log">Latest lines', page)
        newest = visitor.open_page(latest)
        assert _shown_lines(newest) == [f"line {number}" for number in range(901, 1101)]
        assert ("Later lines" in newest, f'href="/console/jobs/{job_id}#log">First lines' in newest) == (False, True)
        open_api.post(f"/v1/jobs/{job_id}/replay", {})
        open_api.run(_attempt_with_lines(open_api, job_id, 0))
    open_api.post(f"/v1/jobs/{job_id}/replay", {})
    open_api.run(_attempt_with_lines(open_api, job_id, 3))
    assert _shown_lines(visitor.open_page(latest)) == ["line 1", "line 2", "line 3"]


async def _attempt_with_lines(api: Api, job_id: str, count: int) -> None:
    """Runs a job, which logs so many lines and is dead."""
    job = await api.claim(job_id)
    queueing = (await api.app.open_store()).queueing
    lines = [NewLine(number, timedelta(0), "info", f"line {number}") for number in range(1, count + 1)]
    assert not lines or await queueing.append_logs([LogBatch(job.lease, lines)]) == [True]
    failed = Failed(error="it broke", retryable=False)
    await queueing.settle([decide(job, failed, Retry.fixed(3600), random.Random(0))])


def _shown_lines(page: str) -> list[str]:
    return re.findall(r'<span class="words">(line \d+)</span>', page)


def test_attempt_shows_how_it_ended_and_not_the_state_of_its_job(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit()["id"]
    open_api.run(open_api.end(job_id, Lost()))
    open_api.run(open_api.end(job_id, Failed(error="no")))
    page = visitor.open_page(f"/jobs/{job_id}")
    failed, crashed = re.findall(r"<summary>(Attempt .*?)</summary>", page)
    assert ("failed" in failed, "queued" in crashed) == (True, False)


def test_hidden_fields_are_hidden_here_too(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path), redacted=["payload.to", "error"]) as api:
        api._client.headers["x-api-key"] = keys.spare
        job_id = api.submit(payload={"to": "ada@example.org"})["id"]
        dead = api.dead("ada@example.org failed", payload={"to": "ada@example.org"})
        visitor = Visitor(api)
        visitor.sign_in(keys.spare)
        pages = [visitor.open_page(path) for path in ("/jobs", f"/jobs/{job_id}", f"/jobs/{dead}")]
        assert [text for text in ("ada@", "<textarea") if text in "".join(pages)] == []
        assert visitor.ask("GET", "/jobs?error=ada").status_code == 403


def test_all_links_keep_the_prefix_of_a_mounted_api(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path)) as api:
        api._client.headers["x-api-key"] = keys.spare
        world = make_world(api)
        site = Starlette(routes=[Mount("/ünser/queue", api.served)])
        visitor = Visitor(api, prefix="/%C3%BCnser/queue", site=site)
        answer = visitor.sign_in(keys.spare, "/queues")
        assert answer.headers["location"] == "/%C3%BCnser/queue/console/queues"
        assert "Path=/%C3%BCnser/queue/console;" in answer.headers["set-cookie"]
        for path in (*PAGES, f"/jobs/{world.dead}"):
            visitor.open_page(path)
        assert visitor.act("/queues/mail/pause") == "/queues?notice=queue_paused"
        assert visitor.ask("GET", "/static/console.css").status_code == 200


def test_store_that_is_away_is_said_and_comes_back(
    open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise Unavailable("connection refused to db.internal")

    with monkeypatch.context() as away:
        away.setattr(type(open_api.app), "open_store", fail)
        for path in ("", "/jobs", "/queues", "/schedules"):
            page = visitor.open_page(path, 503)
            assert ("The store does not answer" in page, "hx-get" in page, "db.internal" in page) == (True, True, False)
        assert visitor.send("/queues/mail/pause", token="0" * 64).status_code == 403
    visitor.open_page()


def test_static_files_are_kept_by_browsers_and_no_others_served(visitor: Visitor) -> None:
    page = visitor.open_page()
    for name, kind in {
        "console.css": "text/css",
        "console.js": "text/javascript",
        "htmx.min.js": "text/javascript",
    }.items():
        assert f"/console/static/{name}?v={asset_version(name)}" in page
        answer = visitor.ask("GET", f"/static/{name}?v={asset_version(name)}")
        assert answer.headers["content-type"].startswith(kind)
        assert "immutable" in answer.headers["cache-control"]
        for version in ("", "?v=0123456789ab", "?v="):
            other = visitor.ask("GET", f"/static/{name}{version}")
            assert (other.status_code, other.headers["cache-control"]) == (200, "no-cache")
    for path in ("/static/LICENSE.htmx", "/static/..%2Fsite.py", "/static/", "/static/console.css/x"):
        assert visitor.ask("GET", path).status_code == 404


def test_assets_are_small(visitor: Visitor) -> None:
    names = ("console.css", "console.js", "htmx.min.js", "idiomorph-ext.min.js", "icon.svg")
    size = sum(len(gzip.compress(visitor.ask("GET", f"/static/{name}").content)) for name in names)
    assert size < 150_000


def test_other_methods_are_refused(visitor: Visitor) -> None:
    assert visitor.ask("PUT", "/jobs").status_code == 405
    assert visitor.ask("DELETE", "/sign-in").status_code == 405
    head = visitor.ask("HEAD", "/jobs")
    assert (head.status_code, head.content) == (200, b"")


def test_unexpected_error_is_a_page_without_details(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("holdfast.web.console.visit.CachedRead.read_value", fail)
    page = visitor.open_page("/queues", 500)
    assert ("Something went wrong" in page, "secret" in page) == (True, False)


def test_names_of_schedules_and_workers_lead_to_them(world: World, visitor: Visitor) -> None:
    assert 'href="/console/schedules/nightly"' in visitor.open_page()
    assert 'href="/console/jobs?worker=worker-1"' in visitor.open_page(f"/jobs/{world.running}")


def test_times_have_a_date_and_pages_name_their_zone(world: World, open_api: Api, visitor: Visitor) -> None:
    at = open_api.get(f"/v1/jobs/{world.running}/lines")["lines"][0]["at"]
    page = visitor.open_page(f"/jobs/{world.running}")
    assert f">{at[:10]} {at[11:23]}</time>" in page
    assert all("Times without a zone are in UTC" in text for text in (page, visitor.open_page("/errors")))
