"""The AtlasQueue example while its servers are stopped, emptied and killed. Tests are named by the rows they prove."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from redis.client import Monitor

from holdfast import Unavailable
from tests.examples.atlasqueue_support import DEAD, QUEUE, Api, Atlasqueue, starts
from tests.examples.common import quickest, until
from tests.support.postgres import FLOOR, Postgres
from tests.support.redis import Redis

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Postgres, Redis]]:
    """A PostgreSQL and a Redis that may be stopped; each test leaves them running."""
    with Postgres(FLOOR) as postgres, Redis() as redis:
        yield postgres, redis


@pytest.fixture
def mortal(servers: tuple[Postgres, Redis], tmp_path: Path) -> Iterator[Atlasqueue]:
    queue = Atlasqueue(*servers, tmp_path)
    yield queue
    queue.close()


@pytest.mark.rows("A8", "A26", "A27", "A41", "A55", "A56", "X26")
def test_nothing_is_lost_while_redis_is_down(mortal: Atlasqueue) -> None:
    with mortal.worker(HOLDFAST_QUEUES="aside") as worker:  # it looks after everything, and runs none of these jobs
        mortal.redis.stop()
        job_id = mortal.submit(key="while-redis-is-down")
        assert mortal.row(job_id)["status"] == "queued"
        assert (mortal.post(key="while-redis-is-down").id, mortal.app.sync.get(job_id).id) == (job_id, job_id)
        assert worker.wait_for_events("transport_away")[0]["error"]
        mortal.redis.start()
        until(lambda: mortal.listed() == [job_id], "the sweep after Redis has come back")
        again = mortal.post(key="while-redis-is-down")
        assert (again.id, again.created) == (job_id, False)
        assert worker.process.poll() is None
    with mortal.worker() as second:
        mortal.all_ended([job_id])
    assert starts([worker, second]) == {job_id: 1}


@pytest.mark.rows("A8", "A26", "A27", "A55", "A57", "A117", "X26")
def test_api_accepts_and_reports_while_servers_are_down(mortal: Atlasqueue) -> None:
    with mortal.api() as api, mortal.worker(HOLDFAST_QUEUES="aside") as worker:
        accepted = api.submit(key="before")
        mortal.redis.stop()
        unheard = api.post(key="redis-is-down")
        assert (unheard.status_code, unheard.json()["code"]) == (503, "unheard")
        assert unheard.headers["retry-after"] == "2"
        assert unheard.json()["request_id"] == unheard.headers["x-request-id"]
        job = api.job("key:redis-is-down")
        assert api.job(job["id"]) == job
        assert (job["status"], mortal.row(job["id"])["status"]) == ("queued", "queued")
        mortal.redis.start()
        until(lambda: job["id"] in mortal.listed(), "the sweep after Redis has come back")
        again = api.post(key="redis-is-down")
        assert (again.status_code, again.json()["id"]) == (200, job["id"])
        assert api.post().status_code == 201
        _while_postgresql_is_down(mortal, api)
        again = api.post(key="postgresql-is-down")
        assert again.status_code == 201
        until(lambda: worker.process.poll() is None and mortal.value("select true"), "the worker, alive")
    with mortal.worker() as second:
        mortal.all_ended([accepted, job["id"], again.json()["id"]])
    assert starts([second])[job["id"]] == 1


def _while_postgresql_is_down(mortal: Atlasqueue, api: Api) -> None:
    mortal.server.stop()
    refused: list[httpx.Response] = []
    assert quickest(lambda: refused.append(api.post(key="postgresql-is-down")), within=5) <= 5
    assert {(each.status_code, each.headers["retry-after"]) for each in refused} == {(503, "2")}
    (reported, *_) = api.wait_for_events("store_trouble")
    assert (reported["level"], reported["service"]) == ("error", "api")
    health = api.client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "service": "atlasqueue-api"})
    assert api.client.get("/health/ready").status_code == 503
    mortal.server.start()
    until(lambda: api.client.get("/health/ready").status_code == 200, "the API, ready again")


@pytest.mark.rows("A41", "A56")
def test_workers_poll_while_redis_is_down_and_recover(mortal: Atlasqueue) -> None:
    with mortal.worker() as worker:
        mortal.redis.stop()
        mortal.all_ended(mortal.submit_many(20))
        failing = mortal.submit("test.fail", max_attempts=2)
        mortal.when(failing, "dead")
        mortal.redis.start()
        until(lambda: mortal.listed(DEAD) == [failing], "the mirror of the dead letters")
        mortal.all_ended([mortal.submit()])
        until(lambda: mortal.command("CLIENT", "LIST").count("cmd=b") > 0, "a worker that blocks on the list again")
        worker.wait_for_events("transport_back")
    assert [event["event"] for event in worker.events() if event["level"] == "error"] == ["job_dead"]


@pytest.mark.rows("A57")
def test_nothing_is_lost_while_postgresql_is_down(mortal: Atlasqueue, tmp_path: Path) -> None:
    with mortal.worker(WORKER_LEASE_SECONDS="2") as worker:
        held = mortal.submit("test.wait", {"until": str(tmp_path / "open")})
        mortal.when(held, "running")
        waiting = mortal.unheard(20, delay=1)
        mortal.server.stop()
        assert quickest(lambda: _refused(mortal), within=5) <= 5
        assert worker.wait_for_events("store_trouble")[0]["level"] == "error"
        mortal.server.start()
        (tmp_path / "open").touch()
        assert mortal.post(key="while-postgresql-is-down").created
        mortal.all_ended([held, *waiting])
        assert worker.process.poll() is None


def _refused(mortal: Atlasqueue) -> None:
    with pytest.raises(Unavailable) as refused:
        mortal.post(key="while-postgresql-is-down")
    assert refused.value.http_status == 503


@pytest.mark.rows("A41")
def test_queued_jobs_survive_the_loss_of_all_redis_has(mortal: Atlasqueue) -> None:
    job_ids = mortal.submit_many(200)
    mortal.command("FLUSHALL")
    assert (mortal.listed(), mortal.sql("select status, count(*) from jobs group by 1")) == ([], [("queued", 200)])
    with mortal.worker() as worker:
        mortal.all_ended(job_ids)
    assert starts([worker]) == dict.fromkeys(job_ids, 1)


@pytest.mark.rows("A29", "A41")
def test_every_job_ends_after_chaos(mortal: Atlasqueue) -> None:
    """Redis is emptied, a worker killed, Redis killed, PostgreSQL killed."""
    with mortal.workers(3, WORKER_LEASE_SECONDS="3", HOLDFAST_CONCURRENCY="2") as workers:
        job_ids = mortal.submit_many(450)
        job_ids += mortal.submit_many(50, "test.fail")
        mortal.command("FLUSHALL")
        workers[0].kill()
        mortal.redis.kill()
        mortal.redis.start()
        mortal.server.kill()
        mortal.server.start()
        ended = "select count(*) from jobs where status in ('succeeded', 'dead')"
        until(lambda: mortal.value(ended) == len(job_ids), "the end of every job")
        assert dict(mortal.sql("select status, count(*) from jobs group by 1")) == {"succeeded": 450, "dead": 50}
        until(lambda: len(mortal.listed(DEAD)) == 50, "the dead letters")
        assert len(set(mortal.listed(DEAD))) == 50
    lost = {event["job_id"] for worker in workers for event in worker.events("job_failed", "lease_lost")}
    twice = {job_id for job_id, times in starts(workers).items() if times > 1}
    assert twice <= lost


@pytest.mark.rows("A12", "A39")
def test_idle_worker_blocks_on_the_list(mortal: Atlasqueue) -> None:
    with mortal.worker(WORKER_POLL_TIMEOUT="5") as worker:
        mortal.all_ended([mortal.submit()])
        process = psutil.Process(worker.process.pid)
        until(lambda: "cmd=b" in mortal.command("CLIENT", "LIST"), "a blocked reader")
        with mortal.redis.client() as own, mortal.redis.client() as client:
            own.ping()
            with client.monitor() as monitor:
                used, began = _cpu(process), time.monotonic()
                time.sleep(15)  # some sweeps are among it
                seconds = time.monotonic() - began
                own.echo("over")
                sent = list(_sent(monitor))
        once = sum(words.startswith("SCRIPT LOAD") for words in sent)  # a script's first call is made twice
        assert (len(sent) - 2 * once) / seconds < 2
        assert (_cpu(process) - used) / seconds < 0.02


def _sent(monitor: Monitor) -> Iterator[str]:
    """Input of clients, until ``ECHO``."""
    for reported in monitor.listen():
        if reported["command"].startswith("ECHO"):
            return
        if reported["client_type"] != "lua":
            yield reported["command"]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@pytest.mark.rows("A68")
def test_submission_and_sweep_push_ids(mortal: Atlasqueue) -> None:
    seen: list[str] = []
    with mortal.redis.client() as client, client.monitor() as monitor:
        submitted = mortal.submit()
        (unheard,) = mortal.unheard()
        with mortal.worker():
            mortal.all_ended([submitted, unheard])
        mortal.command("ECHO", "over")
        for reported in monitor.listen():
            seen.append(reported["command"])
            if reported["command"].startswith("ECHO"):
                break
    pushes = [words.split() for words in seen if words.upper().startswith("LPUSH")]
    assert [words[2:] for words in pushes if words[1] == QUEUE] == [[submitted], [unheard]]
