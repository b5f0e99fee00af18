"""The `streams` example's execution guard: a middleware over Redis SET NX."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast import Holdfast, Settings, Unavailable
from tests.examples.common import PATIENCE, until
from tests.examples.programs import Program
from tests.examples.readme import free_ports
from tests.examples.streams_support import Service, Streams, settings_file
from tests.support.plain_http import PLAIN

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


def submit(service: Service, key: str, queue: str = "default", **payload: Any) -> str:
    """Submits a job under this key; returns its id. The job must be new."""
    handle = service.app.sync.enqueue("test.job", payload, key=key, queue=queue)
    assert handle.created
    return str(handle.id)


def guard_key(key: str) -> str:
    """Returns the guard's key in Redis for an idempotency key."""
    return f"notifications:guard:{key}"


@pytest.mark.rows("S7", "S15", "S29", "S31", "S41")
def test_coordination_is_visible_in_redis_while_a_job_runs(streams: Streams, tmp_path: Path) -> None:
    """Idempotency: the guard's key. Lease: the pending entry, beside the row. Retry control: the token bucket."""
    service, key, door = streams.notifications, str(uuid4()), tmp_path / "open"
    with streams.worker("notifications", "visible") as worker:
        job_id = submit(service, key, "visible", until=str(door))
        until(lambda: service.executions(job_id), "the start of the job")
        assert service.redis.get(guard_key(key)) == f"{job_id} running"
        assert 86_000 < service.redis.ttl(guard_key(key)) <= 86_400
        assert f"-{worker.process.pid}-" in service.pending("visible")[job_id]
        job = service.job(job_id)
        assert str(worker.process.pid) in str(job.worker)
        assert job.lease_until is not None
        door.touch()
        service.wait_for(job_id, "succeeded")
        until(lambda: service.redis.get(guard_key(key)) == f"{job_id} done", "the phase done")
    sent = service.submit("notification.send", email=f"{uuid4()}@example.com", template="news")
    service.wait_for(sent, "succeeded")
    assert float(service.redis.hget("notifications:bucket", "tokens") or 0) > 0


@pytest.mark.rows("S30", "S40", "X14")
def test_another_job_with_the_same_key_is_skipped(streams: Streams) -> None:
    """The first job was deleted, so PostgreSQL has forgotten its key; the guard has not."""
    service, key = streams.notifications, str(uuid4())
    first = submit(service, key)
    service.wait_for(first, "succeeded")
    until(lambda: service.redis.get(guard_key(key)) == f"{first} done", "the phase done")
    skipped = int(service.redis.get("notifications:guard_skipped") or 0)
    service.app.sync.delete([first])
    second = submit(service, key)
    job = streams.wait_for_status(second, "completed")
    assert job["result"] == {"skipped": f"idempotency_key {key!r} belongs to job {first}, which is done"}
    assert (job["error"], service.executions(second), service.effects(second)) == (None, {}, {})
    assert int(service.redis.get("notifications:guard_skipped") or 0) == skipped + 1
    until(lambda: second not in service.pending(), "the acknowledgement")
    assert second not in service.entries()


@pytest.mark.rows("S15", "S29")
def test_key_of_a_job_from_the_api_of_holdfast_is_guarded(streams: Streams) -> None:
    service, key = streams.notifications, str(uuid4())
    """Whatever its metadata say."""
    url = f"{streams.urls['notifications']}/holdfast/v1/jobs"
    body = {"task": "test.job", "payload": {}, "metadata": {"idempotency_key": str(uuid4())}}
    answer = httpx.post(url, json=body, headers={"Idempotency-Key": key}, timeout=PATIENCE, verify=PLAIN)
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["id"]
    until(lambda: service.redis.get(guard_key(key)) == f"{job_id} done", "the phase done")


@pytest.mark.rows("S29", "S30")
def test_guard_of_a_job_without_a_key_is_no_key(streams: Streams) -> None:
    service = streams.notifications
    first = str(service.value("select id from holdfast.submit(%s)", '[{"task": "test.job", "payload": {}}]'))
    until(lambda: service.redis.get(f"notifications:guard_job:{first}") == f"{first} done", "the phase done")
    second = submit(service, first)
    service.wait_for(second, "succeeded")
    assert service.effects(first, second) == {first: 1, second: 1}


@pytest.mark.rows("X14")
def test_replay_of_a_finished_job_is_skipped(streams: Streams) -> None:
    service, key = streams.notifications, str(uuid4())
    job_id = submit(service, key)
    until(lambda: service.redis.get(guard_key(key)) == f"{job_id} done", "the phase done")
    service.wait_for(job_id, "succeeded")
    service.app.sync.replay([job_id], force=True)
    until(lambda: "skipped" in str(service.job(job_id).result), "the end of the replay")
    assert (service.executions(job_id), service.effects(job_id)) == ({job_id: 1}, {job_id: 1})


@pytest.mark.rows("X14")
def test_retries_and_replays_of_a_job_pass_its_own_guard(streams: Streams) -> None:
    service, key = streams.notifications, str(uuid4())
    job_id = submit(service, key, fail=1)
    service.wait_for(job_id, "failed")
    assert service.redis.get(guard_key(key)) == f"{job_id} running"
    service.make_due(job_id)
    service.wait_for(job_id, "succeeded")
    assert (service.executions(job_id), service.effects(job_id)) == ({job_id: 2}, {job_id: 1})


def test_key_of_a_job_deleted_before_its_end_is_taken_over(streams: Streams) -> None:
    service, key = streams.notifications, str(uuid4())
    first = submit(service, key, fail=9, error="value")
    service.wait_for(first, "dead")
    assert service.redis.get(guard_key(key)) == f"{first} running"
    service.app.sync.delete([first])
    second = submit(service, key)
    service.wait_for(second, "succeeded")
    assert service.effects(second) == {second: 1}
    until(lambda: service.redis.get(guard_key(key)) == f"{second} done", "the phase done")


@pytest.mark.rows("S31")
def test_key_may_run_again_after_its_lifetime(streams: Streams) -> None:
    service, key = streams.notifications, str(uuid4())
    with streams.worker("notifications", "brief", GUARD_TTL_SECONDS="5"):
        first = submit(service, key, "brief")
        until(lambda: service.redis.get(guard_key(key)) == f"{first} done", "the phase done")
        assert service.redis.ttl(guard_key(key)) <= 5
        until(lambda: not service.redis.exists(guard_key(key)), "the end of the key")
        service.app.sync.delete([first])  # as retention does, once a minute, after `keep_succeeded`
        second = submit(service, key, "brief")
        service.wait_for(second, "succeeded")
    assert service.effects(first, second) == {first: 1, second: 1}


@pytest.mark.rows("S31")
@pytest.mark.parametrize("text", ["soon", "0", "-1", "1.5", "31536001", "99999999999999999999"])
def test_wrong_lifetime_is_refused_at_start(streams: Streams, text: str) -> None:
    variables = streams.environment("notifications", GUARD_TTL_SECONDS=text)
    worker = Program(["holdfast", "worker", "start"], streams.folder, variables)
    assert worker.process.wait(60) == 78
    expected = f"GUARD_TTL_SECONDS: {text!r} is not valid; give a whole number of seconds from 1 to 31,536,000"
    assert expected in worker.log()


@pytest.fixture
def closed_port() -> Iterator[str]:
    with free_ports(1) as (port,):
        yield port


def test_jobs_run_while_redis_is_away(
    closed_port: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And while PostgreSQL is, until they are to be completed there. The log tells of both."""
    from streams.guard import ExecutionGuard

    url = f"redis://127.0.0.1:{closed_port}/0"
    app = Holdfast(settings=Settings.load(path=settings_file("users"), environ={}, transport_url=url))

    async def fail(_: str) -> None:
        raise Unavailable("PostgreSQL is away")

    class RunningJob:
        id = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"

    async def run() -> Any:
        return await ExecutionGuard(app, ttl=60).run(RunningJob(), handler)  # type: ignore[arg-type]

    async def handler(_: object) -> str:
        return "ran"

    monkeypatch.setattr(app, "get", fail)
    assert asyncio.run(run()) == "ran"
    unread, off, unmarked = (record.getMessage() for record in caplog.records if record.name == "streams.guard")
    assert unread.startswith(f"the execution guard cannot read the key of {RunningJob.id}, so its id stands for it: ")
    assert off.startswith("the execution guard is off, Redis is away: ")
    assert unmarked.startswith(f"the execution guard cannot mark {RunningJob.id} as done: ")
