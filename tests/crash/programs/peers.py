"""An application that moves: ``peers submit|work|plan|import celery|rq …``. Its task has an effect on either side."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import Holdfast
from tests.crash.ledger import append

if TYPE_CHECKING:
    from celery import Celery

    from holdfast.importing.importer import Peer

LEDGER = Path(os.environ.get("CRASH_LEDGER", "ledger"))
URL = os.environ.get("PEER_URL", "redis://localhost")
IS_PEER = "PEER_WORKS" in os.environ
NAME = "tests.crash.programs.peers.note"
MODES = ("quick", "scheduled", "broken", "slow")
"""Kinds of jobs, by the remainder of their number. A broken one fails in RQ; in Celery it has a priority."""
SLOW, QUICK = 0.5, 0.02  # seconds of a job at the peer, whose queue has to last for several imports
MIN_DELAY = 3  # seconds
app = Holdfast()


def note(number: int, kind: str) -> None:
    """Has one effect: a line of the ledger."""
    mode = MODES[number % len(MODES)]
    if mode == "broken" and IS_PEER and kind == "rq":
        raise ValueError(f"job {number} fails in RQ")
    if IS_PEER:
        time.sleep(SLOW if mode == "slow" else QUICK)
    append(LEDGER, what="effect", number=number, side="peer" if IS_PEER else "here")


app.task(NAME)(note)


def make_celery() -> Celery:
    """The application of Celery."""
    from celery import Celery

    made = Celery("peers", broker=URL)
    made.conf.update(worker_hijack_root_logger=False, broker_connection_retry_on_startup=True)
    made.task(note, name=NAME, shared=False)
    return made


def submit(kind: str, first: int, count: int, max_delay: int) -> None:
    """Submits jobs of every kind to the peer, at a pace that lets other processes work."""
    submit_one = _submit_to_celery() if kind == "celery" else _submit_to_rq()
    for number in range(first, first + count):
        submit_one(number, MIN_DELAY + number % (max_delay - MIN_DELAY))
        time.sleep(0.001)


def _submit_to_celery() -> Callable[[int, int], None]:
    task = make_celery().tasks[NAME]

    def submit_one(number: int, delay: int) -> None:
        options: dict[str, Any] = {"scheduled": {"countdown": delay}, "broken": {"priority": 6}}
        task.apply_async((number, "celery"), **options.get(MODES[number % len(MODES)], {}))

    return submit_one


def _submit_to_rq() -> Callable[[int, int], None]:
    from redis import Redis
    from rq import Queue

    queue = Queue(connection=Redis.from_url(URL))

    def submit_one(number: int, delay: int) -> None:
        if MODES[number % len(MODES)] == "scheduled":
            queue.enqueue_at(datetime.now(UTC) + timedelta(seconds=delay), NAME, number, kind="rq")
        else:
            queue.enqueue(NAME, number, kind="rq")

    return submit_one


def work(kind: str) -> None:
    """Runs a worker of the peer until SIGTERM."""
    if kind == "celery":
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "CRITICAL")
        make_celery().worker_main(["--quiet", "worker", "--pool", "threads", "--concurrency", "2", *quiet])
        return
    from redis import Redis
    from rq import Queue, SimpleWorker

    connection = Redis.from_url(URL)
    SimpleWorker([Queue(connection=connection)], connection=connection).work(
        with_scheduler=True, logging_level="CRITICAL"
    )


def make_peer(kind: str, client: Any, options: list[str]) -> Peer:
    """The peer's store, as an import reads it."""
    from holdfast.importing.celery_broker import CeleryBroker
    from holdfast.importing.rq_queues import RQQueues

    if kind == "celery":
        return CeleryBroker(client, take_held="held" in options)
    return RQQueues(client, take_failed="failed" in options, take_held="held" in options)


def plan(kind: str, states: set[str]) -> None:
    """Runs dry runs until they have met these states of jobs; a line for each new one."""
    from holdfast.importing import Importer
    from holdfast.importing.importer import open_peer

    with open_peer(URL) as client:
        while states:
            summary = Importer(app, make_peer(kind, client, []), names={}, dry_run=True).run()
            for state in states & {key[1] for key in (*summary.moved, *summary.left)}:
                append(LEDGER, what="met", state=state)
                states.remove(state)


def move(kind: str, options: list[str]) -> None:
    """Runs one import."""
    from holdfast.importing import Importer
    from holdfast.importing.importer import open_peer

    with open_peer(URL) as client:
        summary = Importer(app, make_peer(kind, client, options), names={}).run()
    left = {f"{state}: {reason}": count for (_, state, reason), count in summary.left.items()}
    moved = {state: count for (_, state), count in summary.moved.items()}
    append(LEDGER, what="imported", moved=moved, again=summary.already_moved, left=left)
    app.sync.close()


if __name__ == "__main__":
    verb, peer_kind, *rest = sys.argv[1:]
    if verb == "submit":
        submit(peer_kind, *map(int, rest))
    elif verb == "work":
        work(peer_kind)
    elif verb == "plan":
        plan(peer_kind, set(rest))
    else:
        move(peer_kind, rest)
