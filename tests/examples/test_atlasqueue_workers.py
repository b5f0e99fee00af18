"""The AtlasQueue example's workers: several, killed, late, and given wrong ids. Tests are named by rows."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import Holdfast, HoldfastError, Retry, current_job
from holdfast.core.clock import ManualClock
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.worker import Worker
from tests.examples.atlasqueue_support import QUEUE, Atlasqueue, rejected, starts
from tests.examples.common import PATIENCE, until
from tests.examples.programs import Program
from tests.examples.test_atlasqueue_metrics import figures, metrics_address, of

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

SOON = timedelta(seconds=60)
"""Bound of what takes 0.2 seconds alone; other tests may keep the disk busy. A48 asks for 10 seconds."""


# ── the submitter dies ──────────────────────────────────────────────────────────────────────────────────────────
LOOSE = """select (select count(*) from holdfast.job where not has_key),
    (select count(*) from jobs j full join idempotency_keys k on k.job_id = j.id where k.key is null or j.id is null)"""


@pytest.mark.rows("A5", "A6", "A29", "A75", "A76")
def test_jobs_and_keys_are_stored_together_and_run(atlasqueue: Atlasqueue) -> None:
    """No sweep comes between: each job runs because its id was delivered, and no id is without its row."""
    client = "tests.examples.atlasqueue_client"
    number = 750
    with atlasqueue.workers(2, WORKER_POLL_TIMEOUT="600") as workers:
        killed = atlasqueue.program(client, "100000")
        until(lambda: atlasqueue.value("select count(*) from jobs") >= 250, "the first of its jobs")
        killed.kill()
        assert atlasqueue.sql(LOOSE) == [(0, 0)]
        stored = atlasqueue.value("select count(*) from jobs")
        with atlasqueue.program(client, str(stored + number)) as second:
            assert second.process.wait(60) == 0
        assert atlasqueue.sql(LOOSE) == [(0, 0)]
        assert atlasqueue.value("select count(*) from jobs") == stored + number
        created = Counter(event["job_id"] for event in second.events("job_created"))
        assert len(created) == number
        assert set(created.values()) == {1}
        assert {event["level"] for event in second.events("job_created")} == {"info"}
        atlasqueue.all_ended(list(created))
        assert rejected(*workers) == 0


@pytest.mark.rows("A28", "A53", "A134", "X24")
def test_sweep_finds_jobs_that_were_never_announced(atlasqueue: Atlasqueue) -> None:
    """Stored, and its submitter died before it could announce it; stored by SQL alone."""
    killed = atlasqueue.program("tests.examples.atlasqueue_client", "1", HOLDFAST_FAULTS="announce.before:kill")
    assert killed.process.wait(60) == -9
    assert atlasqueue.listed() == []
    job_ids = [str(job_id) for (job_id,) in atlasqueue.sql("select id from jobs")] + atlasqueue.unheard(20)
    assert len(job_ids) == 21
    with atlasqueue.worker(WORKER_POLL_TIMEOUT="1") as worker:
        atlasqueue.all_ended(job_ids)
    assert starts([worker]) == dict.fromkeys(job_ids, 1)


# ── a worker dies ─────────────────────────────────────────────────────────────────────────────────────────────────
def _named(workers: list[Program], worker_id: str) -> Program:
    (found,) = [each for each in workers if each.wait_for_events("worker_started")[0]["worker_id"] == worker_id]
    return found


@pytest.mark.rows("A30", "A36", "A54", "A133", "X23")
def test_job_of_a_killed_worker_is_taken_after_its_lease(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    with atlasqueue.workers(2, WORKER_LEASE_SECONDS="2", WORKER_POLL_TIMEOUT="0.5") as workers:
        job_id = atlasqueue.submit("test.wait", {"until": str(tmp_path / "open")})
        killed = _named(workers, atlasqueue.when(job_id, "running")["lock_owner"])
        killed.wait_for_events("handler_start")
        killed.kill()
        leased_until = atlasqueue.row(job_id)["locked_until"]
        row = atlasqueue.when(job_id, "running", 2)
        again = atlasqueue.value("select started_at from holdfast.jobs where id = %s", job_id)
        assert leased_until <= again
        assert _named(workers, row["lock_owner"]) is not killed
        (tmp_path / "open").touch()
        assert atlasqueue.when(job_id, "succeeded")["attempts"] == 2
    assert starts(workers) == {job_id: 2}


class _RecordedClock(ManualClock):
    """Virtual time that knows which sleeps were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


@pytest.mark.rows("A30")
def test_lost_job_is_taken_within_lease_poll_and_two_seconds(atlasqueue: Atlasqueue) -> None:
    """In virtual time, with the lease and the poll of the document. Its first worker never beats, as one that died."""
    clock, again = _RecordedClock(), asyncio.Event()
    fixed = {"WORKER_POLL_TIMEOUT": "5", "WORKER_LEASE_SECONDS": "30"}
    app = Holdfast(settings=atlasqueue.application(**fixed).settings, clock=clock, now=clock)

    @app.task("test.lost")
    async def lost() -> None:
        again.set()

    async def scenario() -> None:
        async with app, asyncio.timeout(PATIENCE):
            job = await app.enqueue("test.lost")
            store = await app.open_store()
            claim = await store.queueing.claim(
                ClaimRequest("dead", {EVERY_QUEUE: 1}, limit=1, lease_for=app.settings.lease, ids=[job.id])
            )
            assert [each.id for each in claim.jobs] == [job.id]
            clock.advance(29)
            worker = Worker(app)
            working = asyncio.create_task(worker.run())
            while not any(4 <= seconds <= 6 for seconds in clock.slept):  # noqa: ASYNC110 - the sweeper, asleep
                await asyncio.sleep(0.01)
            assert (await app.get(job.id)).claims == 1
            clock.advance(1 + 5 + 2)
            await again.wait()
            worker.stop()
            await working
            assert (await app.get(job.id)).claims == 2

    asyncio.run(scenario())


# ── several at once ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A43")
def test_id_delivered_twenty_times_runs_once(atlasqueue: Atlasqueue) -> None:
    """By twenty that ask for it at once, and by workers to whom it is delivered over and over."""
    (asked,) = atlasqueue.unheard()

    async def race() -> list[int]:
        async with atlasqueue.app as app:
            store = await app.open_store()
            claims = await asyncio.gather(
                *(
                    store.queueing.claim(
                        ClaimRequest(f"w{n}", {EVERY_QUEUE: 1}, limit=1, lease_for=app.settings.lease, ids=[asked])
                    )
                    for n in range(20)
                )
            )
        assert sum(claim.refused for claim in claims) == 19
        return [len(claim.jobs) for claim in claims]

    assert sorted(atlasqueue.app.run_blocking(race())) == [0] * 19 + [1]
    message = atlasqueue.unheard(50)
    atlasqueue.push(*message * 20)
    with atlasqueue.workers(2) as workers:
        atlasqueue.all_ended(message)
        until(lambda: atlasqueue.listed() == [], "the end of the list")
        until(lambda: rejected(*workers) >= 19 * 50, "the refused claims")
    assert starts(workers) == dict.fromkeys(message, 1)


@pytest.mark.rows("A45")
def test_ten_workers_take_each_of_a_thousand_jobs_once(atlasqueue: Atlasqueue) -> None:
    """Ten of them in this process, each with an identity, connections and leases of its own."""
    job_ids = atlasqueue.submit_many(1000)
    ran: list[str] = []

    async def work() -> None:
        async with atlasqueue.application(HOLDFAST_CONCURRENCY="2") as app:

            @app.task("noop")
            async def noop() -> None:
                ran.append(current_job().id)

            await Worker(app, drain=True).run()

    async def fleet() -> None:
        await asyncio.gather(*(work() for _ in range(10)))

    asyncio.run(fleet())
    assert sorted(ran) == job_ids
    assert atlasqueue.value("select count(distinct worker) from holdfast.job") > 1
    assert set(atlasqueue.sql("select status, attempts from jobs")) == {("succeeded", 1)}


@pytest.mark.rows("A24", "A42", "A60", "A66", "A82")
def test_concurrent_sweeps_take_each_due_job_once(atlasqueue: Atlasqueue) -> None:
    """By four workers that sweep for everybody, and serve another queue themselves."""
    number = 200
    job_ids = atlasqueue.unheard(number, "test.fail")
    atlasqueue.sql("update holdfast.job set state = 3, attempts = 1, claims = 1, payload = '{\"times\": 1}'")
    with psycopg.connect(atlasqueue.url) as holder:
        holder.execute("select from holdfast.job where id = %s for update", [job_ids[0]])
        with atlasqueue.workers(4, HOLDFAST_QUEUES="aside") as sweepers:
            until(lambda: _promoted(sweepers) == number - 1, "all but the one that is locked")
            holder.rollback()
            until(lambda: _promoted(sweepers) >= number, "that one too")
            assert set(atlasqueue.listed()) == set(job_ids)
            assert set(atlasqueue.sql("select status from jobs")) == {("queued",)}
    assert _promoted(sweepers) == number
    sweeps = [event for worker in sweepers for event in worker.events("sweep_complete")]
    assert {event["level"] for event in sweeps} == {"info"}
    assert sum(event["requeued"] for event in sweeps) >= number
    with atlasqueue.workers(4) as workers:
        atlasqueue.all_ended(job_ids)
        until(lambda: _retried(workers) == number, "the counts of the workers that run them")
    assert starts(workers) == dict.fromkeys(job_ids, 1)


def _retried(workers: Sequence[Program]) -> float:
    return sum(of(figures(metrics_address(worker)), "jobs_retried_total") for worker in workers)


def _promoted(workers: Sequence[Program]) -> int:
    return sum(event["promoted"] for worker in workers for event in worker.events("sweep_complete"))


@pytest.mark.rows("A23", "X25")
def test_sweep_runs_under_load(atlasqueue: Atlasqueue) -> None:
    """A list that is never empty: a client goes on pushing the id of a job that has long ended."""
    over = threading.Event()

    def push() -> None:
        while not over.wait(0.005):
            atlasqueue.push(done)

    with atlasqueue.worker(WORKER_POLL_TIMEOUT="0.5") as worker:
        done = atlasqueue.submit()
        atlasqueue.all_ended([done])
        pusher = threading.Thread(target=push)
        pusher.start()
        try:
            until(lambda: rejected(worker) > 20, "the load")
            (unheard,) = atlasqueue.unheard()
            failing = atlasqueue.submit("test.fail", {"times": 2})
            atlasqueue.all_ended([unheard, failing])
        finally:
            over.set()
            pusher.join()


@pytest.mark.rows("X24")
def test_sweep_does_not_list_ids_twice(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    with atlasqueue.worker(HOLDFAST_CONCURRENCY="1", WORKER_POLL_TIMEOUT="0.1"):
        held = atlasqueue.submit("test.wait", {"until": str(tmp_path / "open")})
        atlasqueue.when(held, "running")
        waiting = atlasqueue.submit_many(50)
        for _ in range(2):
            waiting += atlasqueue.unheard()  # a sweep that lists this one has seen all the others
            until(lambda last=waiting[-1]: last in atlasqueue.listed(), "the sweep that lists it")
        assert sorted(atlasqueue.listed()) == sorted(waiting)
        (tmp_path / "open").touch()
        atlasqueue.all_ended([held, *waiting])


@pytest.mark.rows("A49")
def test_worker_runs_only_jobs_of_its_queues(atlasqueue: Atlasqueue) -> None:
    with atlasqueue.worker(HOLDFAST_QUEUES="mail") as mail, atlasqueue.worker(HOLDFAST_QUEUES="default") as rest:
        job_ids = {queue: [atlasqueue.submit(queue=queue) for _ in range(10)] for queue in ("mail", "default", "none")}
        atlasqueue.all_ended([*job_ids["mail"], *job_ids["default"]])
        assert atlasqueue.listed(f"{QUEUE}:none") == job_ids["none"][::-1]
    assert starts([mail]) == dict.fromkeys(job_ids["mail"], 1)
    assert starts([rest]) == dict.fromkeys(job_ids["default"], 1)


@pytest.mark.rows("A48", "X22")
def test_one_worker_takes_500_ids_oldest_first(atlasqueue: Atlasqueue) -> None:
    job_ids = atlasqueue.submit_many(500)
    with atlasqueue.worker(HOLDFAST_CONCURRENCY="1") as worker:
        atlasqueue.all_ended(job_ids)
    assert atlasqueue.value("select max(ended_at) - min(started_at) from holdfast.jobs") <= SOON
    assert [event["job_id"] for event in worker.events("handler_start")] == job_ids
    assert [event for event in worker.events() if event["level"] == "error"] == []


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────
DEFAULTS: dict[str, Any] = {
    "transport": "redis_list",
    "transport_url": "redis://redis:6379/0",
    "transport_key": "atlasqueue:jobs",
    "transport_dead_key": "atlasqueue:dlq",
    "lease": timedelta(seconds=30),
    "poll": timedelta(seconds=5),
    "sweep": timedelta(seconds=5),
    "max_attempts": 5,
    "max_attempts_limit": 25,
    "log_level": "INFO",
    "api_port": 8000,
    "metrics_port": 9091,
}
"""The document's, and what it fixes without a variable."""


MAPPED = {
    "DATABASE_URL": ("postgresql+asyncpg://u@h/d", "url", "postgresql://u@h/d"),
    "REDIS_URL": ("redis://h:1/2", "transport_url", "redis://h:1/2"),
    "JOB_QUEUE_KEY": ("a:b", "transport_key", "a:b"),
    "DLQ_KEY": ("a:c", "transport_dead_key", "a:c"),
    "WORKER_LEASE_SECONDS": ("2", "lease", timedelta(seconds=2)),
    "WORKER_POLL_TIMEOUT": ("1", "sweep", timedelta(seconds=1)),
    "RETRY_BASE_DELAY_SECONDS": ("1.5", "retry", Retry(base=1.5, factor=2, offset=0, cap=None, jitter="add:2")),
    "RETRY_JITTER_MAX_SECONDS": ("0", "retry", Retry(base=5, factor=2, offset=0, cap=None, jitter="add:0")),
    "LOG_LEVEL": ("debug", "log_level", "DEBUG"),
}


@pytest.mark.rows("A110", "A128", "A129", "A130", "A136", "A137")
def test_every_variable_maps_to_a_setting() -> None:
    from atlasqueue.config import settings

    assert {name: settings({}).get_value(name) for name in DEFAULTS} == DEFAULTS
    assert settings({}).url.startswith("postgresql://")
    for variable, (text, name, value) in MAPPED.items():
        assert settings({variable: text}).get_value(name) == value
        assert settings({variable: ""}).get_value(name) == settings({}).get_value(name)


@pytest.mark.rows("A136", "A137")
@pytest.mark.parametrize("seconds", ["1234567", "1234567.25", "0.000001", "0"])
def test_delays_are_taken_exactly(seconds: str) -> None:
    from atlasqueue.config import settings

    retry = settings({"RETRY_BASE_DELAY_SECONDS": seconds, "RETRY_JITTER_MAX_SECONDS": seconds}).retry
    assert (retry.base, retry.jitter) == (float(seconds), f"add:{seconds}")


@pytest.mark.rows("A128")
@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "DATABASE_URL",
            "sqlite:///jobs.db",
            "DATABASE_URL: AtlasQueue keeps its jobs in PostgreSQL; write postgresql:",
        ),
        ("DATABASE_URL", "postgresql+psycopg2://h/d", "DATABASE_URL: AtlasQueue keeps its jobs in PostgreSQL"),
        ("REDIS_URL", "redis", "REDIS_URL: 'redis' is not valid; write the URL of a Redis"),
        ("REDIS_URL", "http://h", "REDIS_URL: name a Redis"),
        ("DLQ_KEY", "atlasqueue:jobs", "DLQ_KEY: it is JOB_QUEUE_KEY too"),
        ("JOB_QUEUE_KEY", "atlasqueue:dlq", "DLQ_KEY: it is JOB_QUEUE_KEY too"),
        ("WORKER_LEASE_SECONDS", "0", "WORKER_LEASE_SECONDS: '0' is not valid"),
        ("RETRY_BASE_DELAY_SECONDS", "-1", "RETRY_BASE_DELAY_SECONDS: '-1' is not valid"),
        (
            "RETRY_BASE_DELAY_SECONDS",
            "1209600000",
            "RETRY_BASE_DELAY_SECONDS: 1209600000.0 is not valid; give a number",
        ),
        ("RETRY_JITTER_MAX_SECONDS", "31536001", "RETRY_JITTER_MAX_SECONDS: 31536001.0 is not valid; give a number"),
        ("HOLDFAST_METRICS_PORT", "99999", "HOLDFAST_METRICS_PORT: metrics_port: '99999' is not valid"),
        ("HOLDFAST_RETRY", "exponential:base=-1", "HOLDFAST_RETRY: retry.base: -1.0 is not valid"),
        ("LOG_LEVEL", "LOUD", "LOG_LEVEL: 'LOUD' is not valid; write one of DEBUG, INFO"),
    ],
)
def test_invalid_variable_is_named(variable: str, text: str, message: str) -> None:
    from atlasqueue.config import settings

    with pytest.raises(HoldfastError, match=rf"^(.*holdfast\.toml.*: )?{re.escape(message)}"):
        settings({variable: text})


@pytest.mark.rows("A128", "A129", "A130", "A135")
def test_error_of_a_program_names_the_variable(atlasqueue: Atlasqueue) -> None:
    """Errors that a program meets after it has read the settings name the variable, too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        worker = atlasqueue.program("atlasqueue", "worker", WORKER_METRICS_PORT=port)
        assert worker.process.wait(60) == 75
    assert worker.log().startswith(f"error: WORKER_METRICS_PORT: cannot listen on 127.0.0.1:{port}: ")
    assert worker.log().endswith("or give another WORKER_METRICS_PORT\n")
    wrong = {"DATABASE_URL": "postgresql://h:99999/d", "REDIS_URL": "redis://h:99999/0"}
    for variable, url in wrong.items():
        refused = atlasqueue.program("atlasqueue", "migrate", **{variable: url})
        assert refused.process.wait(60) != 0
        assert refused.log().startswith(f"error: {variable}: 'h:99999' ")


@pytest.mark.rows("A131", "A132", "A138")
def test_environment_sets_keys_and_log_levels(atlasqueue: Atlasqueue) -> None:
    named = {"JOB_QUEUE_KEY": "other:jobs", "DLQ_KEY": "other:dlq"}
    app = atlasqueue.application(**named)
    dead = app.sync.enqueue("no.handler", key="dead", max_attempts=1).id
    assert (atlasqueue.listed("other:jobs"), atlasqueue.listed()) == ([dead], [])
    with atlasqueue.worker(LOG_LEVEL="INFO", **named) as message:
        app.sync.enqueue("test.submit", {"keys": ["a", "b", "a"]}).sync.result(timeout=60)
        until(lambda: atlasqueue.listed("other:dlq") == [dead], "the dead letter")
    with atlasqueue.worker(LOG_LEVEL="WARNING", **named) as quiet:
        app.sync.enqueue("test.submit", {"keys": ["c", "d"]}).sync.result(timeout=60)
    app.sync.close()
    assert len(message.events("job_created")) == 2
    assert quiet.events() == []
    refused = atlasqueue.program("atlasqueue", "worker", LOG_LEVEL="LOUD")
    assert refused.process.wait(60) == 2
    assert refused.log().startswith("error: LOG_LEVEL: 'LOUD' is not valid; write one of DEBUG, INFO")


@pytest.mark.rows("A118", "A121")
def test_new_handlers_need_only_a_new_worker(atlasqueue: Atlasqueue) -> None:
    """Its module stands where the worker starts; its submitter was there before, and stays."""
    with atlasqueue.worker(RETRY_BASE_DELAY_SECONDS="3600"):
        job_id = atlasqueue.submit("invoice.generate", {"invoice_id": 5})
        assert "no task 'invoice.generate'" in atlasqueue.when(job_id, "failed")["last_error"]
    (atlasqueue.folder / "invoices.py").write_text(INVOICES, encoding="utf-8")
    with atlasqueue.worker(HANDLER_MODULES="tests.examples.atlasqueue_handlers, invoices"):
        atlasqueue.due(job_id)
        assert atlasqueue.app.handle(job_id).sync.result(timeout=60) == 5
        assert atlasqueue.post("test.echo", {}).sync.result(timeout=60) == {}


INVOICES = """
from atlasqueue.worker.handlers import register

@register("invoice.generate")
async def generate_invoice(payload: dict) -> int:
    return payload["invoice_id"]
"""
