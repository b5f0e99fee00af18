"""The `streams` example's workers: killed, frozen, replaced. Leases and the visibility timeout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.examples.common import until
from tests.examples.programs import Program
from tests.examples.streams_support import GROUP, Service, Streams
from tests.support.load import slowness

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
LEASE, SWEEP = 2, 1
QUICK = {"HOLDFAST_LEASE": f"{LEASE}s", "HOLDFAST_HEARTBEAT": "500ms", "HOLDFAST_SWEEP": f"{SWEEP}s"}
LONGER = 8
PATIENT = QUICK | {"HOLDFAST_LEASE": f"{LONGER}s"}
"""Of a worker that is to keep its leases: a busy machine may keep it from renewing short ones."""


def wait_started(service: Service, job_id: str, times: int = 1) -> None:
    """Waits until the job was started that often."""
    until(lambda: service.executions(job_id)[job_id] >= times, f"start {times} of job {job_id}")


def wait_pending(service: Service, queue: str, job_id: str, worker: Program) -> None:
    """Waits until XPENDING names this worker for the job."""
    until(lambda: f"-{worker.process.pid}-" in service.pending(queue).get(job_id, ""), "the pending entry")


@pytest.mark.rows("S5", "S13", "S14", "S75")
def test_stream_has_a_group_with_one_consumer_per_worker(streams: Streams, tmp_path: Path) -> None:
    service, door, key = streams.notifications, tmp_path / "open", "notifications:jobs:group"
    first = service.submit(queue="group", until=str(door))
    assert (service.entries("group"), service.redis.type(key)) == ([first], "stream")
    with streams.workers("notifications", 2, "group", HOLDFAST_CONCURRENCY="1") as workers:
        second = service.submit(queue="group", until=str(door))
        for job_id in (first, second):
            wait_started(service, job_id)
        pending = service.pending("group")
        assert pending.keys() == {first, second}
        assert [group["name"] for group in service.redis.xinfo_groups(key)] == [GROUP]
        consumers = service.redis.xinfo_consumers(key, GROUP)  # a worker of another queue that sweeps may be there, too
        busy = [each["name"] for each in consumers if each["pending"]]
        assert sorted(name.split("-")[-2] for name in busy) == sorted(str(each.process.pid) for each in workers)
        assert len({each["name"].split("-")[-2] for each in consumers}) == len(consumers)
        assert set(pending.values()) == set(busy)
        door.touch()
        service.all_ended([first, second])
        until(lambda: not service.pending("group"), "the acknowledgements")


@pytest.mark.rows("S6")
def test_jobs_of_two_services_run_at_the_same_time(streams: Streams, tmp_path: Path) -> None:
    door = tmp_path / "open"
    jobs = [(service, service.submit(until=str(door))) for service in streams.services.values()]
    for service, job_id in jobs:
        wait_started(service, job_id)
    assert [streams.status(job_id) for _, job_id in jobs] == ["processing", "processing"]
    door.touch()
    for service, job_id in jobs:
        service.wait_for(job_id, "succeeded")


@pytest.mark.rows("S2", "S34", "S42", "S43", "S68")
def test_job_of_a_killed_worker_goes_to_another(streams: Streams, tmp_path: Path) -> None:
    """It starts again within lease + sweep + 2 s. XPENDING moves it to the other consumer. Its effect is made once."""
    service, door = streams.notifications, tmp_path / "open"
    with streams.worker("notifications", "killed", **QUICK) as first:
        job_id = service.submit(queue="killed", until=str(door))
        wait_started(service, job_id)
        wait_pending(service, "killed", job_id, first)
        with streams.worker("notifications", "killed", **QUICK) as second:
            slow = slowness()
            first.kill()
            killed = time.monotonic()
            wait_started(service, job_id, 2)
            assert time.monotonic() - killed <= (LEASE + SWEEP + 2) * max(slow, slowness())
            wait_pending(service, "killed", job_id, second)
            assert service.effects(job_id) == {}
            door.touch()
            service.wait_for(job_id, "succeeded")
            until(lambda: not service.pending("killed"), "the acknowledgement")
    assert service.executions(job_id)[job_id] >= 2  # more where the second worker is starved past its lease
    assert service.effects(job_id) == {job_id: 1}


@pytest.mark.rows("S19")
def test_result_survives_a_kill_before_the_acknowledgement(streams: Streams) -> None:
    service = streams.notifications
    with streams.worker("notifications", "unacked", **QUICK) as first:
        job_id = service.submit(queue="unacked", kill_after_commit=True)
        first.process.wait(90)
    assert first.process.returncode == -signal.SIGKILL
    result = streams.wait_for_status(job_id, "completed")["result"]
    assert (result, list(service.pending("unacked"))) == (1, [job_id])
    with streams.worker("notifications", "unacked", **QUICK):
        until(lambda: not service.pending("unacked"), "the acknowledgement by another worker")
    assert streams.wait_for_status(job_id, "completed")["result"] == result
    assert (service.executions(job_id), service.effects(job_id)) == ({job_id: 1}, {job_id: 1})


@pytest.mark.rows("S44")
def test_job_longer_than_its_lease_runs_once(streams: Streams) -> None:
    service = streams.notifications
    with streams.workers("notifications", 2, "long", **PATIENT):
        job_id = service.submit(queue="long", seconds=2.5 * LONGER)
        job = service.wait_for(job_id, "succeeded")
    assert job.ended_at_us - (job.started_at_us or 0) > 2 * LONGER * 1_000_000
    assert (job.claims, service.executions(job_id), service.effects(job_id)) == (1, {job_id: 1}, {job_id: 1})


@pytest.mark.rows("S45")
def test_frozen_worker_changes_nothing_when_it_wakes(streams: Streams, tmp_path: Path) -> None:
    service, door = streams.notifications, tmp_path / "open"
    with streams.worker("notifications", "frozen", **QUICK) as first:
        job_id = service.submit(queue="frozen", until=str(door))
        wait_started(service, job_id)
        os.kill(first.process.pid, signal.SIGSTOP)
        with streams.worker("notifications", "frozen", **QUICK):
            wait_started(service, job_id, 2)
            door.touch()
            ended = service.wait_for(job_id, "succeeded")
            os.kill(first.process.pid, signal.SIGCONT)
            first.wait_for_events("lease_lost")
    assert service.job(job_id) == ended
    assert (service.executions(job_id), service.effects(job_id)) == ({job_id: 2}, {job_id: 1})


@pytest.mark.rows("S46")
def test_one_new_worker_finishes_what_all_killed_ones_left(streams: Streams, tmp_path: Path) -> None:
    service, door = streams.notifications, tmp_path / "open"
    with streams.workers("notifications", 2, "left", HOLDFAST_CONCURRENCY="3", **QUICK) as workers:
        jobs = service.submit_many(12, "left", until=str(door))
        until(lambda: sum(service.executions(*jobs).values()) == 6, "six running jobs")
        for worker in workers:
            worker.kill()
        door.touch()
    with streams.worker("notifications", "left", **QUICK):
        service.all_ended(jobs)
        until(lambda: not service.pending("left"), "the acknowledgements")
    assert service.effects(*jobs) == dict.fromkeys(jobs, 1)


@pytest.mark.rows("S12")
def test_every_worker_is_replaced_without_a_loss(streams: Streams, tmp_path: Path) -> None:
    """Old workers give back what they run; new ones have no state but that of PostgreSQL and Redis."""
    service, door, settings = streams.notifications, tmp_path / "open", {**QUICK, "HOLDFAST_CONCURRENCY": "2"}
    with streams.workers("notifications", 2, "replaced", **settings) as old:
        before = service.submit_many(10, "replaced")
        service.all_ended(before)
        jobs = service.submit_many(20, "replaced", until=str(door))
        until(lambda: sum(service.executions(*jobs).values()) == 4, "four running jobs")
        with streams.workers("notifications", 2, "replaced", **settings):
            for worker in old:
                worker.process.terminate()
                assert worker.process.wait(90) == 0
            door.touch()
            service.all_ended(jobs)
    assert service.effects(*before, *jobs) == dict.fromkeys([*before, *jobs], 1)


@pytest.mark.rows("S48")
def test_state_manager_gets_the_last_step_and_its_data(streams: Streams) -> None:
    from streams.state import Checkpoint, StateManager

    service, email = streams.users, "State@example.com"
    state = StateManager(service.app)

    def last(job_id: str) -> Checkpoint | None:
        return service.app.run_blocking(state.get(job_id))

    refused = service.submit("user.create", email="nobody", name="Ada")
    service.wait_for(refused, "dead")
    assert last(refused) is None
    created = streams.wait_for_status(streams.create_user(email), "completed")
    assert last(created["job_id"]) == Checkpoint(step="welcome", data=created["result"]["welcome_job_id"])
    again = streams.create_user(email)
    service.wait_for(again, "dead")
    assert last(again) == Checkpoint(step="validate", data=email.lower()), "the next step has failed"


@pytest.mark.rows("S2", "S34", "S68")
@pytest.mark.parametrize("point", ["step.before:kill@2", "step.after:kill@2"])
def test_workflow_interrupted_at_a_step_has_each_effect_once(streams: Streams, point: str) -> None:
    """Partial execution: the worker is killed when the welcome job is started, before or after that is recorded."""
    service, email = streams.users, f"{point}@example.com".replace(":", "-").replace("@2", "")
    job = {"email": email, "name": "Ada"}
    with streams.worker("users", "interrupted", HOLDFAST_FAULTS=point, **QUICK) as first:
        job_id = service.submit("user.create", "interrupted", **job)
        first.process.wait(90)
    assert first.process.returncode == -signal.SIGKILL
    with streams.worker("users", "interrupted", **PATIENT):
        welcome = streams.wait_for_status(job_id, "completed")["result"]["welcome_job_id"]
    streams.wait_for_status(welcome, "completed")
    assert service.job(job_id).attempts == 2
    assert [step.name for step in service.app.sync.steps(job_id)] == ["validate", "store", "provision", "welcome"]
    accounts = "select count(*) from users join accounts on accounts.user_id = users.id where email = %s"
    assert service.value(accounts, email) == 1
    assert streams.notifications.value("select count(*) from deliveries where email = %s", email) == 1
