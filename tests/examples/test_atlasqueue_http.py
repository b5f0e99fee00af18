"""The AtlasQueue example over HTTP, on its real servers. Tests are named by the rows they prove."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import trustme

from tests.examples.atlasqueue_support import DEAD, Api, Atlasqueue, starts
from tests.examples.common import until
from tests.support.load import percentile
from tests.web.test_docs_page_sqlite import open_page

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def api(atlasqueue: Atlasqueue) -> Iterator[Api]:
    """The API, at work; no worker."""
    with atlasqueue.api() as api:
        yield api


# ── submitting ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A2", "A7", "A34", "A62", "A100", "A111")
def test_new_job_is_created_and_its_id_listed(atlasqueue: Atlasqueue, api: Api) -> None:
    answer = api.post("email.send", {"to": "a@b.c"}, key="my-unique-key-001", max_attempts=3)
    assert answer.status_code == 201
    job = answer.json()
    assert str(UUID(job["id"])) == job["id"]
    expected = {"type": "email.send", "status": "queued", "attempts": 0, "max_attempts": 3, "payload": {"to": "a@b.c"}}
    assert {name: job[name] for name in expected} == expected
    for name in ("run_at", "created_at"):
        assert job[name].endswith("Z")
        assert abs((datetime.now(UTC) - datetime.fromisoformat(job[name])).total_seconds()) < 3600
    assert atlasqueue.listed() == [job["id"]]
    assert atlasqueue.sql("select job_id::text, key from idempotency_keys") == [(job["id"], "my-unique-key-001")]
    assert atlasqueue.row(job["id"])["payload"] == {"to": "a@b.c"}
    assert "max_attempts" in api.job(job["id"])
    assert api.post().json()["max_attempts"] == 5
    (reported,) = [line for line in api.events("job_created") if line["job_id"] == job["id"]]
    assert (reported["job_type"], reported["level"]) == ("email.send", "info")


def test_job_that_waits_for_another_has_no_time(atlasqueue: Atlasqueue, api: Api) -> None:
    waiting = atlasqueue.submit(after=atlasqueue.submit())
    job = api.job(waiting)
    assert (job["status"], job["run_at"], atlasqueue.row(waiting)["run_at"]) == ("queued", None, None)


@pytest.mark.rows("A32")
def test_submission_without_a_key_stores_nothing(atlasqueue: Atlasqueue, api: Api) -> None:
    answer = api.post(key=None)
    assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key")
    assert atlasqueue.value("select count(*) from jobs") == 0
    assert atlasqueue.listed() == []


@pytest.mark.rows("A33", "A102", "A112", "X13")
def test_known_key_answers_with_its_job(atlasqueue: Atlasqueue, api: Api) -> None:
    first = api.post(payload={"hello": "world"}, key="my-unique-key-001")
    again = [api.post(payload=payload, key="my-unique-key-001") for payload in ({"hello": "world"}, {})]
    assert [each.status_code for each in (first, *again)] == [201, 200, 200]
    assert [each.json() for each in again] == [first.json()] * 2
    assert atlasqueue.listed() == [first.json()["id"]]


@pytest.mark.rows("A35", "X13")
def test_one_of_64_concurrent_posts_of_a_key_creates(atlasqueue: Atlasqueue) -> None:
    """By two API processes: within one, submissions may share a transaction."""
    with atlasqueue.api() as one, atlasqueue.api() as two, ThreadPoolExecutor(64) as pool:
        barrier = threading.Barrier(64)

        def post(number: int) -> tuple[int, str]:
            barrier.wait(60)
            answer = (one, two)[number % 2].post(key="one")
            return answer.status_code, answer.json()["id"]

        answers = list(pool.map(post, range(64)))
    assert Counter(status for status, _ in answers) == {201: 1, 200: 63}
    assert len({job_id for _, job_id in answers}) == 1
    assert atlasqueue.value("select count(*) from jobs") == 1


GOOD: list[dict[str, Any]] = [
    {"key": "k"},
    {"key": "k" * 512},
    {"job_type": "t" * 128},
    {"max_attempts": 1},
    {"max_attempts": 25},
    {"max_attempts": 2.0},
    {"payload": {}},
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("Idempotency-Key", {"key": "k" * 513}),
    *(("type", {"job_type": wrong}) for wrong in ("", "t" * 129, 5, None, "command")),
    *(("payload", {"payload": wrong}) for wrong in (["x"], "text", 5)),
    *(("max_attempts", {"max_attempts": wrong}) for wrong in (0, 26, 100, "x", 2.5)),
]


@pytest.mark.rows("A106", "A107", "A108", "A109", "A110", "A113")
def test_invalid_requests_are_refused_whole(atlasqueue: Atlasqueue, api: Api) -> None:
    for good in GOOD:
        assert api.post(**good).status_code == 201, good
    for field, bad in BAD:
        answer = api.post(**bad)
        assert (answer.status_code, answer.json()["field"]) == (422, field), bad
        assert answer.json()["remedy"]
    assert api.post("command").json()["detail"].startswith("type: 'command' ")
    for missing in ("type", "payload"):
        body = {"type": "noop", "payload": {}}
        body.pop(missing)
        answer = api.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k1"})
        assert (answer.status_code, answer.json()["field"]) == (422, missing)
    raw: list[tuple[dict[str, Any], int]] = [
        ({"headers": {"Idempotency-Key": ""}, "json": {"type": "noop", "payload": {}}}, 422),
        ({"headers": {"Idempotency-Key": "k2", "Content-Type": "text/plain"}, "content": "{}"}, 415),
        ({"headers": {"Idempotency-Key": "k3", "Content-Type": "application/json"}, "content": "no JSON"}, 422),
    ]
    for given, status in raw:
        assert api.client.post("/v1/jobs", **given).status_code == status
    assert atlasqueue.value("select count(*) from jobs") == len(GOOD)
    assert set(atlasqueue.sql("select max_attempts from jobs")) == {(1,), (2,), (5,), (25,)}


PAYLOADS: list[dict[str, Any]] = [
    {"nested": [{"a": [None, True, -1.5, {"b": []}]}], "": "ü\N{OWL}\u2028\"'\\"},
    {"long": "x" * 100_000},
]


@pytest.mark.rows("A109", "A114", "A115", "A116")
def test_job_is_shown_as_submitted(api: Api) -> None:
    for payload in PAYLOADS:
        answer = api.post(payload=payload)
        shown = api.job(answer.json()["id"])
        assert (answer.json()["payload"], shown["payload"]) == (payload, payload)
        assert answer.json().items() <= shown.items()
    assert api.client.get(f"/v1/jobs/{uuid4()}").status_code == 404
    malformed = api.client.get("/v1/jobs/not-a-uuid")
    assert (malformed.status_code, malformed.json()["code"]) == (422, "invalid")


# ── what else it answers ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A4", "A99")
def test_openapi_document_and_health_answer(api: Api, tmp_path: Path) -> None:
    described = api.client.get("/openapi.json").json()
    operations = [(path, method) for path, methods in described["paths"].items() for method in methods]
    assert operations == [("/v1/jobs", "post"), ("/v1/jobs/{job_id}", "get"), ("/health", "get")]
    assert {"type", "payload", "max_attempts"} <= described["components"]["schemas"]["Submission"]["properties"].keys()
    page = open_page(api.address, tmp_path / "browser", operation="Health-check_health_health_get")
    assert (page["title"], page["operations"], page["status"]) == ("AtlasQueue HTTP API", 3, "200")
    assert [each for each in page["asked"] if not each.startswith((api.address, "data:"))] + page["failed"] == []
    answer = api.client.get("/health")
    assert (answer.status_code, answer.text) == (200, '{"status":"ok","service":"atlasqueue-api"}')


@pytest.mark.rows("A3")
def test_api_serves_https(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    authority = trustme.CA().issue_cert("localhost", "127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    authority.cert_chain_pems[0].write_to_path(certificate)
    authority.private_key_pem.write_to_path(key)
    with atlasqueue.api(HOLDFAST_TLS_CERTIFICATE=str(certificate), HOLDFAST_TLS_KEY=str(key)) as api:
        assert api.address.startswith("https://")
        assert api.post().status_code == 201


# ── with workers ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A1", "A63", "A64", "A65", "A101", "A104", "A124")
def test_client_sees_the_progress_of_jobs(atlasqueue: Atlasqueue, api: Api, tmp_path: Path) -> None:
    with atlasqueue.worker() as worker:
        slow = api.submit("test.wait", {"until": str(tmp_path / "open")})
        until(lambda: api.job(slow)["status"] == "running", "the slow job at work")
        failing = api.submit("test.fail", {"message": "not today"}, max_attempts=2)
        unknown = api.submit("no.handler", max_attempts=2)
        until(lambda: {api.job(each)["status"] for each in (failing, unknown)} == {"dead"}, "the dead letters")
        (tmp_path / "open").touch()
        assert api.client.get(f"/v1/jobs/{slow}", params={"wait": 60}).json()["status"] == "succeeded"
        job = api.job(failing)
        assert (job["attempts"], job["error"]) == (2, "LookupError: not today")
        assert "no.handler" in api.job(unknown)["error"]
        until(lambda: sorted(atlasqueue.listed(DEAD)) == sorted([failing, unknown]), "the list of the dead")
        assert percentile(_seconds(api, 60), 0.95) <= 1.0
    assert starts([worker])[failing] == 2
    with atlasqueue.worker(RETRY_BASE_DELAY_SECONDS="3600"):
        again = api.submit("test.fail")
        until(lambda: api.job(again)["status"] == "failed", "a job that is to be tried again")
        assert api.job(again)["run_at"] > api.job(again)["created_at"]


def _seconds(api: Api, number: int) -> list[float]:
    """Submits jobs one after another. Returns how long each took until its end, by the server's clock."""
    taken = []
    for _ in range(number):
        job = api.client.get(f"/v1/jobs/{api.submit()}", params={"wait": 60}).json()
        ended, created = (datetime.fromisoformat(job[name]) for name in ("ended_at", "created_at"))
        taken.append((ended - created).total_seconds())
    return taken


LOOSE = (
    "select count(*) from jobs j full join idempotency_keys k on k.job_id = j.id where k.key is null or j.id is null"
)


@pytest.mark.rows("A5", "A29")
def test_killed_api_leaves_no_job_without_its_key(atlasqueue: Atlasqueue) -> None:
    """500 submits, by clients that go on with their keys until they get an answer; the API is killed three times."""
    from atlasqueue.client import submit

    reported: dict[str, str] = {}

    def client(number: int) -> None:
        for place in range(number, 500, 10):
            reported[f"key-{place}"] = submit(api.address, "noop", {"place": place}, key=f"key-{place}", within=120)[
                "id"
            ]

    with atlasqueue.api() as api, atlasqueue.worker() as worker, ThreadPoolExecutor(10) as pool:
        clients = [pool.submit(client, number) for number in range(10)]
        for least in (50, 200, 350):
            until(lambda least=least: len(reported) >= least, f"{least} answers")
            api.kill()
            assert atlasqueue.value(LOOSE) == 0
            api.restart()
        for each in clients:
            each.result(120)
        assert dict(atlasqueue.sql("select key, job_id::text from idempotency_keys")) == reported
        assert atlasqueue.value("select count(*) from jobs") == 500
        atlasqueue.all_ended(list(reported.values()))
    assert starts([worker]) == dict.fromkeys(reported.values(), 1)


def test_a_client_gives_up_on_what_cannot_be_right(api: Api) -> None:
    from atlasqueue.client import Refused, submit

    with pytest.raises(Refused, match="max_attempts"):
        submit(api.address, "noop", {}, key="k", max_attempts=26)
