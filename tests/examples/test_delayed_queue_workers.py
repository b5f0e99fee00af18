"""Delayed Queue's workers: roles, kills, a fair share. Tests are named by the rows of the requirements they prove."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from holdfast.job import as_ulid, new_id
from tests.examples.common import PATIENCE, until
from tests.examples.delayed_support import DATABASE, LEADER, SECOND, Delayed, Program, in_time, lateness

pytestmark = pytest.mark.timeout(400)

FOLLOWER: list[str] = []
"""Nothing is said: the settings say it."""
FOR_EVER = 600.0
LONG_AGO = 1_577_836_800 * SECOND
"""A due time that makes a job ready at once, leader or not."""


# ── a leader alone ────────────────────────────────────────────────────────────────────────────────────────────────
def test_d20_d23_d27_d31_d41_one_leader_moves_and_runs_everything_when_it_is_due(delayed: Delayed) -> None:
    with delayed.workers(LEADER) as (leader,):
        delayed.app.sync.pause("default")
        in_time(lambda: _moved(delayed), 1.0, "a move to dueJobs, where nobody takes it")
        delayed.app.sync.resume("default")
        in_time(lambda: _ran(delayed, leader), 1.5, "a lateness")


def _moved(delayed: Delayed) -> float:
    """Seconds from a job's due time until it is seen in the list."""
    due = delayed.now() + SECOND // 2
    (job_id,) = delayed.submit(due)
    assert delayed.place(job_id) == ["jobs"] or delayed.now() >= due
    until(lambda: delayed.place(job_id) == ["dueJobs"], "the job's move")
    seen = delayed.now()
    assert seen >= due
    return (seen - due) / SECOND


def _ran(delayed: Delayed, leader: Program) -> float:
    """How late the latest of twenty jobs is, which run in the order of their due times."""
    begin = delayed.now() + SECOND // 4
    dues = [begin + number * SECOND // 50 for number in range(20)]
    shuffled = random.sample(dues, len(dues))
    by_due = dict(zip(shuffled, delayed.submit(*shuffled), strict=True))
    ids = [by_due[due] for due in dues]
    jobs = delayed.all_ended(ids)
    assert delayed.client.llen("delayed-queue:unackedJobs") == 0
    until(lambda: set(ids) <= set(leader.starts()), "the log lines of all starts")
    assert [each for each in leader.starts() if each in by_due.values()] == ids
    return lateness(jobs)


def test_d26_d38_d44_an_idle_worker_blocks_and_runs_what_is_pushed_by_hand(delayed: Delayed) -> None:
    def pushed() -> float:
        job_id, now = as_ulid(new_id()), delayed.now()
        fields = {"payload": '{"payload": "by hand"}', "dueTime": now}
        delayed.client.hset(f"delayed-queue:job:{job_id}", mapping=fields)
        delayed.client.lpush("delayed-queue:dueJobs", job_id)
        (job,) = delayed.all_ended([job_id])
        return (int(job["pickupTime"]) - now) / SECOND

    def commands() -> float:
        return len(delayed.overheard(2.5)) / 2.5

    def listening() -> bool:
        clients = [each["cmd"] for each in delayed.client.client_list() if each["db"] == str(DATABASE)]
        return "blmove" in clients and clients.count("subscribe") == 2

    with delayed.workers(LEADER):  # a follower has less to say
        until(listening, "a worker that blocks, and its keeper")
        in_time(commands, 2.0, "commands a second")
        in_time(pushed, 0.5, "a start")


def test_x40_what_fails_runs_again_at_once_for_ever_or_as_often_as_is_said(delayed: Delayed) -> None:
    slow = {"payload": {"seconds": 3600}}
    bounded, endless = delayed.app.sync.enqueue_many(
        [delayed.app.draft("callback", slow, timeout=0.05, **budget) for budget in ({"max_attempts": 3}, {})]
    )
    with delayed.workers(LEADER):
        until(lambda: delayed.app.sync.get(bounded.id).state == "dead", "the end of three attempts")
        until(lambda: delayed.app.sync.get(endless.id).attempts > 10, "ten attempts")
        delayed.app.sync.cancel([endless.id])
        until(lambda: delayed.app.sync.get(endless.id).state == "cancelled", "the end of the other")
    assert delayed.claims(as_ulid(bounded.id)) == 3


# ── beside each other ─────────────────────────────────────────────────────────────────────────────────────────────
def test_d24_d40_d42_d43_followers_share_and_leave_the_moving_to_the_leader(delayed: Delayed) -> None:
    with delayed.workers(FOLLOWER, FOLLOWER) as followers:
        due = delayed.now() + SECOND // 4
        ready, future = delayed.submit(LONG_AGO, due)
        delayed.all_ended([ready])
        while delayed.now() < due + SECOND:  # long enough for anybody's look
            time.sleep(0.1)
        delayed.all_ended(delayed.submit(LONG_AGO, LONG_AGO))  # and for news to both of them
        assert delayed.place(future) == ["jobs"]
        with delayed.workers(LEADER) as (leader,):
            everybody = [leader, *followers]
            delayed.all_ended([future])
            _once(delayed, everybody, delayed.submit(*[delayed.now() + SECOND // 2] * 30))

            def least() -> float:
                shares = _once(delayed, everybody, delayed.submit(*[LONG_AGO] * 300, seconds=0.02))
                return -min(shares)

            in_time(least, -60, "minus the smallest share of 300 jobs")


def _once(delayed: Delayed, workers: Sequence[Program], ids: Sequence[str]) -> list[int]:
    """Every one of these jobs is run, by one worker, once; how many each worker ran."""
    delayed.all_ended(ids)
    assert {delayed.claims(job_id) for job_id in ids} == {1}
    wanted = set(ids)

    def started() -> list[list[str]]:
        return [[each for each in worker.starts() if each in wanted] for worker in workers]

    until(lambda: sum(map(len, started())) >= len(ids), "the log lines of all starts")
    shares = started()
    assert Counter(job for share in shares for job in share) == dict.fromkeys(ids, 1)
    return [len(share) for share in shares]


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_d25_d28_d29_d30_d33_what_a_killed_worker_held_is_put_back_once_and_runs(delayed: Delayed) -> None:
    lease = 2 * SECOND
    quick = {"HOLDFAST_LEASE": "2s", "HOLDFAST_BEAT": "500ms"}
    with delayed.workers(LEADER, **quick) as (leader,):
        (first,) = delayed.submit(LONG_AGO, seconds=FOR_EVER)
        until(lambda: delayed.place(first) == ["unackedJobs"], "the leader to be busy")
        with delayed.workers(FOLLOWER, **quick) as (follower,):
            before = delayed.now()
            (second,) = delayed.submit(LONG_AGO, seconds=FOR_EVER)
            until(lambda: delayed.place(second) == ["unackedJobs"], "the follower to be busy")
            picked = int(delayed.job(second)["pickupTime"])
            assert before <= picked <= delayed.now()
            follower.kill()
        assert delayed.place(second) == ["unackedJobs"] or delayed.now() > picked + lease
        until(lambda: delayed.place(second) == ["dueJobs"], "the job to be put back")
        (lost,) = delayed.app.sync.attempts(second)
        assert lease < lost.ended_at_us - picked < 30 * SECOND  # idle: lease, a second until the next look, a moment
        leader.kill()
    for job_id in (first, second):
        delayed.client.hset(f"delayed-queue:job:{job_id}", "payload", '{"payload": null}')
    with delayed.workers(LEADER):
        delayed.all_ended([first, second])
    assert delayed.claims(second) == 2
    assert not any(delayed.places().values())


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────
BATCHES = {"7": 1.0, "50": 4.0, "100": 2.0}
"""JOB_COUNT and TIME_OFFSET_SEC. The second and third are the seed's own examples, in a fifth of the time."""


def test_d5_d6_d7_d8_d9_d39_batches_through_two_servers_and_five_workers(delayed: Delayed) -> None:
    with delayed.servers(2) as servers, delayed.workers(LEADER, *[FOLLOWER] * 4) as workers:
        began, clients = delayed.now(), []
        for number, (count, window) in enumerate(BATCHES.items()):
            said = {"JOB_COUNT": count, "TIME_OFFSET_SEC": str(window), "API_URL": servers[number % 2].url}
            command = [sys.executable, "-m", "delayed_queue", "submit-jobs"]
            environment = delayed.environment(**said)
            clients.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        accepted = [client.communicate(timeout=PATIENCE)[0].split() for client in clients]
        submitted = delayed.now()

        assert [client.returncode for client in clients] == [0] * len(clients)
        assert [len(ids) for ids in accepted] == [int(count) for count in BATCHES]
        for ids, window in zip(accepted, BATCHES.values(), strict=True):
            dues = [int(job["dueTime"]) for job in delayed.jobs(ids)]
            assert began < min(dues) <= max(dues) <= submitted + (window + 0.5) * SECOND
        ids = [job_id for batch in accepted for job_id in batch]
        _once(delayed, workers, ids)
        assert lateness(delayed.jobs(ids)) < 30  # p99 on an idle machine: the storm says it


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JOB_COUNT": "many"}, "JOB_COUNT: 'many' is not valid; give a whole number from 0 to 1,000,000"),
        ({"TIME_OFFSET_SEC": "-1"}, "TIME_OFFSET_SEC: '-1' is not valid; give a number from 0"),
        ({"API_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1 does not answer"),
    ],
)
def test_d5_the_client_says_what_is_wrong(delayed: Delayed, variables: dict[str, str], said: str) -> None:
    command = [sys.executable, "-m", "delayed_queue", "submit-jobs"]
    environment = delayed.environment(**variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
