"""Delayed Queue's workers: roles, kills, a fair share. Tests are named by the rows of the requirements they prove."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from holdfast.core.ids import as_ulid, new_id
from tests.examples.common import PATIENCE, until
from tests.examples.delayed_support import DATABASE, LEADER, SECOND, Delayed, Program, lateness
from tests.support.load import percentile, slowness

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

FOLLOWER: list[str] = []
"""No arguments: the settings decide."""
FOR_EVER = 600.0
LONG_AGO = 1_577_836_800 * SECOND
"""A due time that makes a job ready at once, leader or not."""


# ── a leader alone ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("D20", "D23", "D27", "D31", "D41")
def test_leader_moves_and_runs_everything_when_due(delayed: Delayed) -> None:
    with delayed.workers(LEADER) as (leader,):
        delayed.app.sync.pause("default")
        slow = slowness()
        moved = _moved(delayed)
        assert max(moved) <= 1.0 * max(slow, slowness())
        delayed.app.sync.resume("default")
        until(lambda: not any(delayed.places().values()), "the end of what was moved")
        slow = slowness()
        late = [each for _ in range(10) for each in _ran(delayed, leader)]
        assert percentile(late, 0.99) <= 1.5 * max(slow, slowness())


def _moved(delayed: Delayed) -> list[float]:
    """Seconds from the due time of each of a hundred jobs until it is in the list, and not in the sorted set."""
    begin = delayed.now() + SECOND
    dues = [begin + number * SECOND // 50 for number in range(100)]
    missing = dict(zip(delayed.submit(*dues), dues, strict=True))
    late: list[float] = []

    def over() -> bool:
        places = delayed.places()
        now = delayed.now()
        for job_id in missing.keys() & set(places["dueJobs"]):
            assert job_id not in places["jobs"]
            late.append((now - missing.pop(job_id)) / SECOND)
        return not missing

    until(over, "the move of all jobs")
    assert min(late) >= 0
    return late


def _ran(delayed: Delayed, leader: Program) -> list[float]:
    """How late each of twenty jobs is, which run in the order of their due times."""
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


@pytest.mark.rows("D26", "D38", "D44")
def test_idle_worker_blocks_and_runs_ids_pushed_by_hand(delayed: Delayed) -> None:
    def pushed() -> float:
        job_id, now = as_ulid(new_id()), delayed.now()
        fields = {"payload": '{"payload": "by hand"}', "dueTime": now}
        delayed.client.hset(f"delayed-queue:job:{job_id}", mapping=fields)
        delayed.client.lpush("delayed-queue:dueJobs", job_id)
        (job,) = delayed.all_ended([job_id])
        return (int(job["pickupTime"]) - now) / SECOND

    def commands() -> float:
        return len(delayed.overheard(10)) / 10

    def listening() -> bool:
        clients = [each["cmd"] for each in delayed.client.client_list() if each["db"] == str(DATABASE)]
        return "blmove" in clients and clients.count("subscribe") == 2

    with delayed.workers(LEADER):  # a follower has less to say
        until(listening, "a worker that blocks, and its keeper")
        assert any(commands() < 2.0 for _ in range(3))  # at first it also sends each script's text once
        slow = slowness()
        starts = [pushed() for _ in range(50)]
        assert percentile(starts, 0.99) <= 0.5 * max(slow, slowness())


@pytest.mark.rows("D38")
def test_ids_pushed_by_hand_right_after_each_other_wake_a_worker(delayed: Delayed) -> None:
    """Redis hands out the first while the second arrives. Nothing but the pushes tells the worker of them."""
    ids = [as_ulid(new_id()) for _ in range(2)]
    for job_id in ids:
        delayed.client.hset(f"delayed-queue:job:{job_id}", "payload", '{"payload": "by hand"}')
    with delayed.workers(FOLLOWER, HOLDFAST_POLL="1h"):
        until(lambda: "blmove" in [each["cmd"] for each in delayed.client.client_list()], "a worker that blocks")
        with delayed.client.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.lpush("delayed-queue:dueJobs", job_id)
            pipeline.execute()
        delayed.all_ended(ids)


@pytest.mark.rows("X40")
def test_failing_job_retries_at_once_within_its_attempts(delayed: Delayed) -> None:
    slow = {"payload": {"seconds": 3600}}
    bounded, endless = delayed.app.sync.enqueue_many(
        [delayed.app.draft_job("callback", slow, timeout=0.05, **budget) for budget in ({"max_attempts": 3}, {})]
    )
    with delayed.workers(LEADER):
        until(lambda: delayed.app.sync.get(bounded.id).state == "dead", "the end of three attempts")
        until(lambda: delayed.app.sync.get(endless.id).attempts > 10, "ten attempts")
        delayed.app.sync.cancel([endless.id])
        until(lambda: delayed.app.sync.get(endless.id).state == "cancelled", "the end of the other")
    assert delayed.claims(as_ulid(bounded.id)) == 3


@pytest.mark.rows("D36")
def test_keys_have_the_prefix_at_work_too(delayed: Delayed) -> None:
    def check_keys(*wanted: str) -> None:
        keys = set(delayed.client.scan_iter("*"))
        assert {key for key in keys if not key.startswith("delayed-queue:")} == set()
        assert keys >= {f"delayed-queue:{name}" for name in wanted}

    delayed.app.limits.sync.add("few", task="callback", by="args.payload.seconds", concurrency=1, rate="100/s", depth=9)
    with delayed.workers(LEADER, FOLLOWER) as workers:
        mine = delayed.app.sync.enqueue("callback", {"payload": {"seconds": FOR_EVER}}, key="mine", tags=["big"])
        failed = delayed.app.sync.enqueue("callback", {"payload": {"seconds": 3600}}, timeout=0.05, max_attempts=1)
        job_id = as_ulid(mine.id)
        until(lambda: delayed.place(job_id) == ["unackedJobs"], "a job at work")
        until(lambda: delayed.app.sync.get(failed.id).state == "dead", "the end of another")
        check_keys(f"job:{job_id}", "unackedJobs", "keys", "limits", "buckets", "workers")
        for worker in workers:
            worker.kill()
    check_keys(f"job:{job_id}", "unackedJobs", "keys", "limits")


# ── beside each other ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("D24", "D35", "D40", "D42", "D43")
def test_followers_share_jobs_and_leave_moving_to_the_leader(delayed: Delayed) -> None:
    with delayed.workers(FOLLOWER, FOLLOWER) as followers:
        due = delayed.now() + 2 * SECOND
        ready, future = delayed.submit(LONG_AGO, due)
        assert delayed.now() < due, "the machine is too slow: the job was due before it was stored"
        delayed.all_ended([ready])
        while delayed.now() < due + SECOND:  # long enough for anybody's look
            time.sleep(0.1)
        delayed.all_ended(delayed.submit(LONG_AGO, LONG_AGO))  # and for news to both of them
        assert delayed.place(future) == ["jobs"]
        with delayed.workers(LEADER) as (leader,):
            workers = [leader, *followers]
            delayed.all_ended([future])
            same = delayed.submit(*[delayed.now() + SECOND // 2] * 30)
            assert len({(job["payload"], job["dueTime"]) for job in delayed.jobs(same)}) == 1
            _once(delayed, workers, same)

            def is_even() -> bool:
                """A machine that is busy with other tests gets another chance; no job may run twice in any."""
                return min(_once(delayed, workers, delayed.submit(*[LONG_AGO] * 300, seconds=0.02))) >= 60

            until(is_even, "60 of 300 jobs for each worker")


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
@pytest.mark.rows("D25", "D29", "D30", "D33")
def test_jobs_of_a_killed_worker_are_requeued_once_and_run(delayed: Delayed) -> None:
    lease = 2 * SECOND
    quick = {"HOLDFAST_LEASE": "2s", "HOLDFAST_HEARTBEAT": "500ms"}
    with delayed.workers(LEADER, **quick) as (leader,):
        (first,) = delayed.submit(LONG_AGO, seconds=FOR_EVER)
        until(lambda: delayed.place(first) == ["unackedJobs"], "the leader to be busy")
        with delayed.workers(FOLLOWER, **quick) as (follower,):
            before = delayed.now()
            (second,) = delayed.submit(LONG_AGO, seconds=FOR_EVER)
            until(lambda: delayed.place(second) == ["unackedJobs"], "the follower to be busy")
            picked = int(delayed.job(second)["pickupTime"])
            assert before <= picked <= delayed.now()
            slow = slowness()
            follower.kill()
            killed = delayed.now()
        assert delayed.place(second) == ["unackedJobs"] or delayed.now() > picked + lease
        until(lambda: delayed.place(second) == ["dueJobs"], "the job to be put back")
        (lost,) = delayed.app.sync.attempts(second)
        assert lost.ended_at_us > picked + lease
        assert lost.ended_at_us <= killed + lease + 2 * SECOND * max(
            slow, slowness()
        )  # a look each second, and one more
        assert delayed.places()["dueJobs"].count(second) == 1
        leader.kill()
    for job_id in (first, second):
        delayed.client.hset(f"delayed-queue:job:{job_id}", "payload", '{"payload": null}')
    with delayed.workers(LEADER):
        delayed.all_ended([first, second])
    assert delayed.claims(second) == 2
    assert not any(delayed.places().values())


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────
BATCHES = {"7": 1.0, "50": 20.0, "100": 10.0}
"""JOB_COUNT and TIME_OFFSET_SEC. The second and third are the seed's own examples."""
LEAD = 0.5
"""Seconds by which the client puts due times off until it has sent them all."""


@pytest.mark.rows("D5", "D6", "D7", "D8", "D9", "D39")
def test_batches_run_through_two_servers_and_five_workers(delayed: Delayed) -> None:
    with delayed.servers(2) as servers, delayed.workers(LEADER, *[FOLLOWER] * 4) as workers:
        began, clients = delayed.now(), []
        for number, (count, window) in enumerate(BATCHES.items()):
            given = {"JOB_COUNT": count, "TIME_OFFSET_SEC": str(window), "API_URL": servers[number % 2].url}
            command = [sys.executable, "-m", "delayed_queue", "submit-jobs"]
            environment = delayed.environment(**given)
            clients.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        accepted = [client.communicate(timeout=PATIENCE)[0].split() for client in clients]
        submitted = delayed.now()

        assert [client.returncode for client in clients] == [0] * len(clients)
        assert [len(ids) for ids in accepted] == [int(count) for count in BATCHES]
        for ids, window in zip(accepted, BATCHES.values(), strict=True):
            dues = [int(job["dueTime"]) for job in delayed.jobs(ids)]
            assert began < min(dues) <= max(dues) <= submitted + (window + LEAD) * SECOND
        ids = [job_id for batch in accepted for job_id in batch]
        slow = slowness()
        _once(delayed, workers, ids)
        slow = max(slow, slowness())
        for batch, window in zip(accepted, BATCHES.values(), strict=True):
            last = max(delayed.app.sync.get(job_id).ended_at_us or 0 for job_id in batch)
            assert last <= submitted + (window + LEAD + 2 * slow) * SECOND
        assert percentile(lateness(delayed.jobs(ids)), 0.99) <= 1.5 * slow


INVALID_ADDRESSES = (
    "localhost:8080",
    "127.0.0.1:8080",
    "ftp://127.0.0.1",
    "http://",
    "http://127.0.0.1:notaport",
    "http://127.0.0.1:65536",
    "http://[::1",
    "http://a b",
    "http://user:secret@127.0.0.1",
)


@pytest.mark.rows("D5")
@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"JOB_COUNT": "many"}, "JOB_COUNT: 'many' is not valid; give a whole number from 0 to 1,000,000"),
        ({"TIME_OFFSET_SEC": "-1"}, "TIME_OFFSET_SEC: '-1' is not valid; give a number from 0"),
        ({"API_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1 does not answer"),
        ({"API_URL": "https://127.0.0.1:1"}, "https://127.0.0.1:1 does not answer"),
        *(({"API_URL": url}, f"API_URL: {url!r} is not valid; give http://HOST:PORT") for url in INVALID_ADDRESSES),
    ],
)
def test_client_reports_errors(delayed: Delayed, variables: dict[str, str], given: str) -> None:
    command = [sys.executable, "-m", "delayed_queue", "submit-jobs"]
    environment = delayed.environment(**variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert given in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.rows("D5")
def test_client_ends_quietly_when_nobody_reads_on(delayed: Delayed) -> None:
    with delayed.servers(1) as (server,):
        command = f"{sys.executable} -m delayed_queue submit-jobs | head -1; exit ${{PIPESTATUS[0]}}"
        environment = delayed.environment(JOB_COUNT="50", API_URL=server.url)
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
    assert len(done.stdout.split()) == 1


@pytest.mark.rows("D5")
def test_client_submits_below_a_path_and_reports_another_server(delayed: Delayed) -> None:
    command = [sys.executable, "-m", "delayed_queue", "submit-jobs"]
    with delayed.servers(1) as (server,):
        environment = delayed.environment(JOB_COUNT="1", API_URL=f"{server.url}/")
        assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        environment["API_URL"] = f"{server.url}/metrics"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("error: job 0 was refused: ")
