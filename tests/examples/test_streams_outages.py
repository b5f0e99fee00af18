"""The `streams` example while its databases, services and workers are stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from tests.examples.common import until
from tests.examples.streams_support import SERVICES, Streams
from tests.support.load import percentile, slowness
from tests.support.postgres import Postgres
from tests.support.redis import Redis

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    """The example without workers, on two PostgreSQL and a Redis that tests may stop and start again."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Postgres()) for name in SERVICES}
        redis = stack.enter_context(Redis())
        yield stack.enter_context(Streams(tmp_path_factory.mktemp("mortal"), servers, redis))


@pytest.mark.rows("S11", "S13")
def test_jobs_are_accepted_without_workers_and_run_without_the_api(mortal: Streams) -> None:
    def submit() -> tuple[str, float]:
        began = time.monotonic()
        return mortal.create_user(), time.monotonic() - began

    mortal.create_user()
    slow = slowness()
    submitted = [submit() for _ in range(40)]
    assert percentile([seconds for _, seconds in submitted], 0.95) < 0.3 * max(slow, slowness())
    job_ids = [job_id for job_id, _ in submitted]
    assert {mortal.status(job_id) for job_id in job_ids} == {"pending"}
    assert set(job_ids) <= set(mortal.users.entries()), "the API has added each to the stream"
    mortal.sites["users"].stop()
    mortal.sites["gateway"].stop()
    try:
        with mortal.worker("users"):
            mortal.users.all_ended(job_ids)
    finally:
        for name in ("users", "gateway"):
            mortal.sites[name].start()
            mortal.sites[name].wait_healthy()


@pytest.mark.rows("S8", "S72")
def test_one_service_goes_on_without_the_database_of_the_other(mortal: Streams) -> None:
    with mortal.worker("users"), mortal.worker("notifications"):
        before = mortal.create_user()
        mortal.wait_for_status(before, "completed")
        interrupted = [mortal.create_user() for _ in range(10)]
        mortal.users.server.stop()
        try:
            refused = mortal.client.post("/users", json={"email": "late@example.com", "name": "Late"})
            assert refused.status_code == 503
            sent = [_send(mortal) for _ in range(5)]
            mortal.notifications.all_ended(sent)
            delivered = "select count(*) from deliveries where job_id = any(%s::uuid[])"
            assert mortal.notifications.value(delivered, sent) == 5
            assert mortal.client.get("/health").json() == {"status": "ok", "service": "gateway"}
            assert mortal.wait_for_status(sent[0], "completed")["service"] == "notifications"
        finally:
            mortal.users.server.start()
        until(lambda: mortal.client.get(f"/jobs/{before}").is_success, "the database, back")
        for job_id in (*interrupted, mortal.create_user()):
            mortal.wait_for_status(job_id, "completed")


def _completed_user(streams: Streams, job_id: str) -> dict[str, Any] | None:
    """Returns the workflow once it is completed. Its next attempt, which may be two minutes away, is due at once."""
    streams.users.make_due(job_id)
    job: dict[str, Any] = streams.client.get(f"/jobs/{job_id}").json()
    return job if job.get("status") == "completed" else None


def _send(streams: Streams) -> str:
    payload = {"email": f"{uuid4()}@example.com", "template": "news"}
    job = {"type": "notification.send", "payload": payload, "idempotency_key": str(uuid4())}
    return str(streams.call("notifications", "POST", "/jobs", job, status=202)["job_id"])


@pytest.mark.rows("S72")
def test_jobs_of_a_stopped_service_wait_for_it(mortal: Streams) -> None:
    """Without `notifications`, users are stored; their workflows wait for it and go on behind the last step."""
    mortal.sites["notifications"].stop()
    try:
        with mortal.worker("users"):
            job_id = mortal.create_user("waits@example.com")
            mortal.users.wait_for(job_id, "failed")
            assert mortal.status(job_id) == "pending"
            news = mortal.notifications.submit("notification.send", email="waits@example.com", template="news")
            assert mortal.users.value("select status from users where email = 'waits@example.com'") == "created"
            assert mortal.client.get("/health").is_success
            stopped = mortal.client.get("/dlq/notifications")
            assert stopped.status_code == 503
            assert stopped.json()["detail"].startswith("service notifications does not answer")
            assert mortal.client.get("/dlq/users").json()["jobs"] == []
            assert mortal.client.get(f"/jobs/{uuid4()}").status_code == 503  # it may be a job of `notifications`
            assert mortal.notifications.job(news).state == "queued"
            mortal.sites["notifications"].start()
            mortal.sites["notifications"].wait_healthy()
            with mortal.worker("notifications"):
                found = until(lambda: _completed_user(mortal, job_id), f"job {job_id} completed")
                welcome = found["result"]["welcome_job_id"]
                mortal.wait_for_status(welcome, "completed")
                mortal.wait_for_status(news, "completed")
        assert mortal.users.value("select count(*) from users where email = 'waits@example.com'") == 1
    finally:
        if mortal.sites["notifications"].process.poll() is not None:
            mortal.sites["notifications"].start()
            mortal.sites["notifications"].wait_healthy()


def test_limit_is_unavailable_while_redis_is_away(mortal: Streams) -> None:
    before = mortal.call("notifications", "GET", "/limit")
    mortal.redis.stop()
    try:
        for method, body in (("GET", None), ("PUT", {"capacity": 10, "refill": 5})):
            detail = mortal.call("notifications", method, "/limit", body, status=503)["detail"]
            assert detail.startswith("Redis, which keeps the limit, does not answer")
    finally:
        mortal.redis.start()
    limit = until(lambda: mortal.call("notifications", "PUT", "/limit", {"capacity": 9, "refill": 3}), "Redis, back")
    assert mortal.call("notifications", "GET", "/limit") == limit
    assert mortal.call("notifications", "PUT", "/limit", before) == before  # else it holds up the other tests
