"""The routes of the Atlas Jobs example. Tests are named by the rows of the requirements they prove."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import UUID

import psutil
import pytest

from tests.examples.atlas_support import Atlas, Instance
from tests.examples.common import PATIENCE, asked
from tests.support.load import percentile

pytestmark = pytest.mark.timeout(400)

ONLY_API = {"ATLAS_SCHEDULING_ENABLED": "false"}


@pytest.fixture
def api(atlas: Atlas) -> Iterator[Instance]:
    """An instance that answers and runs no job."""
    with atlas.one(**ONLY_API) as instance:
        yield instance


# ── submitting ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("J2", "J3", "J41", "J46", "J47", "J49", "J66")
def test_job_is_stored_before_it_is_answered(atlas: Atlas, api: Instance) -> None:
    given = api.post("email.send", '{"to": "a@b.c"}', max_attempts=7, key="welcome-1")
    api.kill()
    assert given.status == 201
    job_id = given.document["job_id"]
    assert str(UUID(job_id)) == job_id
    row = atlas.row(job_id)
    times = [row.pop(name) for name in ("created_at", "updated_at", "next_run_at")]
    assert max(times) - min(times) <= timedelta(seconds=1)
    assert row == {
        "job_id": job_id,
        "status": "QUEUED",
        "job_type": "email.send",
        "payload": '{"to": "a@b.c"}',
        "attempt_count": 0,
        "max_attempts": 7,
        "idempotency_key": "welcome-1",
        "last_error": None,
        "worker_id": None,
    }
    api.start()
    api.ready()
    assert api.get(f"/jobs/{job_id}").document == given.document
    assert api.post("email.send").document["max_attempts"] == 3


@pytest.mark.rows("J10", "J36", "J37", "J38", "J40", "J47", "J61")
def test_same_key_returns_the_same_job(atlas: Atlas, api: Instance) -> None:
    first = api.post("payment.charge", '{"amount": 1}', key="order-1")
    again = api.post("payment.charge", '{"amount": 1}', key="order-1")
    other_body = api.post("email.send", "other", key="order-1", max_attempts=9)
    in_the_body = api.post("payment.charge", '{"amount": 1}', idempotency_key="order-1")
    assert [each.status for each in (first, again, other_body, in_the_body)] == [201, 200, 200, 200]
    assert all(each.document == first.document for each in (again, other_body, in_the_body))
    assert api.post(key="header", idempotency_key="body").document["idempotency_key"] == "header"
    without = [api.post().document for _ in range(3)]
    assert len({each["job_id"] for each in without}) == 3
    assert [each["idempotency_key"] for each in without] == [None] * 3
    assert atlas.sql("select idempotency_key, count(*) from jobs group by 1 order by 1 nulls last") == [
        ("header", 1),
        ("order-1", 1),
        (None, 3),
    ]


@pytest.mark.rows("J39")
def test_fifty_concurrent_submissions_of_one_key_make_one_job(atlas: Atlas) -> None:
    with atlas.running("one", "two", **ONLY_API) as instances, ThreadPoolExecutor(50) as pool:
        for round_ in range(3):
            given = list(pool.map(lambda n, key=f"key-{round_}": instances[n % 2].post(key=key), range(50)))
            assert Counter(each.status for each in given) == {201: 1, 200: 49}
            assert len({each.document["job_id"] for each in given}) == 1
    assert atlas.value("select count(*) from jobs") == 3


TEXTS = ['{"b":1,  "a" : 2e400, "é": "\\u00e9"}', "", "no JSON", '"quoted"', "null", " [1] \n\t", "\\u0000 \\"]


@pytest.mark.rows("J44")
def test_payload_is_kept_byte_for_byte(atlas: Atlas, api: Instance) -> None:
    for text in TEXTS:
        job_id = api.submit("email.send", text)
        assert api.job(job_id)["payload"] == text
        assert atlas.row(job_id)["payload"] == text
    value = b'{"job_type": "email.send", "payload": {"b":1,  "a" : 2e400}}'
    assert api.ask("POST", "/jobs", value).document["payload"] == '{"b":1,  "a" : 2e400}'


@pytest.mark.rows("J44", "J67")
def test_payloads_from_sql_are_shown_whatever_they_are(atlas: Atlas, api: Instance) -> None:
    payloads = ["[1, 2]", "5", '"x"', "null", "[" * 300 + "]" * 300, "[" * 3000 + "]" * 3000]
    for payload in payloads:
        draft = f'[{{"task": "demo.sleep", "payload": {payload}}}]'
        job_id = str(atlas.value("select id from holdfast.submit(%s)", draft))
        assert api.job(job_id)["payload"] == atlas.row(job_id)["payload"] == payload


ERRORS = {
    "RuntimeError: no: not today": "no: not today",
    "Dead: never": "never",
    "error: unpack requires 4 bytes": "unpack requires 4 bytes",
    "gaierror: [Errno -2] Name or service not known": "[Errno -2] Name or service not known",
    "_Own2: two\nlines": "two\nlines",
    "ValueError": "ValueError",
    "timeout: still running after 5 s": "timeout: still running after 5 s",
    "timeout: timed out": "timed out",
    "expired: no worker began it in time": "expired: no worker began it in time",
    "expired: the card": "the card",
    "lease expired: worker w died": "lease expired: worker w died",
    "no task 'x' is registered": "no task 'x' is registered",
}


@pytest.mark.rows("J48")
def test_last_error_is_the_message_without_its_type(atlas: Atlas, api: Instance) -> None:
    job_id = api.submit()
    for stored, shown in ERRORS.items():
        atlas.sql("update holdfast.job set error = %s where id = %s", stored, job_id)
        assert api.job(job_id)["last_error"] == atlas.row(job_id)["last_error"] == shown


@pytest.mark.rows("J49", "J74")
def test_job_that_waits_for_another_has_no_time(atlas: Atlas, api: Instance) -> None:
    app = atlas.application()
    waiting = app.sync.enqueue("demo.sleep", {"payload": "{}"}, after=api.submit()).id
    app.sync.close()
    job = api.job(waiting)
    assert (job["status"], job["next_run_at"]) == ("QUEUED", None)
    assert atlas.row(waiting) == job
    later = "select count(*) from jobs where status = 'QUEUED' and next_run_at > now()"
    assert api.get("/metrics").document["scheduledForRetry"] == atlas.value(later) == 0
    atlas.sql("set timezone to 'Asia/Tokyo'")
    for statement in ("select * from holdfast.jobs", "select * from jobs"):
        assert len(atlas.sql(statement)) == 2, "no time is beyond the year 9999"
    atlas.sql("update holdfast.job set run_at = created_at + 3600000000 where id = %s", waiting)  # a wait with an end
    job = api.job(waiting)
    assert (job["next_run_at"], atlas.row(waiting)) == (None, job)
    assert api.get("/metrics").document["scheduledForRetry"] == atlas.value(later) == 0


@pytest.mark.rows("J49", "J74")
def test_job_that_was_cancelled_while_it_waited_has_no_time(atlas: Atlas, api: Instance) -> None:
    app = atlas.application()
    before = api.submit()
    by_hand = app.sync.enqueue("demo.sleep", {"payload": "{}"}, after=api.submit())
    by_dependency = app.sync.enqueue("demo.sleep", {"payload": "{}"}, after=before)
    app.sync.cancel([by_hand.id, before])
    app.sync.close()
    for handle in (by_hand, by_dependency):
        job = api.when(handle.id, "CANCELLED")
        assert (job["next_run_at"], atlas.row(handle.id)) == (None, job)
    assert api.job(before)["next_run_at"] is not None


@pytest.mark.rows("J36", "J43", "J46", "J66")
def test_submission_accepts_names_in_camel_case(api: Instance) -> None:
    camel = b'{"jobType": "email.send", "payload": {"b":1,  "a" : 2e400}, "maxAttempts": 7, "idempotencyKey": "k1"}'
    given = api.ask("POST", "/jobs", camel)
    assert given.status == 201
    job = {name: given.document[name] for name in ("job_type", "payload", "max_attempts", "idempotency_key")}
    assert job == {
        "job_type": "email.send",
        "payload": '{"b":1,  "a" : 2e400}',
        "max_attempts": 7,
        "idempotency_key": "k1",
    }
    both = b'{"jobType": "email.send", "job_type": "email.send", "idempotencyKey": "k1", "idempotency_key": "k1"}'
    assert api.ask("POST", "/jobs", both).document == given.document
    for snake, camel_name, values in (
        ("job_type", "jobType", ["a", "b"]),
        ("max_attempts", "maxAttempts", [1, 2]),
        ("idempotency_key", "idempotencyKey", ["a", "b"]),
    ):
        body = {"job_type": "email.send", snake: values[0], camel_name: values[1]}
        refused = api.ask("POST", "/jobs", json.dumps(body).encode())
        assert refused.status == 422
        assert refused.document["error"].startswith(f"{snake}, {camel_name}: {values!r} differ; give one")


REFUSED: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b"{", 400, "body"),
    "no object": (b"[]", 400, "body"),
    "no type": (b'{"payload": ""}', 400, "job_type"),
    "a type that is no text": (b'{"job_type": 1}', 400, "job_type"),
    "an unknown field": (b'{"job_type": "a", "paylaod": ""}', 400, "paylaod"),
    "no name": (b'{"job_type": " "}', 422, "job_type:"),
    "too deep": (b'{"job_type": "a", "payload": %s%s}' % (b"[" * 100_000, b"]" * 100_000), 422, "body:"),
    "no attempts": (b'{"job_type": "a", "max_attempts": 0}', 422, "max_attempts"),
    "a key that is empty": (b'{"job_type": "a", "idempotency_key": ""}', 422, "idempotency_key:"),
    "NUL": (b'{"job_type": "a", "payload": "\\u0000"}', 422, "payload"),
    "no text": (b'{"job_type": "a", "payload": "\xff"}', 400, "body"),
    "too large": (b'{"job_type": "a", "payload": "%s"}' % (b"x" * 300_000), 413, "payload"),
    "far too large": (b"x" * 1_100_000, 413, "body"),
}


@pytest.mark.rows("J66", "J67")
def test_invalid_requests_are_refused_whole(atlas: Atlas, api: Instance) -> None:
    for body, status, names in REFUSED.values():
        try:
            given = api.ask("POST", "/jobs", body)
        except OSError:  # it answered, and hung up on a body it does not want
            assert status == 413
        else:
            assert (given.status, names in given.document["error"]) == (status, True), given
    assert api.get("/jobs/00000000-0000-7000-8000-000000000000").status == 404
    assert api.get("/jobs/no-uuid").status == 422
    assert api.post(key="").document["error"].startswith("Idempotency-Key:")
    assert api.get("/nothing").status == 404
    assert api.ask("POST", "/metrics", b"").status == 405
    assert api.ask("POST", "/jobs", b'{"job_type": "a"}', Content_Type="text/plain").status == 415
    assert atlas.value("select count(*) from jobs") == 0


@pytest.mark.rows("J5", "J18")
def test_answer_does_not_wait_for_the_job(atlas: Atlas) -> None:
    with atlas.one() as instance:
        slow = [instance.post(payload='{"seconds": 600}') for _ in range(2)]
        instance.when(slow[0].document["job_id"], "RUNNING")
        assert [instance.post().status for _ in range(3)] == [201] * 3

        assert instance.job(slow[1].document["job_id"])["status"] == "QUEUED"


@pytest.mark.rows("J17")
def test_95_of_100_submissions_answer_within_50_milliseconds(api: Instance) -> None:
    """More by what three requests of the same kind without a job take in the same seconds, which on an idle machine is
    next to nothing: each is a request that the instance answers from PostgreSQL."""
    missing = "/jobs/00000000-0000-7000-8000-000000000000"
    pairs = [(api.post().seconds, api.get(missing).seconds) for _ in range(100)]
    submitted, control = (percentile(seconds, 0.95) for seconds in zip(*pairs, strict=True))
    assert submitted <= 0.05 + 3 * control


# ── observing ─────────────────────────────────────────────────────────────────────────────────────────────────────
BY_WORKER = """select worker, case when state in (0, 1, 3, 4) then 'QUEUED' when state = 2 then 'RUNNING'
    when state = 5 then 'SUCCEEDED' when state = 6 then 'DEAD_LETTERED' else 'CANCELLED' end, count(*)
    from holdfast.job group by 1, 2"""
"""The same counts from Holdfast's own table, without the view."""


def _by_worker(atlas: Atlas) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for worker, status, count in atlas.sql(BY_WORKER):
        counts.setdefault(worker or "unassigned", {})[status] = count
    return counts


def _by_status(by_worker: dict[str, dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in by_worker.values():
        total.update(counts)
    return dict(total)


def _mixture(atlas: Atlas) -> None:
    """Jobs of every status, of two workers and of none. No retry comes by itself."""
    dead = "demo.fail", '{"message": "no"}'
    with atlas.running("one", "two", HOLDFAST_RETRY="1h") as (one, two):
        one.all_ended(one.submit_many(6, "demo.sleep", '{"seconds": 0.05}'))
        one.when(one.submit(*dead, max_attempts=1), "DEAD_LETTERED")
        retried = two.submit("demo.fail", '{"message": "no", "times": 1}')
        two.when(retried, "QUEUED", 1)
        atlas.due(retried)
        two.when(retried, "SUCCEEDED")
        for _ in range(2):
            two.when(two.submit(*dead), "QUEUED", 1)
    app = atlas.application()
    app.sync.enqueue("demo.sleep", {"payload": "{}"}, delay=3600)
    app.sync.cancel(app.sync.enqueue("demo.sleep", {"payload": "{}"}).id)
    for _ in range(3):
        app.sync.enqueue("demo.sleep", {"payload": "{}"})
    app.sync.close()


@pytest.mark.rows("J12", "J13", "J68", "J69", "J70", "J71", "J72", "J73", "J74", "J75")
def test_all_counts_match_the_table(atlas: Atlas) -> None:
    _mixture(atlas)
    with atlas.one(**ONLY_API) as api:
        by_worker = _by_worker(atlas)
        assert {"unassigned"} < by_worker.keys() <= {"one", "two", "unassigned"}
        assert sum(map(sum, (counts.values() for counts in by_worker.values()))) == 15
        _check_counts(atlas, api, by_worker)
        _check_recent(atlas, api, by_worker)


def _check_counts(atlas: Atlas, api: Instance, by_worker: dict[str, dict[str, int]]) -> None:
    assert api.get("/debug/workers").document == by_worker
    by_status = {"QUEUED": 6, "SUCCEEDED": 7, "DEAD_LETTERED": 1, "CANCELLED": 1}
    assert _by_status(by_worker) == by_status
    assert api.get("/debug/workers/summary").document == by_status
    metrics = api.get("/metrics")
    assert metrics.status == 200
    assert metrics.document["statusCounts"] == by_status
    assert metrics.document["byWorker"] == by_worker
    # Failures: one each of the dead job, the one that recovered and the two that wait.
    assert metrics.document["attemptDistribution"] == {"0": 11, "1": 4}
    for accept in PROMETHEUS:
        assert b"holdfast_" in _text(api, "/metrics", Accept=accept), "what a Prometheus asks for"
    for accept in JSON:
        assert _text(api, "/metrics", Accept=accept).startswith(b'{"statusCounts"'), accept
    assert metrics.document["scheduledForRetry"] == 3, "two retries, and the one that was submitted for later"


PROMETHEUS = (
    "text/plain",
    "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1",
    "application/json;q=0.4, text/plain",
    "text/html, application/json;q=0",
    "Application/JSON ; q=0.000",
)
JSON = (
    "",
    "*/*",
    "application/json, text/plain, */*",
    "text/plain;q=0.5, application/json",
    "text/html, */*",
    "application/json-seq;q=0",
)


def _text(api: Instance, path: str, **headers: str) -> bytes:
    status, text = asked(urllib.request.Request(f"http://127.0.0.1:{api.port}{path}", headers=headers))
    assert status == 200
    return text


TEN_MINUTES_OLDER = """update holdfast.job set created_at = created_at - 600000000, started_at = started_at - 600000000,
    ended_at = ended_at - 600000000, run_at = run_at - 600000000 where id = %s"""


def _check_recent(atlas: Atlas, api: Instance, by_worker: dict[str, dict[str, int]]) -> None:
    recent = {"minutes": 5, "statusCounts": _by_status(by_worker), "byWorker": by_worker}
    assert api.get("/metrics").document["recent"] == recent
    (job_id,) = atlas.value("select array_agg(id) from holdfast.job where state = 6")
    atlas.sql(TEN_MINUTES_OLDER, job_id)
    atlas.sql("update holdfast.attempt set ended_at = ended_at - 600000000 where job_id = %s", job_id)
    assert _recent_dead(api, "") == _recent_dead(api, "?minutes=9") == 0
    assert _recent_dead(api, "?minutes=15") == 1
    assert api.get("/metrics").document["statusCounts"]["DEAD_LETTERED"] == 1
    assert [api.get(f"/metrics?minutes={each}").status for each in ("0", "x", "", "-1", "9" * 400)] == [422] * 5


def _recent_dead(api: Instance, query: str) -> int:
    counts: dict[str, int] = api.get(f"/metrics{query}").document["recent"]["statusCounts"]
    return counts.get("DEAD_LETTERED", 0)


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("J1", "J27")
def test_only_postgresql_is_contacted(atlas: Atlas) -> None:
    with atlas.one(REDIS_URL="redis://127.0.0.1:1/0") as instance:
        instance.when(instance.submit(), "SUCCEEDED")
        connections = psutil.Process(instance.process.pid).net_connections("all")
        talked_to = {each.raddr.port for each in connections if each.raddr and each.laddr.port != instance.port}
        assert talked_to == {atlas.server.port}


@pytest.mark.rows("J65", "J77", "J78", "J79")
def test_one_command_serves_its_port_and_names_its_worker(atlas: Atlas) -> None:
    with atlas.running("worker-8080", "") as (named, unnamed):
        assert named.job(named.submit())["job_type"] == "demo.sleep"
        workers = atlas.sql("select id, pid from holdfast.worker")
        names = {pid: name for name, pid in workers}
        assert names.keys() == {named.process.pid, unnamed.process.pid}
        assert names[named.process.pid] == "worker-8080"
        made_up = rf".+-{unnamed.process.pid}-[0-9a-f]{{8}}"
        assert re.fullmatch(made_up, names[unnamed.process.pid]), "never twice the same"
        _refused(atlas, f"cannot listen on 127.0.0.1:{named.port}", SERVER_PORT=str(named.port))
        _refused(atlas, "SERVER_PORT: 'x' is not valid", 2, SERVER_PORT="x", ATLAS_SCHEDULING_ENABLED="false")
        _refused(atlas, "HOLDFAST_LEASE: ", HOLDFAST_LEASE="x")


def _refused(atlas: Atlas, why: str, code: int = 78, **variables: str) -> None:
    with Instance(atlas, "third", **variables) as third:
        assert third.process.wait(PATIENCE) == code
        assert why in third.log()
        assert "Traceback" not in third.log()


@pytest.mark.rows("J60")
def test_scheduling_setting_leaves_jobs_queued(atlas: Atlas, api: Instance) -> None:
    job_id = api.submit()
    store = atlas.application()
    assert store.sync.workers() == []
    store.sync.close()
    assert api.job(job_id)["status"] == "QUEUED"
    assert "worker_started" not in api.log()
    api.process.send_signal(signal.SIGTERM)
    assert api.process.wait(PATIENCE) == 0


@pytest.mark.rows("J76")
def test_connections_are_pooled(atlas: Atlas) -> None:
    """However many clients there are; a silent one delays no other."""
    connected = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    with (
        atlas.one() as instance,
        ThreadPoolExecutor(40) as pool,
        socket.create_connection(("127.0.0.1", instance.port)),
    ):
        counts = []
        for _ in range(5):
            given = [pool.submit(instance.post) for _ in range(40)]
            counts.append(atlas.value(connected))
            assert {each.result().status for each in given} == {201}
        assert max(counts) <= 20
        assert atlas.value(connected) >= 1


@pytest.mark.rows("J58")
def test_empty_database_is_migrated_once_and_reused(atlas: Atlas) -> None:
    applied = "select json_agg(m order by number) from holdfast.migration m"
    with atlas.running("one", "two", "three", **ONLY_API) as instances:  # all of them start at once
        job_id = instances[0].submit()
        assert [each.job(job_id)["job_id"] for each in instances] == [job_id] * 3
        first = atlas.value(applied)
    assert [each["number"] for each in first] == list(range(1, len(first) + 1))
    with atlas.one(**ONLY_API) as again:
        assert again.job(job_id)["job_id"] == job_id
    assert atlas.value(applied) == first
