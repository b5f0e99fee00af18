"""A job's life in AtlasQueue: submitted, stored, announced, run. Tests are named by the rows they prove."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from holdfast import Holdfast, Invalid, NotFound
from tests.examples.atlasqueue_support import DEAD, QUEUE, Atlasqueue, rejected, starts
from tests.examples.common import until
from tests.examples.programs import Program
from tests.support.load import percentile

pytestmark = pytest.mark.timeout(400)


# ── submitting ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A7", "A11", "A34", "A40", "A62", "A111")
def test_job_is_stored_and_its_id_listed(atlasqueue: Atlasqueue) -> None:
    job_ids = [atlasqueue.submit("email.send", {"n": number}, key=f"k{number}") for number in range(3)]
    assert atlasqueue.listed() == job_ids[::-1]
    assert atlasqueue.command("TYPE", QUEUE) == "list"
    assert "zset" not in {atlasqueue.command("TYPE", key) for key in atlasqueue.command("KEYS", "*")}
    assert atlasqueue.value("select count(*) from jobs") == 3
    keys = [(job_id, f"k{number}") for number, job_id in enumerate(job_ids)]
    assert atlasqueue.sql("select job_id::text, key from idempotency_keys order by key") == keys
    row = atlasqueue.row(job_ids[0])
    assert (row["type"], row["payload"], row["status"]) == ("email.send", {"n": 0}, "queued")
    assert (row["attempts"], row["max_attempts"], row["run_at"]) == (0, 5, row["created_at"])


@pytest.mark.rows("A33", "A102", "A112")
def test_known_key_returns_the_existing_job(atlasqueue: Atlasqueue) -> None:
    job_id = atlasqueue.submit(key="my-unique-key-001", payload={"hello": "world"}, max_attempts=3)
    before = atlasqueue.row(job_id)
    again = [atlasqueue.post(key="my-unique-key-001", payload=payload) for payload in ({"hello": "world"}, {})]
    assert [(handle.id, handle.created) for handle in again] == [(job_id, False)] * 2
    assert atlasqueue.row(job_id) == before
    assert atlasqueue.listed() == [job_id]


@pytest.mark.rows("A35", "X13")
def test_one_of_64_concurrent_submissions_of_a_key_creates(atlasqueue: Atlasqueue) -> None:
    """Eight applications, eight submissions each: within one they may share a transaction, across them they race."""

    async def eight(app: Holdfast) -> list[tuple[str, bool]]:
        async with app:
            handles = await asyncio.gather(*(app.enqueue("noop", {}, key="one") for _ in range(8)))
        return [(handle.id, handle.created) for handle in handles]

    with ThreadPoolExecutor(8) as pool:
        applications = [atlasqueue.application() for _ in range(8)]
        answers = [each for some in pool.map(lambda app: asyncio.run(eight(app)), applications) for each in some]
    assert len({job_id for job_id, _ in answers}) == 1
    assert [created for _, created in answers].count(True) == 1
    assert atlasqueue.listed() == [answers[0][0]]
    assert (
        atlasqueue.value("select count(*) from jobs") == atlasqueue.value("select count(*) from idempotency_keys") == 1
    )


GOOD: list[tuple[str, Any]] = [
    ("key", "k"),
    ("key", "k" * 512),
    ("job_type", "t" * 128),
    ("payload", {}),
    ("max_attempts", 1),
    ("max_attempts", 25),
]
BAD: list[tuple[str, str, Any]] = [
    ("key", "key", ""),
    ("key", "key", "k" * 513),
    ("job_type", "task", ""),
    ("job_type", "task", "t" * 129),
    ("job_type", "task", 5),
    ("payload", "payload", ["x"]),
    ("payload", "payload", "text"),
    *(("max_attempts", "max_attempts", wrong) for wrong in (0, 26, 100, "x", 2.5)),
]


@pytest.mark.rows("A106", "A108", "A109", "A110", "A113")
def test_invalid_arguments_are_refused_and_nothing_is_stored(atlasqueue: Atlasqueue) -> None:
    for argument, value in GOOD:
        assert atlasqueue.post(**{argument: value}).created
    for argument, field, value in BAD:
        with pytest.raises(Invalid) as refused:
            atlasqueue.app.sync.enqueue(**{"task": "noop", "key": str(uuid4()), **_called(argument, value)})
        assert refused.value.field == field, (argument, value)
        assert refused.value.remedy
    assert atlasqueue.value("select count(*) from jobs") == len(GOOD)
    assert set(atlasqueue.sql("select max_attempts from jobs")) == {(1,), (5,), (25,)}


def _called(argument: str, value: Any) -> dict[str, Any]:
    return {"task" if argument == "job_type" else argument: value}


@pytest.mark.rows("A114", "A115", "A116")
def test_job_is_found_by_its_id_only(atlasqueue: Atlasqueue) -> None:
    job_id = atlasqueue.submit(payload={"hello": "world"})
    job = atlasqueue.app.sync.get(job_id)
    assert (job.id, job.task, job.state, job.attempts, job.max_attempts) == (job_id, "noop", "queued", 0, 5)
    with pytest.raises(NotFound) as missing:
        atlasqueue.app.sync.get(str(uuid4()))
    with pytest.raises(Invalid) as malformed:
        atlasqueue.app.sync.get("not-a-uuid")
    assert (missing.value.http_status, malformed.value.http_status) == (404, 422)


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A14", "A16", "A17", "A20", "A37", "A44", "A63", "A64", "A77", "A78", "A79")
def test_slow_job_is_leased_and_run_once(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    (later,) = atlasqueue.unheard(delay=60)
    with atlasqueue.worker() as worker:
        job_id = atlasqueue.submit("test.wait", {"until": str(tmp_path / "open")})
        row = atlasqueue.when(job_id, "running")
        (acquired,) = worker.wait_for_events("lease_acquired")
        leased_until = datetime.fromisoformat(acquired["locked_until"])
        lease = leased_until - atlasqueue.value("select started_at from holdfast.jobs where id = %s", job_id)
        assert abs(lease - timedelta(seconds=30)) <= timedelta(seconds=0.5)
        assert row["locked_until"] >= leased_until
        assert (row["attempts"], row["last_error"]) == (1, None)
        assert row["lock_owner"] == acquired["worker_id"] == worker.wait_for_events("worker_started")[0]["worker_id"]
        assert (acquired["job_id"], acquired["attempt"]) == (job_id, 1)
        atlasqueue.push(job_id, later)
        until(lambda: rejected(worker) == 2, "two refused claims")
        (tmp_path / "open").touch()
        row = atlasqueue.when(job_id, "succeeded")
        assert (row["locked_until"], row["lock_owner"], row["attempts"]) == (None, None, 1)
        worker.wait_for_events("job_succeeded")
        assert atlasqueue.row(later)["status"] == "queued"
    assert starts([worker]) == {job_id: 1}
    assert [event["level"] for event in worker.events("job_succeeded")] == ["info"]
    (started,) = worker.events("handler_start")
    assert (started["job_type"], started["attempt"]) == ("test.wait", 1)


@pytest.mark.rows("A1", "A13", "A18", "A19", "A47", "A52", "A109", "A120", "A122")
def test_one_process_runs_jobs_concurrently(atlasqueue: Atlasqueue) -> None:
    payloads: Sequence[dict[str, Any]] = [
        {"to": "user@example.com"},
        {"ctx": 1, "payload": 2, "a b": [None, True, -1.5, {"ü": "\N{OWL}\u2028\"'\\"}]},
        {"long": "x" * 100_000},
    ]
    with atlasqueue.worker() as worker:
        noop = atlasqueue.submit(payload={"hello": "world"})
        row = atlasqueue.submit("test.row", {"n": 1}, max_attempts=7)
        echoed = [atlasqueue.post("test.echo", payload) for payload in payloads]
        atlasqueue.all_ended([noop, row, *(atlasqueue.submit("test.meet") for _ in range(3))])
        assert [handle.sync.result(timeout=60) for handle in echoed] == payloads
        seen = {"id": row, "type": "test.row", "attempts": 1, "max_attempts": 7, "n": 1}
        assert atlasqueue.app.handle(row).sync.result() == seen
        process = psutil.Process(worker.process.pid)
        assert process.children() == []
        peers = {each.raddr.port for each in process.net_connections("inet") if each.raddr}
        assert peers == {atlasqueue.server.port, atlasqueue.redis.port}


@pytest.mark.rows("A15", "A31", "A59")
def test_ids_of_ended_jobs_change_nothing(atlasqueue: Atlasqueue) -> None:
    with atlasqueue.worker() as worker:
        done, dead = atlasqueue.submit(), atlasqueue.submit("test.fail", max_attempts=1)
        atlasqueue.all_ended([done])
        atlasqueue.all_ended([dead], "dead")
        before = atlasqueue.row(done), atlasqueue.row(dead)
        atlasqueue.push(*[done] * 5)
        until(lambda: rejected(worker) == 5, "five refused claims")
        for _ in range(100):
            atlasqueue.push(done, dead)
        until(lambda: rejected(worker) == 205, "two hundred more")
        assert (atlasqueue.row(done), atlasqueue.row(dead)) == before
        assert atlasqueue.listed() == []
    assert starts([worker]) == {done: 1, dead: 1}
    assert [event["event"] for event in worker.events() if event["level"] == "error"] == ["job_dead"]


TAKEN = "select extract(epoch from updated_at - created_at)::float from jobs where id = any(%s::uuid[])"


@pytest.mark.rows("A101")
def test_95_of_100_jobs_succeed_within_a_second(atlasqueue: Atlasqueue) -> None:
    """By the server's clock, one after another: each finds an idle system, as far as the machine lets it. No sweep
    helps a job that was never announced."""
    with atlasqueue.worker(WORKER_POLL_TIMEOUT="5"):
        job_ids = []
        for _ in range(100):
            job_ids.append(atlasqueue.submit())
            atlasqueue.all_ended(job_ids[-1:])
    assert percentile([seconds for (seconds,) in atlasqueue.sql(TAKEN, job_ids)], 0.95) <= 1.0


STORED: dict[str, Any] = {"exact": {"a": [None, True, 1.5, "ü"]}, "text": ""}
UNSTORED = ("set", "path", "object", "infinity", "keys", "long")


@pytest.mark.rows("A119")
def test_return_is_success_whatever_the_result(atlasqueue: Atlasqueue) -> None:
    """Of a job that another one follows, too."""
    with atlasqueue.worker() as worker:
        handles = {name: atlasqueue.post("test.result", {"name": name}) for name in (*STORED, *UNSTORED)}
        then = {"then": [{"type": "noop", "payload": {}}]}
        followed = atlasqueue.post("test.result", {"name": "set"}, metadata=then)
        assert {name: handles[name].sync.result(timeout=60) for name in STORED} == STORED
        refused = [*(handles[name] for name in UNSTORED), followed]
        assert [handle.sync.result(timeout=60) for handle in refused] == [None] * len(refused)
        atlasqueue.when_succeeded(len(handles) + 2)
        assert atlasqueue.value("select max(attempts) from jobs") == 1
        reported = worker.wait_for_events("result_not_stored", len(refused))
    assert sorted(line["job_id"] for line in reported) == sorted(handle.id for handle in refused)
    assert {(line["level"], line["job_type"]) for line in reported} == {("warning", "test.result")}
    assert all(line["error"].startswith("result: ") and "null" in line["remedy"] for line in reported)


# ── failing ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A22", "A37", "A38", "A58", "A61", "A67", "A72", "A81", "A104", "A119")
def test_failing_job_is_retried_until_dead(atlasqueue: Atlasqueue) -> None:
    with atlasqueue.worker() as worker:
        thrice = atlasqueue.submit("test.fail", {"message": "x", "length": 10_000}, max_attempts=3)
        once = atlasqueue.submit("test.fail", max_attempts=1, queue="mail")
        unknown = atlasqueue.submit("no.handler", max_attempts=2)
        third = atlasqueue.post("test.fail", {"times": 2})
        atlasqueue.all_ended([thrice, once, unknown], "dead")
        assert third.sync.result(timeout=60) == 3
        rows = [atlasqueue.row(job_id) for job_id in (thrice, once, unknown, third.id)]
        assert [row["attempts"] for row in rows] == [3, 1, 2, 3]
        assert rows[0]["last_error"] == f"LookupError: {'x' * 10_000}"[:4096]
        assert "no.handler" in rows[2]["last_error"]
        until(lambda: sorted(atlasqueue.listed(DEAD)) == sorted([thrice, unknown]), "the dead letters")
        until(lambda: atlasqueue.listed(f"{DEAD}:mail") == [once], "those of another queue")
        assert atlasqueue.command("TYPE", DEAD) == "list"
        worker.wait_for_events("job_dead", 3)
    assert starts([worker]) == {thrice: 3, once: 1, unknown: 2, third.id: 3}
    assert _attempts(worker, thrice) == [1, 2, 3]
    dead = worker.events("job_dead")
    assert {event["level"] for event in dead} == {"error"}
    keys = {event["job_id"]: event["dlq_key"] for event in dead}
    assert keys == {thrice: DEAD, once: f"{DEAD}:mail", unknown: DEAD}


def _attempts(worker: Program, job_id: str) -> list[int]:
    return [event["attempt"] for event in worker.events("lease_acquired") if event["job_id"] == job_id]


FAILED = """select extract(epoch from j.run_at)::float - a.ended_at / 1e6::float
    from jobs j join holdfast.attempt a on a.job_id = j.id and a.attempt = j.attempts where j.id = %s"""


def _waits(queue: Atlasqueue, job_id: str, attempts: int) -> float:
    """The seconds that a job which has failed so often is made to wait."""
    queue.when(job_id, "failed", attempts)
    return float(queue.value(FAILED, job_id))


DELAYS = {
    "without jitter": (
        {"RETRY_BASE_DELAY_SECONDS": "5", "RETRY_JITTER_MAX_SECONDS": "0"},
        [(10, 10.05), (20, 20.05), (40, 40.05), (80, 80.05)],
    ),
    "by default": ({"RETRY_BASE_DELAY_SECONDS": "", "RETRY_JITTER_MAX_SECONDS": ""}, [(10, 12), (20, 22)]),
    "with another base": ({"RETRY_BASE_DELAY_SECONDS": "1", "RETRY_JITTER_MAX_SECONDS": ""}, [(2, 4)]),
}


@pytest.mark.rows("A21", "A65", "A66", "A69", "A70", "A71", "A73", "A80", "A136", "A137")
@pytest.mark.parametrize("variant", DELAYS)
def test_retry_delays_double(atlasqueue: Atlasqueue, variant: str) -> None:
    variables, bounds = DELAYS[variant]
    with atlasqueue.worker(**variables) as worker:
        job_id = atlasqueue.submit("test.fail")
        for failures, (least, most) in enumerate(bounds, 1):
            assert least <= _waits(atlasqueue, job_id, failures) <= most
            reported = worker.wait_for_events("job_failed", failures)[-1]
            assert datetime.fromisoformat(reported["retry_at"]) == atlasqueue.row(job_id)["run_at"]
            assert (reported["level"], reported["error"]) == ("warning", "LookupError: not today")
            atlasqueue.due(job_id)
        atlasqueue.when(job_id, "dead" if len(bounds) == 4 else "failed", len(bounds) + 1)


@pytest.mark.rows("A74")
def test_jobs_that_fail_together_are_retried_spread_out(atlasqueue: Atlasqueue) -> None:
    """120 of them: 40 would keep to less than 1.6 of the 2 seconds once in 700 times."""
    spread = "select extract(epoch from max(run_at) - min(run_at))::float from jobs where status = 'failed'"
    with atlasqueue.worker(RETRY_JITTER_MAX_SECONDS="2", RETRY_BASE_DELAY_SECONDS="3600"):
        atlasqueue.all_ended(atlasqueue.submit_many(120, "test.fail"), "failed")
        assert atlasqueue.value(spread) >= 1.6
