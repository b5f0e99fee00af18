"""Atlas Jobs at work: real instances, failing jobs, kills. Tests are named by the rows they prove."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import Holdfast, JobState
from holdfast.core.models import to_datetime
from tests.examples.atlas_support import EXAMPLE, Atlas, Instance, held
from tests.examples.common import until
from tests.examples.programs import ROOT
from tests.support.postgres import Postgres

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

FOR_EVER = "demo.sleep", '{"seconds": 600}'


# ── one job's life ────────────────────────────────────────────────────────────────────────────────────────────────
def _agreed(atlas: Atlas, instance: Instance, job_id: str) -> dict[str, Any]:
    """The job as row and as answer: the same, unless it moved between the two looks."""
    while True:
        before, given, after = atlas.row(job_id), instance.job(job_id), atlas.row(job_id)
        if before == after:
            assert given == before
            return given


@pytest.mark.rows("J11", "J21", "J29", "J42", "J43", "J45", "J50", "J51")
def test_slow_job_is_the_same_in_table_and_answer(atlas: Atlas) -> None:
    with atlas.one(ATLAS_SCHEDULING_ENABLED="false") as api, held() as (payload, allowed):
        job_id = api.submit("api.call", payload)
        seen = [_agreed(atlas, api, job_id)]
        with atlas.running("worker-1", HOLDFAST_RETRY="1h"):
            api.when(job_id, "RUNNING")
            seen.append(_agreed(atlas, api, job_id))
            allowed.set()
            api.when(job_id, "SUCCEEDED")
            seen.append(_agreed(atlas, api, job_id))
            paid, failed = api.submit("payment.charge", '{"amount": 5}'), api.submit("file.process", '{"path": "/"}')
            api.when(paid, "SUCCEEDED")
            assert "Is a directory" in api.when(failed, "QUEUED", 1)["last_error"]
        assert [each["status"] for each in seen] == ["QUEUED", "RUNNING", "SUCCEEDED"]
        assert [each["worker_id"] for each in seen] == [None, "worker-1", "worker-1"]
        assert [each["attempt_count"] for each in seen] == [0, 0, 0]
        assert all(later["updated_at"] > earlier["updated_at"] for earlier, later in pairwise(seen))
        assert {each["job_type"] for each in seen} == {"api.call"}
        assert atlas.value("select result::json ->> 'charge' from holdfast.job where id = %s", paid) == paid


@pytest.mark.rows("J51")
def test_updated_at_stays_after_the_three_changes_of_the_readme(atlas: Atlas) -> None:
    app = atlas.application()
    with atlas.one(ATLAS_SCHEDULING_ENABLED="false") as api:
        job_id = api.submit("demo.sleep", '{"seconds": 600}')
        with atlas.running("worker-1"):
            claimed = api.when(job_id, "RUNNING")["updated_at"]
        api.when(job_id, "QUEUED")
        seen = [_agreed(atlas, api, job_id)["updated_at"]]
        app.sync.edit(job_id, delay=3600)
        seen.append(_agreed(atlas, api, job_id)["updated_at"])
        app.sync.cancel(job_id)
        assert _agreed(atlas, api, job_id)["updated_at"] > claimed
        app.sync.replay([job_id])
        seen.append(_agreed(atlas, api, job_id)["updated_at"])
    app.sync.close()
    assert seen == [claimed] * 3
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert "an edit (of its time, payload, priority), its release by an instance that stops, and a replay" in readme


def _waits(app: Holdfast, instance: Instance, job_id: str, failures: int) -> float:
    """The seconds that a job which has failed so often is made to wait."""
    job = instance.when(job_id, "QUEUED", failures)
    assert job["attempt_count"] == failures
    assert job["last_error"] == "no: not today"
    assert job["worker_id"] == "worker-8080"
    failed_at = to_datetime(app.sync.attempts(job_id)[-1].ended_at_us)
    wait: timedelta = job["next_run_at"] - failed_at
    return wait.total_seconds()


@pytest.mark.rows("J9", "J22", "J23", "J29", "J30", "J31", "J32", "J45", "J48", "J49", "J62", "J63")
def test_failing_job_is_retried_twice_and_becomes_dead(atlas: Atlas) -> None:
    """After each attempt the instance is kept busy by another job, so that none is missed."""
    app = atlas.application()
    drafts = [
        app.draft_job(name, {"payload": text})
        for name, text in (("demo.fail", '{"message": "no: not today"}'), FOR_EVER)
    ]
    job_id, busy = [handle.id for handle in app.sync.enqueue_many(drafts)]
    with atlas.one() as instance:
        for failures, (least, most) in enumerate([(3.5, 5.0), (10.5, 15.0)], 1):
            assert least <= _waits(app, instance, job_id, failures) <= most
            atlas.due(job_id)
            then = instance.submit(*FOR_EVER)
            app.sync.cancel(busy)
            busy = then
        dead = instance.when(job_id, "DEAD_LETTERED")
        assert (dead["attempt_count"], dead["max_attempts"], dead["last_error"]) == (3, 3, "no: not today")
        history = [(each.attempt, each.state) for each in app.sync.attempts(job_id)]
        assert history == [(1, JobState.FAILED), (2, JobState.FAILED), (3, JobState.DEAD)]
        instance.when(busy, "RUNNING")
        assert instance.job(job_id)["status"] == "DEAD_LETTERED"
    app.sync.close()


RUNNING_LAST = "select 1 from jobs where status = 'RUNNING' and job_type = 'demo.sleep'"
WAITS = """select (j.run_at - a.ended_at) / 1e6::float
    from holdfast.job j join holdfast.attempt a on a.job_id = j.id and a.attempt = 1"""


@pytest.mark.rows("J8", "J32", "J33")
def test_jobs_that_fail_together_are_retried_spread_out(atlas: Atlas) -> None:
    app = atlas.application()
    failing = [app.draft_job("demo.fail", {"payload": '{"message": "no"}'}) for _ in range(120)]
    app.sync.enqueue_many([*failing, app.draft_job(FOR_EVER[0], {"payload": FOR_EVER[1]})])
    app.sync.close()
    with atlas.one():
        until(lambda: atlas.sql(RUNNING_LAST) and len(atlas.sql(WAITS)) == 120, "120 failures")
        seconds = [wait for (wait,) in atlas.sql(WAITS)]
    assert 3.5 <= min(seconds) <= max(seconds) <= 5.0
    assert max(seconds) - min(seconds) >= 1.2


def test_every_event_has_a_job_for_each_handler(atlas: Atlas) -> None:
    """Two events of one name; each fails after its first handler, so that a second attempt begins anew."""
    payload = '{"event": "paid", "handlers": ["demo.sleep", ""], "seconds": 0}'
    with atlas.one() as instance:
        events = [instance.submit("event.handle", payload, max_attempts=2) for _ in range(2)]
        for event in events:
            instance.when(event, "QUEUED", 1)
        atlas.due(*events)
        for event in events:
            instance.when(event, "DEAD_LETTERED", 2)
    keys = atlas.sql("select idempotency_key from jobs where job_type = 'demo.sleep' order by 1")
    assert keys == sorted((f"{event}/demo.sleep",) for event in events)


# ── claiming ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("J7", "J24")
def test_jobs_start_in_order_and_locked_ones_are_skipped(atlas: Atlas) -> None:
    with atlas.one(ATLAS_SCHEDULING_ENABLED="false") as api:
        job_ids = [api.submit() for _ in range(12)]
        with psycopg.connect(atlas.url) as holder:
            holder.execute("select from holdfast.job where id = %s for update", [job_ids[0]])
            with atlas.running("worker-1") as (worker,):
                api.all_ended(job_ids[1:])
                assert api.job(job_ids[0])["status"] == "QUEUED"
                holder.rollback()
                api.all_ended(job_ids)
                until(lambda: worker.starts() == [*job_ids[1:], job_ids[0]], "starts in order")


@pytest.mark.rows("J25")
def test_job_never_starts_before_its_time(atlas: Atlas) -> None:
    app = atlas.application()
    with atlas.one() as instance:
        delays = [0.3, 0.7, 1.1, 1.5, 1.9, 2.0, 3600]
        handles = [app.sync.enqueue("demo.sleep", {"payload": '{"seconds": 0}'}, delay=delay) for delay in delays]
        retried = instance.submit("demo.fail", '{"message": "no", "times": 1}')
        instance.all_ended([*(handle.id for handle in handles[:-1]), retried])
        assert instance.job(handles[-1].id)["status"] == "QUEUED"
        assert handles[-1].id not in instance.starts()
        assert atlas.sql("select id from holdfast.job where started_at < run_at") == []
    app.sync.close()


@pytest.mark.rows("J26")
def test_two_processes_never_claim_the_same_job(atlas: Atlas) -> None:
    rounds, jobs = 100, 20
    app = atlas.application()
    app.sync.migrate()
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.examples.atlas_racer", atlas.url, name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    won: Counter[str] = Counter()
    with racers[0] as first, racers[1] as second:
        assert [_heard(racer) for racer in (first, second)] == [["ready"]] * 2
        for round_ in range(rounds):
            drafts = [app.draft_job("demo.sleep", {"payload": "{}"}) for _ in range(jobs)]
            submitted = [handle.id for handle in app.sync.enqueue_many(drafts)]
            for racer in (first, second) if round_ % 2 else (second, first):
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            claimed = {name: _heard(racer) for name, racer in zip(("one", "two"), (first, second), strict=True)}
            assert Counter(chain.from_iterable(claimed.values())) == dict.fromkeys(submitted, 1), f"round {round_}"
            won.update({name: len(ids) for name, ids in claimed.items()})
    assert min(won["one"], won["two"]) > 0, "it was no race"
    app.sync.close()


def _heard(racer: subprocess.Popen[str]) -> list[str]:
    assert racer.stdout is not None
    return racer.stdout.readline().split()


# ── a fleet ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("J6", "J64", "J80")
def test_two_instances_share_twenty_jobs(atlas: Atlas) -> None:
    with atlas.running("worker-8080", "worker-8081") as instances:

        def both_have_worked() -> bool:
            job_ids = instances[0].submit_many(20, "demo.sleep", '{"seconds": 0.05}')
            instances[1].all_ended(job_ids)
            _check_each_once(atlas, instances, job_ids)
            by_worker = instances[0].get("/metrics").document["byWorker"]
            assert by_worker.keys() <= {"worker-8080", "worker-8081"}
            return len(by_worker) == 2

        until(both_have_worked, "jobs of both instances")


@pytest.mark.rows("J6", "J16", "J19")
def test_four_instances_are_four_times_as_fast(atlas: Atlas) -> None:
    app = atlas.application()
    with atlas.running("a", "b", "c", "d") as instances:
        # Long enough that an instance is idle while its jobs run, so that a busy machine does not decide who gets them.
        shared = _submitted(app, 200, 0.2)
        instances[0].all_ended(shared)
        _check_each_once(atlas, instances, shared)
        assert min(len(set(each.starts()).intersection(shared)) for each in instances) >= 30
        # One instance would need the sum of what the jobs took: that is the control, of the same jobs.
        together = _submitted(app, 40, 1.0)
        instances[0].all_ended(together)
        ((one_by_one, span),) = atlas.sql(SPANS, together)
        assert one_by_one >= 3.2 * span
    app.sync.close()


SPANS = """select sum(ended_at - started_at), max(ended_at) - min(started_at) from holdfast.job
    where id = any(%s::uuid[])"""


def _submitted(app: Any, count: int, seconds: float) -> list[str]:
    drafts = [app.draft_job("demo.sleep", {"payload": f'{{"seconds": {seconds}}}'}) for _ in range(count)]
    return [handle.id for handle in app.sync.enqueue_many(drafts)]


def _check_each_once(atlas: Atlas, instances: Sequence[Instance], job_ids: Sequence[str]) -> None:
    """No handler began twice, and the rows say who ran them."""

    def started() -> Counter[str]:
        return Counter(job_id for each in instances for job_id in each.starts() if job_id in wanted)

    wanted = set(job_ids)
    until(lambda: len(started()) == len(wanted), "the log lines of all starts")
    assert started() == dict.fromkeys(job_ids, 1)
    workers = dict(atlas.sql("select job_id::text, worker_id from jobs"))
    for each in instances:
        assert {workers[job_id] for job_id in each.starts() if job_id in wanted} <= {each.worker_id}


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _stored(atlas: Atlas) -> dict[str, dict[str, Any]]:
    return {job_id: atlas.row(job_id) for (job_id,) in atlas.sql("select job_id::text from jobs")}


@pytest.mark.rows("J28")
def test_jobs_continue_as_stored_after_everything_is_killed(tmp_path: Path) -> None:
    with (
        Postgres() as server,
        held() as (payload, allowed),
        closing(Atlas(server, tmp_path)) as atlas,
        atlas.one(HOLDFAST_SWEEP="200ms", HOLDFAST_RETRY="1h") as instance,
    ):
        done, retried = instance.submit(), instance.submit("demo.fail", '{"message": "no", "times": 1}')
        instance.all_ended([done])
        instance.when(retried, "QUEUED", 1)
        interrupted = instance.submit("api.call", payload, max_attempts=5)
        waiting = [instance.submit(key=f"key-{number}") for number in range(5)]
        instance.when(interrupted, "RUNNING")
        instance.kill()
        before = _stored(atlas)
        server.kill()
        server.start()
        assert _stored(atlas) == before
        atlas.sql("update holdfast.job set lease_until = 0 where state = 2")  # half a minute goes by
        instance.start()
        instance.ready()
        allowed.set()
        instance.all_ended([interrupted, *waiting])
        assert before[interrupted]["status"] == "RUNNING"
        assert instance.job(interrupted)["attempt_count"] == 1, "the attempt that was killed"
        assert atlas.row(done) == before[done]
        assert instance.post(key="key-3").document["job_id"] == waiting[3]
        atlas.due(retried)
        instance.all_ended([retried])
        server.kill()
        away = instance.post()
        assert (away.status, away.document) == (503, {"error": "this cannot be done just now; the log says why"})
        server.start()
