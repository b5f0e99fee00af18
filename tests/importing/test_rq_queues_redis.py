"""Jobs of a real RQ move out of its Redis: each once, and none that does not fit; no pickle is executed."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Redis as Client
from rq import Queue, Repeat, SimpleWorker
from rq.job import Callback, Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty

from holdfast import Holdfast
from holdfast.importing import Importer
from holdfast.importing.importer import PAGE, PeerJob
from holdfast.importing.rq_queues import RQQueues
from tests.importing.peer_jobs import note
from tests.importing.test_celery_broker_redis import jobs_of, numbers_of
from tests.interfaces.cli import Cli
from tests.support.redis import shared

NOTE = f"{note.__module__}.note"
MAP = ("--map", f"{NOTE}=note")


def explode(*_: object) -> None:
    """Fails the test: a hostile pickle was executed."""
    raise AssertionError("a pickle was executed")


class Hostile:
    """A value whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> Any:
        return explode, (1,)


def fail_job(number: int) -> None:
    raise ValueError(number)


class Worker(SimpleWorker):
    """A worker of RQ in this process: without a signal for its timeout."""

    death_penalty_class = TimerDeathPenalty


@pytest.mark.parametrize("serializer", [None, JSONSerializer])
def test_jobs_move_with_their_options(cli: Cli, here: Holdfast, peer: Client, peer_url: str, serializer: Any) -> None:
    queue = Queue(connection=peer, serializer=serializer)
    bulk = Queue("bulk", connection=peer, serializer=serializer)
    soon = datetime.now(UTC) + timedelta(hours=1)
    queue.enqueue(note, 1, text="é")
    queue.enqueue(note, 2, job_id="odd_name-1", ttl=3600, meta={"tenant": "acme", "tries": [1, 2]})
    bulk.enqueue_at(soon, note, 3)
    queue.enqueue(note, "x" * 200_000)

    planned = cli.json("import", "rq", peer_url, *MAP, "--dry-run", code=1)
    assert [(each["state"], each["count"]) for each in planned["moved"]] == [("queued", 2), ("scheduled", 1)]
    assert (len(queue), len(bulk.scheduled_job_registry)) == (3, 1)
    document = cli.json("import", "rq", peer_url, *MAP, code=1)

    assert (document["moved"], document["left"]) == (planned["moved"], planned["left"])
    assert "argument 'number' of task 'note'" in document["left"][0]["reason"]
    jobs = {json.loads(job.payload)["number"]: job for job in jobs_of(here)}
    assert jobs[1].payload == '{"number":1,"text":"é"}'
    assert timedelta(0) < jobs[2].expires_at - datetime.now(UTC) <= timedelta(hours=1)
    assert jobs[2].options.metadata == {"rq_id": "odd_name-1", "rq_meta": {"tenant": "acme", "tries": [1, 2]}}
    assert (jobs[3].state, jobs[3].queue, jobs[3].run_at) == ("scheduled", "bulk", soon.replace(microsecond=0))
    assert [key for key in peer.scan_iter() if b"holdfast" in key] == []
    assert (len(queue), Job.exists("odd_name-1", connection=peer)) == (1, False)


def test_jobs_without_equivalent_stay_with_their_reason(cli: Cli, here: Holdfast, peer: Client, peer_url: str) -> None:
    queue = Queue(connection=peer)
    first = queue.enqueue(note, 1)
    queue.enqueue(note, 2, depends_on=first)
    queue.enqueue(note, 3, on_success=Callback("builtins.print"))
    queue.enqueue(note, 4, repeat=Repeat(times=3))
    queue.enqueue(note, Hostile())
    queue.enqueue(note, 9, meta={"of": Hostile()})
    for meta in (b"no JSON", (1, 2), "x" * 20_000):
        queue.enqueue(note, 10, meta={"of": meta})
    queue.enqueue("only.rq", 5)
    damaged = queue.enqueue(note, 6)
    peer.hset(damaged.key, "data", zlib.compress(b"\x80\x04nonsense"))
    peer.delete(queue.enqueue(note, 7).key)
    peer.zadd("rq:scheduler:scheduled_jobs", {queue.enqueue(note, 8).id: 1})  # as rq-scheduler keeps a repeated job
    stay = len(queue)

    document = cli.json("import", "rq", peer_url, *MAP, code=1)

    assert (numbers_of(here), len(queue)) == ([], stay)
    reasons = [each["reason"] for each in document["left"]]
    for part in (
        "other jobs of RQ wait for it",
        "it waits for another job of RQ",
        "it has a callback",
        "it has repetitions",
        "(opcode STACK_GLOBAL); RQ's workers have to run it, or enqueue it anew with plain values",
        "its meta is not what JSON keeps unchanged, with the job's id, in 16 KiB and 64 levels",
        "the application has no task 'only.rq'",
        "it is no pickle that can be read",
        "its data are gone",
        "rq-scheduler puts it into its queue",
    ):
        assert any(part in reason for reason in reasons), (part, reasons)
    assert document["left"][0]["task"] == "only.rq"
    assert sum(each["count"] for each in document["left"] if "STACK_GLOBAL" in each["reason"]) == 2
    assert sum(each["count"] for each in document["left"] if each["state"] == "rq-scheduler") == 1
    assert [each["count"] for each in document["left"] if "its meta is" in each["reason"]] == [3]  # in one row


def test_failed_and_started_jobs_move_on_request_or_never(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str
) -> None:
    queue = Queue(connection=peer)
    queue.enqueue(fail_job, 1)
    Worker([queue], connection=peer).work(burst=True)
    started = queue.enqueue(note, 2)
    found = Queue.dequeue_any([queue], None, connection=peer)
    assert found is not None
    worker = Worker([queue], connection=peer)
    execution = worker.prepare_execution(started)
    words = ("import", "rq", peer_url, "--map", f"{fail_job.__module__}.fail_job=note", *MAP)

    document = cli.json(*words, code=1)
    assert {(each["state"], each["reason"].partition(":")[0]) for each in document["left"]} == {
        ("failed", "it has failed there; --failed takes it, too, and runs it here"),
        ("started", "a worker runs it"),
        ("started", "a worker takes it"),
    }
    worker.perform_job(started, queue, execution)
    peer.delete(queue.intermediate_queue_key)
    assert cli.json(*words)["left"][0]["state"] == "failed"  # exit code 0
    queue.enqueue(note, 3)
    assert Queue.dequeue_any([queue], None, connection=peer) is not None  # by a worker that is stopped right then
    assert cli.json(*words, "--failed", code=1)["left"][0]["state"] == "started"
    assert cli.json(*words, "--held")["left"] == []
    assert (numbers_of(here), len(queue.failed_job_registry), peer.exists(queue.intermediate_queue_key)) == (
        [1, 3],
        0,
        0,
    )


def test_due_jobs_are_left_to_a_running_scheduler(here: Holdfast, peer: Client) -> None:
    queue = Queue(connection=peer)
    queue.enqueue_at(datetime.now(UTC) - timedelta(seconds=5), note, 1)
    scheduler = RQScheduler([queue], connection=peer)
    scheduler.acquire_locks()
    importer = Importer(here, RQQueues(peer), names={NOTE: "note"})

    assert importer.run().left == {(NOTE, "scheduled", "it is due: RQ's scheduler puts it into its queue now"): 1}
    lane = next(lane for lane in RQQueues(peer).list_lanes() if lane.kind == "scheduled")
    scheduler.release_locks()
    (job,) = RQQueues(peer).read_page(lane, 0, PAGE)
    scheduler.acquire_locks()
    assert RQQueues(peer).take_jobs(lane, [job]) == [False]  # type: ignore[list-item]  # it is a job

    class Late(RQQueues):
        """Of an import whose clock is late: the server refuses what it reads."""

        def _leave(self, job: PeerJob, *_: Any) -> PeerJob:
            return job

    assert Importer(here, Late(peer), names={NOTE: "note"}).run().moved == {}  # and it ends
    scheduler.enqueue_scheduled_jobs()
    scheduler.release_locks()
    queue.enqueue_at(datetime.now(UTC) - timedelta(seconds=5), note, 2)  # without a scheduler it would wait for ever

    assert Importer(here, RQQueues(peer), names={NOTE: "note"}).run().left == {}
    assert numbers_of(here) == [1, 2]


def test_job_that_a_worker_takes_meanwhile_is_not_submitted(here: Holdfast, peer: Client) -> None:
    queue = Queue(connection=peer)
    for number in range(3):
        queue.enqueue(note, number)

    class Racing(RQQueues):
        """Lets a worker take the first job between the importer's look and its step."""

        def take_jobs(self, lane: Any, jobs: Any) -> list[bool]:
            assert Queue.dequeue_any([queue], None, connection=peer) is not None
            self.taken = super().take_jobs(lane, jobs)
            return self.taken

    racing = Racing(peer)
    Importer(here, racing, names={NOTE: "note"}).run()

    assert (racing.taken, numbers_of(here)) == ([False, True, True], [1, 2])


def test_import_fills_the_room_of_a_queue_and_goes_on_later(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str
) -> None:
    queue, late = Queue(connection=peer), Queue("late", connection=peer)
    with peer.pipeline() as pipeline:
        queue.enqueue_many([Queue.prepare_data(note, (number,)) for number in range(PAGE + 10)], pipeline=pipeline)
        pipeline.execute()
    late.enqueue(note, 1000)
    cli.run("limit", "add", "few", "--queue", "default", "--depth", "7")

    first = cli.json("import", "rq", peer_url, *MAP, code=1)
    assert (sum(each["count"] for each in first["moved"]), numbers_of(here)) == (8, [*range(7), 1000])
    reasons = {each["reason"].partition("queue default is full")[0]: each["count"] for each in first["left"]}
    assert reasons == {"it is aside, and was refused: ": PAGE - 7, "another was refused: ": 10}
    late.enqueue(note, 1001)
    assert cli.json("import", "rq", peer_url, *MAP, code=1)["moved"][0]["count"] == 1  # though jobs aside are refused
    assert (peer.hlen("rq:holdfast:moving"), len(queue)) == (PAGE - 7, 10)
    cli.run("limit", "remove", "few")
    assert cli.json("import", "rq", peer_url, *MAP)["left"] == []
    assert sorted(numbers_of(here)) == [*range(PAGE + 10), 1000, 1001]


def test_full_key_of_a_limit_holds_back_its_own_jobs_only(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str
) -> None:
    queue = Queue(connection=peer)
    of_big = [Queue.prepare_data(note, (number,), {"text": "big"}) for number in range(3)]
    others = [Queue.prepare_data(note, (number,), {"text": str(number)}) for number in range(3, PAGE)]
    late = [Queue.prepare_data(note, (PAGE + n,), {"text": text}) for n, text in enumerate(("big", "small"))]
    with peer.pipeline() as pipeline:
        queue.enqueue_many(of_big + others + late, pipeline=pipeline)
        pipeline.execute()
    cli.run("limit", "add", "few", "--task", "note", "--by", "args.text", "--depth", "2")

    first = cli.json("import", "rq", peer_url, *MAP, code=1)

    assert sorted(numbers_of(here)) == [0, 1, *range(3, PAGE), PAGE + 1]
    reasons = {each["reason"].partition("limit few is full for big")[0]: each["count"] for each in first["left"]}
    assert reasons == {"it is aside, and was refused: ": 1, "another was refused: ": 1}
    assert (peer.hlen("rq:holdfast:moving"), len(queue)) == (1, 1)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h/0?foo=bar", "peer: foo is no parameter of a connection"),
        ("redis://h/0?retry=3", "peer: retry is no parameter of a connection"),
        ("redis+cluster://h", "peer: 'redis+cluster://h' is not valid; give one server"),
    ],
)
def test_unfit_url_of_a_peer_is_refused(cli: Cli, here: Holdfast, url: str, expected: str) -> None:
    assert expected in cli.fail("import", "rq", url, *MAP, code=78)


def test_refused_password_is_no_outage(cli: Cli, here: Holdfast, peer: Client) -> None:
    peer.execute_command("ACL", "SETUSER", "importer", "on", ">right", "~*", "+@all")
    try:
        url = f"redis://importer:wrong@127.0.0.1:{shared().port}/7"
        assert "invalid username-password pair" in cli.fail("import", "rq", url, *MAP, code=78)
    finally:
        peer.execute_command("ACL", "DELUSER", "importer")


@pytest.mark.parametrize("fault", ["import.taken:kill", "submit.after:kill@2", "import.submitted:kill"])
def test_killed_import_continues_where_it_stopped(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str, fault: str
) -> None:
    queue = Queue(connection=peer)
    with peer.pipeline() as pipeline:
        queue.enqueue_many([Queue.prepare_data(note, (number,)) for number in range(PAGE + 10)], pipeline=pipeline)
        pipeline.execute()

    killed = cli.complete("import", "rq", peer_url, *MAP, env={"HOLDFAST_FAULTS": fault})
    aside = PAGE if "@2" not in fault else 10
    assert (killed.returncode, peer.hlen("rq:holdfast:moving")) == (-9, aside)
    document = cli.json("import", "rq", peer_url, *MAP)

    assert sorted(numbers_of(here)) == list(range(PAGE + 10))
    assert document["already_moved"] == (0 if "taken" in fault else aside)
    assert [key for key in peer.scan_iter() if b"rq:job" in key or b"holdfast" in key] == []
