"""GET /v1/jobs and what hangs below it: one job, its story, pages, reasons."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.ids import as_ulid
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.lifecycle import Failed, Succeeded
from holdfast.core.steps import NewStep
from holdfast.core.workers import WorkerHeartbeat
from tests.web.client import UNKNOWN_ID, Api


def test_a_job_is_found_by_uuid_ulid_and_key(api: Api) -> None:
    job = api.submit(key="a/b c:d")
    spellings = (job["id"], job["id"].upper(), as_ulid(job["id"]), "key:a%2Fb%20c:d")
    assert {api.get(f"/v1/jobs/{each}")["id"] for each in spellings} == {job["id"]}


@pytest.mark.parametrize(
    ("reference", "status"),
    [
        (UNKNOWN_ID, 404),
        ("key:nobody", 404),
        ("not-a-uuid", 422),
        ("key:", 422),
        ("key:%00", 422),
        ("key:%0a", 422),
        ("%00", 422),
        ("%ff%fe", 422),
        ("%2e%2e%2fetc", 422),
        ("x" * 4000, 422),
        ("", 404),
        (f"{UNKNOWN_ID}/", 404),
    ],
)
def test_unknown_job_differs_from_an_unknown_path(api: Api, reference: str, status: int) -> None:
    api.refused("GET", f"/v1/jobs/{reference}", status)


def test_the_story_has_result_and_attempts(api: Api) -> None:
    job_id = api.submit(max_attempts=2)["id"]
    api.run(api.end(job_id, Failed(error="no route", traceback="Traceback …", retryable=True)))
    story = api.get(f"/v1/jobs/{job_id}")
    assert (story["state"], story["attempts"], story["failures"], story["error"]) == ("failed", 1, 1, "no route")
    (attempt,) = story["history"]
    assert (attempt["state"], attempt["error"], attempt["traceback"]) == ("failed", "no route", "Traceback …")
    assert (attempt["worker"], story["worker"]) == ("worker-1", "worker-1")
    done = api.submit()["id"]
    api.succeed(done, '{"sent": true}')
    story = api.get(f"/v1/jobs/{done}")
    assert (story["state"], story["result"], story["history"]) == ("succeeded", {"sent": True}, [])
    assert story["started_at"] <= story["ended_at"]


def test_steps_come_in_pages(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit()["id"]
    path = f"/v1/jobs/{job_id}/steps"
    assert api.get(path) == {"steps": [], "after": None, "progress": None, "state": None}

    async def save() -> None:
        store, lease = await api.app.open_store(), (await api.claim(job_id)).lease
        results = [None, '{"cents":5}', '"' + "x" * 2000 + '"', "[]"]
        steps = [NewStep(lease, f"s{number}", number, True, result) for number, result in enumerate(results, 1)]
        assert await store.workflow.save_steps(steps) == [True] * 4

    api.run(save())
    first = api.get(path, limit=2)
    assert [(each["name"], each["number"], each["result"]) for each in first["steps"]] == [
        ("s1", 1, None),
        ("s2", 2, {"cents": 5}),
    ]
    assert first["after"] == 2
    rest = api.get(path, after=2)
    assert ([each["name"] for each in rest["steps"]], rest["after"]) == (["s3", "s4"], None)
    monkeypatch.setattr("holdfast.web.jobs._MAX_PAGE_SIZE", 1000)
    assert api.get(path)["after"] == 3  # a page of large results ends early
    assert api.refused("GET", path, 422, params={"limit": 0})["field"] == "limit"
    assert api.refused("GET", path, 422, params={"after": "x"})["field"] == "after"
    api.refused("GET", f"/v1/jobs/{UNKNOWN_ID}/steps", 404)


def test_log_lines_come_in_pages(api: Api) -> None:
    job_id = api.submit()["id"]
    job = api.run(api.claim(job_id))
    given = [NewLine(n, timedelta(0), "info", f"line {n}", {2: '{"n":2}'}.get(n)) for n in (1, 2, 3)]

    async def append() -> list[bool]:
        return await (await api.app.open_store()).queueing.append_logs([LogBatch(job.lease, given)])

    assert api.run(append()) == [True]

    page = api.get(f"/v1/jobs/{job_id}/lines?limit=2")

    assert [(line["text"], line["fields"]) for line in page["lines"]] == [("line 1", None), ("line 2", {"n": 2})]
    assert {(line["attempt"], line["claims"], line["level"]) for line in page["lines"]} == {(1, 1, "info")}
    rest = api.get(f"/v1/jobs/{job_id}/lines?cursor={page['cursor']}")
    assert ([line["text"] for line in rest["lines"]], rest["cursor"]) == (["line 3"], None)
    assert api.get(f"/v1/jobs/{api.submit()['id']}/lines") == {"lines": [], "cursor": None}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{UNKNOWN_ID}/lines", 404),
        ("key:nobody/lines", 404),
        ("x/lines", 422),
        ("{}/lines?limit=0", 422),
        ("{}/lines?limit=1001", 422),
        ("{}/lines?cursor=x", 422),
        ("{}/lines?cursor=1-", 422),
        ("{}/lines?level=info", 422),
    ],
)
def test_logs_of_an_unknown_cursor_are_refused(api: Api, path: str, status: int) -> None:
    api.refused("GET", f"/v1/jobs/{path.format(api.submit()['id'])}", status)


def test_waiting_answers_when_the_job_ends(api: Api) -> None:
    job_id = api.submit()["id"]

    async def wait_and_end() -> dict[str, Any]:
        waiting = asyncio.create_task(api.send("GET", f"/v1/jobs/{job_id}?wait=60"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await api.end(job_id, Succeeded(result="42"))
        document: dict[str, Any] = (await waiting).json()
        return document

    assert api.run(wait_and_end())["result"] == 42


def test_wait_that_times_out_returns_the_current_job(api: Api) -> None:
    job_id = api.submit()["id"]
    assert api.get(f"/v1/jobs/{job_id}", wait=1)["state"] == "queued"
    for wrong in ("61", "-1", "1e9", "soon", ""):
        assert api.refused("GET", f"/v1/jobs/{job_id}?wait={wrong}", 422)["field"] == "wait"


def test_pages_are_newest_first_and_meet_every_job_once(api: Api) -> None:
    ids = [api.submit(tags=["page"])["id"] for _ in range(5)]
    api.submit(queue="other")
    met: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = api.get("/v1/jobs", limit=2, tag="page", **cursor)
        assert len(page["jobs"]) <= 2
        met += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        cursor = {"cursor": page["cursor"]}
    assert met == ids[::-1]


def test_a_page_of_long_payloads_ends_early_and_goes_on(api: Api) -> None:
    jobs = [{"task": "work", "payload": {"n": number, "x": "y" * 200_000}} for number in range(110)]
    for start in range(0, 110, 22):
        api.post("/v1/jobs/batch", {"jobs": jobs[start : start + 22]}, 201)
    pages, cursor = [], None
    while cursor is not None or not pages:
        page = api.get("/v1/jobs", limit=500, **({"cursor": cursor} if cursor else {}))
        pages.append([job["payload"]["n"] for job in page["jobs"]])
        cursor = page["cursor"]
    assert [len(page) for page in pages] == [50, 50, 10]
    assert [n for page in pages for n in page] == list(range(109, -1, -1))


def test_filters_must_all_match(api: Api) -> None:
    dead = api.dead(error="connection refused by host", task="mail.send", queue="mail")
    other = api.submit(task="report", queue="mail")["id"]

    def found(**query: Any) -> set[str]:
        return {job["id"] for job in api.get("/v1/jobs", **query)["jobs"]}

    assert found() == {dead, other}
    assert found(state="dead") == found(reason="error") == found(error="refused by") == {dead}
    assert (
        found(state=["dead", "queued"]) == found(task=["mail.send", "report"]) == found(queue="mail") == {dead, other}
    )
    assert found(state="queued", task="mail.send") == set()
    assert found(worker="worker-1", since="1h") == {dead}
    assert found(until="1h") == found(since="2199-01-01T00:00:00Z") == set()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=501", "limit"),
        ("limit=1e9", "limit"),
        ("limit=abc", "limit"),
        ("limit=999999999999999999999", "limit"),
        ("limit=1&limit=2", "limit"),
        ("cursor=forged", "cursor"),
        ("cursor=", "cursor"),
        ("cursor=-1", "cursor"),
        ("state=gone", "state"),
        ("status=dead", "status"),
        ("queue=a/b", "queue"),
        ("queue=%2e%2e", "queue"),
        ("tag=%00", "tag"),
        ("tag=%ff", "query"),
        ("since=yesterday", "since"),
        ("since=1h&until=2h", "since"),
        ("since=2030-01-31T08:00:00Z&until=2030-01-31T09:00:00%2B01:00", "since"),
        ("since=2024-02-30T00:00:00Z", "since"),
        ("error=" + "(a%2B)" * 2000, "error"),
        ("filter=(a%2B)%2B%24", "filter"),
        ("&".join("state=dead" for _ in range(101)), "query"),
    ],
    ids=lambda text: text[:24],
)
def test_a_wrong_query_is_refused_and_named(api: Api, query: str, field: str) -> None:
    assert api.refused("GET", f"/v1/jobs?{query}", 422)["field"] == field


def test_why_explains_what_delays_a_job(api: Api) -> None:
    job_id = api.submit(queue="mail")["id"]
    api.post("/v1/queues/mail/pause")
    answer = api.get(f"/v1/jobs/{job_id}/why")
    assert (answer["id"], answer["state"]) == (job_id, "queued")
    assert {reason["code"] for reason in answer["reasons"]} == {"paused", "no_worker"}
    api.refused("GET", f"/v1/jobs/{UNKNOWN_ID}/why", 404)


async def _other() -> None:
    """A task that no job of the test names."""


@pytest.mark.parametrize(("registered", "codes"), [(False, ["next"]), (True, ["handler_unknown", "next"])])
def test_why_leaves_open_which_tasks_a_worker_has(home: str, registered: bool, codes: list[str]) -> None:
    with Api(home, app="shop.jobs:app") as api:
        if registered:
            api.app.task("other")(_other)
        job_id = api.submit()["id"]
        heartbeat = WorkerHeartbeat(worker="w-1", host="elsewhere", pid=1, queues="*", concurrency=2)

        async def beat() -> None:
            await (await api.app.open_store()).queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=1))

        api.run(beat())
        assert [reason["code"] for reason in api.get(f"/v1/jobs/{job_id}/why")["reasons"]] == codes
