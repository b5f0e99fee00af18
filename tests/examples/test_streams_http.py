"""The `streams` example over HTTP: gateway, services, statuses, dead letters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from fastapi import HTTPException

from tests.examples.common import PATIENCE, until
from tests.examples.readme import free_ports
from tests.examples.streams_support import SERVICES, Service, Site, Streams
from tests.support.plain_http import PLAIN

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
UNKNOWN = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"


@contextmanager
def paused(service: Service) -> Iterator[None]:
    """Keeps workers from the queue `default` of a service while this lasts."""
    service.app.sync.pause("default")
    try:
        yield
    finally:
        service.app.sync.resume("default")


@pytest.mark.rows("S10", "S63")
def test_gateway_and_services_answer_health(streams: Streams) -> None:
    for name in ("gateway", *SERVICES):
        assert streams.call(name, "GET", "/health") == {"status": "ok", "service": name}
        assert httpx.get(f"{streams.urls[name]}/docs", timeout=PATIENCE, verify=PLAIN).is_success


@pytest.mark.rows("S36")
def test_job_that_waits_for_another_has_no_next_run(streams: Streams) -> None:
    service = streams.notifications
    with paused(service):
        first = service.app.sync.enqueue("test.job", {}, key=str(uuid4()))
        second = service.app.sync.enqueue("test.job", {}, key=str(uuid4()), after=first.id)
        before, waiting = (streams.call("notifications", "GET", f"/jobs/{each.id}") for each in (first, second))
    assert (before["status"], before["next_run_at"] is None) == ("pending", False)
    assert (waiting["status"], waiting["next_run_at"]) == ("pending", None)
    assert streams.wait_for_status(second.id, "completed")["next_run_at"] is None


@pytest.mark.rows("S1", "S3", "S4", "S18", "S64")
def test_user_is_created_asynchronously_through_the_gateway(streams: Streams) -> None:
    """Two services with a stream and a database of their own take part; the client talks to the gateway alone."""
    email = f"{uuid4()}@example.com"
    row = "select status from users where email = %s"
    with paused(streams.users):
        answer = streams.client.post("/users", json={"email": email, "name": "Ada"})
        job_id = answer.json()["job_id"]
        assert (answer.status_code, answer.json()) == (202, {"job_id": job_id, "status": "accepted", "created": True})
        assert streams.status(job_id) == "pending"
        assert streams.users.sql(row, email) == []
    job = streams.wait_for_status(job_id, "completed")
    assert streams.users.value(row, email) == "active"
    welcome = streams.wait_for_status(job["result"]["welcome_job_id"], "completed")
    assert (job["service"], welcome["service"]) == SERVICES
    assert streams.notifications.value("select count(*) from deliveries where email = %s", email) == 1
    assert [call["status"] for call in streams.calls(welcome["job_id"])] == [201]
    assert len({service.url for service in streams.services.values()}) == 2
    assert [service.redis.type(service.key) for service in streams.services.values()] == ["stream", "stream"]


def test_same_idempotency_key_creates_one_user(streams: Streams) -> None:
    user = {"email": f"{uuid4()}@example.com", "name": "Ada"}
    headers = {"Idempotency-Key": str(uuid4())}
    first, second = (streams.client.post("/users", json=user, headers=headers).json() for _ in range(2))
    assert (first["created"], second) == (True, {**first, "created": False})
    job = streams.client.get(f"/jobs/{first['job_id']}").json()
    assert job["idempotency_key"] == headers["Idempotency-Key"]


@pytest.mark.rows("S65")
def test_status_progresses_from_pending_to_its_end(streams: Streams, tmp_path: Path) -> None:
    door = tmp_path / "open"
    with paused(streams.notifications):
        job_id = streams.notifications.submit(until=str(door))
        assert streams.status(job_id) == "pending"
    streams.wait_for_status(job_id, "processing")
    door.touch()
    assert streams.wait_for_status(job_id, "completed")["attempt_count"] == 1
    failing = streams.notifications.submit(fail=9, error="value")
    assert streams.wait_for_status(failing, "failed")["error"] == "ValueError: as the test wants it"
    unknown = streams.client.get(f"/jobs/{UNKNOWN}")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": f"job_id: no service has a job {UNKNOWN}"})


@pytest.mark.rows("S28")
def test_raw_job_without_key_is_refused(streams: Streams) -> None:
    body = {"type": "test.job", "payload": {}}
    refused = streams.call("notifications", "POST", "/jobs", body, status=422)
    assert refused["detail"] == "idempotency_key: None is missing; give each job a key of its own"
    with free_ports(1) as (port,):
        variables = streams.environment("notifications", HOLDFAST_KEY_REQUIRED="false")
        with Site("streams.notifications.api:site", int(port), streams.folder, variables) as site:
            site.wait_healthy()
            answer = httpx.post(f"http://127.0.0.1:{port}/jobs", json=body, timeout=PATIENCE, verify=PLAIN)
    assert answer.status_code == 202
    job = streams.notifications.job(answer.json()["job_id"])
    assert job.key is not None


@pytest.mark.rows("S17")
def test_job_type_selects_the_handler(streams: Streams) -> None:
    payload = {"email": f"{uuid4()}@example.com", "template": "news"}
    first = {"type": "notification.send", "payload": payload, "idempotency_key": str(uuid4())}
    second = {"type": "test.job", "payload": {}, "idempotency_key": str(uuid4())}
    jobs = [streams.call("notifications", "POST", "/jobs", each, status=202)["job_id"] for each in (first, second)]
    streams.notifications.all_ended(jobs)
    assert streams.notifications.effects(*jobs) == {jobs[1]: 1}
    delivered = streams.notifications.sql("select email from deliveries where job_id = any(%s::uuid[])", jobs)
    assert delivered == [(payload["email"],)]


@pytest.mark.rows("S9", "S36", "S38")
def test_dead_letters_are_listed(streams: Streams) -> None:
    email = f"{uuid4()}@refused.example"
    job = streams.wait_for_status(streams.create_user(email), "completed")
    welcome = job["result"]["welcome_job_id"]
    streams.wait_for_status(welcome, "failed")
    until(lambda: welcome in streams.notifications.dead_letters(), "the entry in the stream of dead letters")
    assert streams.notifications.redis.type(streams.notifications.dead_key) == "stream"
    assert welcome not in streams.users.dead_letters()
    listed = streams.client.get("/dlq/notifications")
    (found,) = [each for each in listed.json()["jobs"] if each["job_id"] == welcome]
    assert (listed.status_code, found["attempt_count"], found["reason"]) == (200, 1, "non_retryable")
    assert found["payload"] == {"email": email, "template": "welcome"}
    assert "answered 422" in found["error"]
    assert welcome not in [each["job_id"] for each in streams.client.get("/dlq/users").json()["jobs"]]
    unknown = streams.client.get("/dlq/payments")
    assert unknown.status_code == 404
    assert unknown.json()["detail"] == "service_name: 'payments' is not known; there are users, notifications"


@pytest.mark.rows("S39")
def test_replayed_dead_letter_runs_with_a_fresh_budget(streams: Streams) -> None:
    payload = {"email": f"{uuid4()}@refused.example", "template": "news"}
    job_id = streams.notifications.submit("notification.send", **payload)
    streams.wait_for_status(job_id, "failed")
    until(lambda: job_id in streams.notifications.dead_letters(), "the dead letter")
    with streams.provider(refused_domains=[]):
        replayed = streams.client.post(f"/dlq/notifications/{job_id}/replay")
        assert (replayed.status_code, replayed.json()["job_id"]) == (202, job_id)
        job = streams.wait_for_status(job_id, "completed")
    assert (job["attempt_count"], job["max_attempts"]) == (1, 5)
    assert job_id not in [each["job_id"] for each in streams.client.get("/dlq/notifications").json()["jobs"]]
    until(lambda: job_id not in streams.notifications.dead_letters(), "the end of the dead letter")
    again = streams.client.post(f"/dlq/notifications/{job_id}/replay")
    assert (again.status_code, again.json()["detail"]) == (
        409,
        f"job {job_id} is succeeded, not dead; only dead letters are replayed",
    )
    for path in (f"/dlq/notifications/{UNKNOWN}/replay", f"/dlq/payments/{job_id}/replay"):
        assert streams.client.post(path).status_code == 404


@pytest.mark.rows("S37")
def test_job_without_handler_is_dead_at_once(streams: Streams) -> None:
    """A malformed body too: one that does not fit its handler, one that is no object, an entry without a job id."""
    service = streams.notifications
    body = {"type": "no.handler", "payload": {"kept": True}, "idempotency_key": str(uuid4())}
    unknown = streams.call("notifications", "POST", "/jobs", body, status=202)["job_id"]
    deep = json.loads("[" * 300 + "]" * 300)
    payloads = [{"fail": "often"}, {"other": 1}, [1, 2], 5, "x", None, deep]
    drafts = [{"task": "test.job", "payload": each} for each in payloads]
    unfit = [str(row[0]) for row in service.sql("select id from holdfast.submit(%s::jsonb)", json.dumps(drafts))]
    service.all_ended([unknown, *unfit], "dead")
    reasons = [(service.job(job_id).reason, service.job(job_id).attempts) for job_id in (unknown, *unfit)]
    assert reasons == [("no_handler", 1), *[("payload", 1)] * len(payloads)]
    until(lambda: {unknown, *unfit} <= set(service.dead_letters()), "the dead letters")
    listed = {each["job_id"]: each for each in streams.client.get("/dlq/notifications").json()["jobs"]}
    assert listed[unknown]["payload"] == {"kept": True}
    assert [listed[job_id]["payload"] for job_id in unfit] == [*payloads[:-1], json.dumps(deep)]
    assert service.executions(*unfit) == {}
    service.redis.xadd(service.key, {"order": "7"})
    until(lambda: service.redis.exists(f"{service.key}@malformed"), "the malformed entry")
    assert service.redis.xrevrange(f"{service.key}@malformed", count=1)[0][1]["order"] == "7"


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (r'{"email": "a@b.co", "name": "\ud800"}', 422, "body.name: a text is not valid; it holds a lone surrogate"),
        ('{"email": NaN, "name": "x"}', 422, "body: NaN is not valid"),
        (r'{"email": "a@b.co", "name": "x\u0000"}', 422, "name: 'x\\x00' is not valid; give text without NUL"),
        (r'{"email": "\u0000@b.co", "name": "x"}', 422, "email: '\\x00@b.co' is not valid; give text without NUL"),
        ('{"email": "a@b.co", "name": "x", "admin": true}', 422, "admin: True is not valid"),
        ('{"email": "a@b.co", "name": 7}', 422, "name: 7 is not valid"),
        ('{"email": "a@b.co", "name": "' + "x" * 2**21 + '"}', 413, "the body is over 1,048,576 bytes"),
    ],
    ids=["surrogate", "nan", "nul-in-name", "nul-in-email", "unknown-field", "number", "too-long"],
)
def test_gateway_refuses_a_body_in_one_line(streams: Streams, body: str, status: int, detail: str) -> None:
    refused = streams.client.post("/users", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == status
    assert refused.json()["detail"].startswith(detail)
    assert len(refused.content) < 1000


def test_gateway_passes_on_when_to_try_again() -> None:
    from streams.gateway import read_answer

    refusal = httpx.Response(503, json={"detail": "the store does not answer"}, headers={"Retry-After": "7"})
    with pytest.raises(HTTPException) as passed:
        read_answer(refusal)
    assert (passed.value.status_code, passed.value.detail) == (503, "the store does not answer")
    assert passed.value.headers == {"Retry-After": "7"}


def test_gateway_refuses_a_wrong_query_in_one_line(streams: Streams) -> None:
    refused = streams.client.get("/dlq/users", params={"limit": "x"})
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("limit: 'x' is not valid; input should be a valid integer")


@pytest.mark.parametrize("name", ["gateway", *SERVICES])
def test_page_of_an_application_may_load_its_scripts(streams: Streams, name: str) -> None:
    page = httpx.get(f"{streams.urls[name]}/docs", timeout=PATIENCE, verify=PLAIN)
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    scripts = re.findall(r'src="([^"]+)"', page.text)
    assert scripts
    for script in scripts:
        assert httpx.get(f"{streams.urls[name]}/{script}", timeout=PATIENCE, verify=PLAIN).is_success
    assert "/health" in streams.call(name, "GET", "/openapi.json")["paths"]
