"""Messages of a real Celery application move out of its Redis broker: each once, and none that does not fit."""

from __future__ import annotations

import base64
import json
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue, pools
from redis import Redis as Client

from holdfast import Holdfast, Job, JobState
from holdfast.importing import Importer
from holdfast.importing.celery_broker import CeleryBroker
from holdfast.importing.importer import PAGE
from tests.importing.peer_jobs import note, remind
from tests.interfaces.cli import Cli


def make_celery(url: str, **settings: Any) -> Celery:
    """An application of Celery with the tasks that move and one that only Celery has."""
    pools.reset()  # its connections remember the queues that another test has declared
    made = Celery("shop", broker=url)
    made.conf.update(settings)
    for name, function in {"note": note, "remind": remind, "only.celery": note, "shop.tasks.old": note}.items():
        made.task(function, name=name, shared=False)
    return made


def jobs_of(here: Holdfast) -> list[Job]:
    """All jobs of Holdfast, the oldest first."""
    return here.sync.find(limit=500).jobs[::-1]


def numbers_of(here: Holdfast) -> list[int]:
    """The first argument of each job of task note."""
    return [json.loads(job.payload)["number"] for job in jobs_of(here) if job.task == "note"]


def reasons_of(document: dict[str, Any]) -> dict[str, str]:
    """The reasons of an import by state and task."""
    return {f"{each['state']} {each['task']}": each["reason"] for each in document["left"]}


def test_messages_move_with_their_options(cli: Cli, here: Holdfast, peer: Client, peer_url: str) -> None:
    tasks = make_celery(peer_url).tasks
    soon, late = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) + timedelta(hours=2)
    tasks["note"].delay(1, text="é")
    tasks["note"].apply_async((2,), countdown=3600, task_id="fixed")
    tasks["note"].apply_async((3,), eta=soon, expires=late, queue="bulk", priority=6)
    tasks["note"].apply_async((4,), task_id="fixed")  # Celery runs both
    tasks["remind"].delay(soon)
    tasks["shop.tasks.old"].delay(5)
    words = ("import", "celery", peer_url, "--map", "shop.tasks.old=note")

    wrong = cli.fail(*words, "-Q", "bulk,nosuch", code=2)
    assert "'nosuch' is no queue of Celery; there are these: bulk, celery" in wrong
    (plan,) = cli.json(*words, "--dry-run", "-Q", "bulk,celery")["moved"][:1]
    assert (plan["state"], plan["count"]) == ("scheduled", 2)
    planned = cli.json(*words, "--dry-run")
    assert [(each["task"], each["state"], each["count"]) for each in planned["moved"]] == [
        ("note", "scheduled", 2),
        ("note", "waiting", 3),
        ("remind", "waiting", 1),
    ]
    assert peer.llen("celery") == 5
    assert cli.json(*words)["moved"] == planned["moved"]

    jobs = {(job.task, json.loads(job.payload).get("number")): job for job in jobs_of(here)}
    assert [name for name in peer.scan_iter() if b"_kombu" not in name] == []
    assert jobs["note", 1].payload == '{"number":1,"text":"é"}'
    assert {number for (_, number), job in jobs.items() if job.state is JobState.SCHEDULED} == {2, 3}
    third = jobs["note", 3]
    assert (third.queue, third.priority, jobs["note", 1].queue) == ("bulk", -6, "default")
    assert third.run_at is not None
    assert abs(third.run_at - soon) < timedelta(seconds=1)
    assert abs(third.expires_at - late) < timedelta(seconds=1)
    assert json.loads(jobs["remind", None].payload)["at"].startswith(soon.isoformat()[:19])
    assert third.options.metadata["celery_id"]
    assert cli.json(*words) == {"dry_run": False, "moved": [], "already_moved": 0, "left": []}


def test_messages_without_equivalent_stay_with_their_reason(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str
) -> None:
    make_celery(peer_url, task_protocol=1).send_task("note", (1,))
    made = make_celery(peer_url)
    tasks = made.tasks
    tasks["only.celery"].delay(1)
    tasks["note"].apply_async((1,), link=tasks["note"].si(2))
    tasks["note"].apply_async((1,), compression="zlib")
    tasks["note"].apply_async((1,), serializer="pickle")
    tasks["note"].apply_async((1,), expires=datetime.now(UTC) + timedelta(milliseconds=1))
    for misfit in ((1, "a", "third"), ("x" * 1_000_000,), (float("nan"),)):
        made.send_task("note", misfit)
    peer.lpush("celery", b"no JSON", b"[1]", b'{"headers":{}, "properties":{}}')
    tasks["note"].delay(Decimal(1))
    damaged = json.loads(peer.lpop("celery"))
    body = base64.b64decode(damaged["body"]).replace(b'"1"', b'"no number"')
    peer.lpush("celery", json.dumps({**damaged, "body": base64.b64encode(body).decode()}))
    damaged["properties"]["priority"] = float("inf")
    peer.lpush("celery", json.dumps(damaged))
    tasks["note"].delay(7)
    stay = peer.llen("celery") - 1

    document = cli.json("import", "celery", peer_url, code=1)

    assert (numbers_of(here), peer.llen("celery")) == ([7], stay)
    reasons = sorted(each["reason"] for each in document["left"])
    assert sum(each["count"] for each in document["left"]) == stay
    for part in (
        "the application has no task 'only.celery'",
        "workflow of Celery (callbacks): Celery's workers have to run it; the next ones can be a job with",
        "its body is compressed",
        "only JSON is read",
        "takes at most 2 by position",
        "at most 262,144 bytes are stored",
        "task protocol 1 (task note)",
        "it has expired",
        "it is no message that can be read",
    ):
        assert any(part in reason for reason in reasons), (part, reasons)
    assert document["left"][0]["task"] == "only.celery"  # unknown tasks first
    aside = "holdfast:moving:celery"
    expired = next(raw for raw in peer.lrange("celery", 0, -1) if b'"expires": "' in raw)
    peer.hset(aside, b"celery\0celery:1:2", expired)
    table = cli.run("import", "celery", peer_url, "--dry-run", code=1)
    assert peer.hlen(aside) == 1
    assert "it is aside" not in table
    assert table.index("only.celery") < table.index("task protocol 1")
    assert cli.run("import", "celery", peer_url, "--allow-unknown", code=1).count("positional arguments need") == 1
    assert not peer.exists(aside)


def test_messages_of_workers_move_only_on_request(cli: Cli, here: Holdfast, peer: Client, peer_url: str) -> None:
    made = make_celery(peer_url)
    made.tasks["note"].delay(1)
    made.tasks["note"].apply_async((2,), countdown=3600)
    with Connection(peer_url) as connection:
        channel = connection.channel()
        for _ in range(2):
            assert channel.basic_get("celery") is not None
        assert peer.hlen("unacked") == 2
        document = cli.json("import", "celery", peer_url, code=1)
        assert {
            state: "killed and none runs, --held takes it" in reason for state, reason in reasons_of(document).items()
        } == {"reserved note": True, "scheduled, reserved note": True}
        assert numbers_of(here) == []
        assert cli.json("import", "celery", peer_url, "--held")["left"] == []
        channel.qos._delivered.clear()  # as if the process had been killed
    assert sorted(numbers_of(here)) == [1, 2]
    assert (peer.hlen("unacked"), peer.zcard("unacked_index")) == (0, 0)
    peer.hset("unacked", "damaged", b"[" * 100_000)
    peer.zadd("unacked_index", {"damaged": 1})
    assert cli.json("import", "celery", peer_url, code=1)["left"][0]["reason"] == "it is no message of Celery"


@pytest.mark.parametrize("options", [{"global_keyprefix": "shop:"}, {"sep": ":", "priority_steps": list(range(10))}])
def test_prefix_and_separator_of_the_broker_are_used(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str, options: dict[str, Any]
) -> None:
    made = make_celery(peer_url, broker_transport_options=options, task_queues=[Queue("celery"), Queue("odd *[name]")])
    for priority in range(10):
        made.tasks["note"].apply_async((priority,), priority=priority)
    made.tasks["note"].apply_async((10,), queue="odd *[name]")
    words = ["--key-prefix", "shop:"] if "sep" not in options else ["--separator", ":"]

    assert cli.fail("import", "celery", peer_url, code=2)
    document = cli.json("import", "celery", peer_url, *words, code=1)

    assert numbers_of(here) == list(range(10))
    assert "queue: 'odd *[name]' is not valid" in reasons_of(document)["waiting note"]


def test_message_that_a_worker_takes_meanwhile_is_not_submitted(here: Holdfast, peer: Client, peer_url: str) -> None:
    made = make_celery(peer_url)
    for number in range(3):
        made.tasks["note"].delay(number)

    class Racing(CeleryBroker):
        """Lets a worker take the first message between the importer's look and its step."""

        def take_jobs(self, lane: Any, jobs: Any) -> list[bool]:
            with Connection(peer_url) as connection:
                taken = connection.default_channel.basic_get("celery")
                assert taken is not None
                connection.default_channel.basic_ack(taken.delivery_tag)
            self.taken = super().take_jobs(lane, jobs)
            return self.taken

    broker = Racing(peer)
    summary = Importer(here, broker, names={}).run()

    assert broker.taken == [False, True, True]
    assert (numbers_of(here), sum(summary.moved.values())) == ([1, 2], 2)


def test_two_importers_move_each_message_once(here: Holdfast, peer: Client, peer_url: str) -> None:
    made = make_celery(peer_url)
    for number in range(4 * PAGE):
        made.tasks["note"].delay(number)
    importers = [Importer(here, CeleryBroker(Client.from_url(peer_url, protocol=2)), names={}) for _ in range(2)]
    threads = [threading.Thread(target=importer.run) for importer in importers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(numbers_of(here)) == list(range(4 * PAGE))
    assert peer.llen("celery") + peer.hlen("holdfast:moving:celery") == 0


def test_messages_whose_taking_was_not_acknowledged_are_moved(here: Holdfast, peer: Client, peer_url: str) -> None:
    made = make_celery(peer_url)
    for number in range(3):
        made.tasks["note"].delay(number)

    class Repeating(CeleryBroker):
        """Sends the step again, as the driver does when the connection breaks before the answer."""

        def take_jobs(self, lane: Any, jobs: Any) -> list[bool]:
            super().take_jobs(lane, jobs)
            return super().take_jobs(lane, jobs)

    summary = Importer(here, Repeating(peer), names={}).run()

    assert (numbers_of(here), sum(summary.moved.values())) == ([0, 1, 2], 3)
    assert peer.hlen("holdfast:moving:celery") == 0


def test_messages_that_a_unique_task_folds_are_counted_apart(cli: Cli, here: Holdfast, peer_url: str) -> None:
    made = make_celery(peer_url)
    for _ in range(3):
        made.tasks["note"].delay(1)
    printed = cli.run("import", "celery", peer_url, "--map", "note=once")
    assert "1 job moved, 2 became one with a job that was there, 0 left in Celery" in printed
    assert len(jobs_of(here)) == 1


def test_messages_aside_are_moved_when_their_queues_are_forgotten(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str
) -> None:
    make_celery(peer_url).tasks["note"].delay(1)
    assert cli.complete("import", "celery", peer_url, env={"HOLDFAST_FAULTS": "import.taken:kill"}).returncode == -9
    peer.delete(*peer.scan_iter(match="_kombu.binding.*"))

    assert cli.json("import", "celery", peer_url)["moved"] == [{"task": "note", "state": "waiting", "count": 1}]
    assert numbers_of(here) == [1]
    assert "has no queue of Celery" in cli.fail("import", "celery", peer_url, code=2)


def test_messages_aside_are_named_as_such(cli: Cli, here: Holdfast, peer: Client, peer_url: str) -> None:
    made = make_celery(peer_url)
    made.tasks["note"].delay(1)
    made.tasks["shop.tasks.old"].delay(2)
    mapped = ("import", "celery", peer_url, "--map", "shop.tasks.old=note")
    assert cli.complete(*mapped, env={"HOLDFAST_FAULTS": "import.taken:kill"}).returncode == -9
    made.tasks["only.celery"].delay(3)

    left = cli.json("import", "celery", peer_url, code=1)["left"]

    aside = {each["task"]: each["reason"].startswith("it is aside: the application has no task") for each in left}
    assert aside == {"only.celery": False, "shop.tasks.old": True}
    assert (numbers_of(here), peer.hlen("holdfast:moving:celery")) == ([1], 1)
    assert cli.json(*mapped, code=1)["moved"] == [{"task": "note", "state": "waiting", "count": 1}]


KILLS = ["import.taken:kill", "submit.before:kill@2", "submit.after:kill", "import.submitted:kill@2"]


@pytest.mark.parametrize("fault", KILLS)
def test_killed_import_continues_where_it_stopped(
    cli: Cli, here: Holdfast, peer: Client, peer_url: str, fault: str
) -> None:
    made = make_celery(peer_url)
    for number in range(2 * PAGE + 10):
        made.tasks["note"].delay(number)

    killed = cli.complete("import", "celery", peer_url, env={"HOLDFAST_FAULTS": fault})
    assert (killed.returncode, peer.hlen("holdfast:moving:celery")) == (-9, PAGE)
    document = cli.json("import", "celery", peer_url)

    assert sorted(numbers_of(here)) == list(range(2 * PAGE + 10))
    assert document["already_moved"] == (PAGE if "submitted" in fault or "after" in fault else 0)
    assert peer.hlen("holdfast:moving:celery") == 0
