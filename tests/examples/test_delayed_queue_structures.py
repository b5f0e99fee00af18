"""What Delayed Queue keeps in Redis, and its HTTP API. Tests are named by the rows of the requirements they prove."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.ids import as_ulid, new_id
from holdfast.core.models import NewJob
from tests.examples.common import PATIENCE, asked, until
from tests.examples.delayed_support import LEADER, SECOND, Delayed
from tests.examples.programs import ROOT
from tests.support.redis import Redis

pytestmark = pytest.mark.timeout(400)

HOUR = 3600 * SECOND
HAND = "01M7ZACGDME0081YPRH2P9N50S"
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def _minted(job_id: str) -> int:
    """The time in a ULID, microseconds since 1970."""
    milliseconds = 0
    for letter in job_id[:10]:
        milliseconds = milliseconds * 32 + CROCKFORD.index(letter)
    return milliseconds * 1000


@pytest.mark.rows("D15", "D16", "D32", "D34", "D36", "D37", "D45", "D47")
def test_job_waits_in_the_sorted_set_by_due_time(delayed: Delayed) -> None:
    with delayed.servers(1) as (server,):
        before = delayed.now()
        due = before + HOUR + 1
        job_id = server.schedule({"text": "hello"}, dueTime=due)
        after = delayed.now()

        assert re.fullmatch(f"[{CROCKFORD}]{{26}}", job_id)
        assert before - SECOND <= _minted(job_id) <= after + SECOND
        assert delayed.client.type("delayed-queue:jobs") == "zset"
        assert delayed.client.zrange("delayed-queue:jobs", 0, -1, withscores=True) == [(job_id, due)]
        assert delayed.places() == {"jobs": [job_id], "dueJobs": [], "unackedJobs": []}
        fields = delayed.job(job_id)
        assert json.loads(fields["payload"]) == {"payload": {"text": "hello"}}
        assert (int(fields["dueTime"]), "pickupTime" in fields) == (due, False)
        assert {name for name in delayed.client.keys("*") if not name.startswith("delayed-queue:")} == set()
        expected = {"jobId": job_id, "state": "scheduled", "payload": {"text": "hello"}, "dueTime": due}
        assert server.ask(f"/jobs/{job_id}") == (200, expected | {"pickupTime": None, "attempts": 0})


MEANT = 1_795_273_740_000_000
REFUSED = {
    "no JSON": (b"hello", 422, "body", ""),
    "no object": (b"[1]", 422, "body", ""),
    "no payload": ({"delay": 1}, 422, "payload", "is missing"),
    "an unknown field": ({"payload": 1, "due": 1}, 422, "due", "payload, dueTime, delay"),
    "text as time": ({"payload": 1, "dueTime": "tomorrow"}, 422, "dueTime", "is not a number"),
    "seconds": ({"payload": 1, "dueTime": MEANT // 10**6}, 422, "dueTime", f"is in seconds; {MEANT}"),
    "seconds with a fraction": ({"payload": 1, "dueTime": 1_795_273_740.5}, 422, "dueTime", "1795273740500000"),
    "milliseconds": ({"payload": 1, "dueTime": MEANT // 1000}, 422, "dueTime", f"is in milliseconds; {MEANT}"),
    "nanoseconds": ({"payload": 1, "dueTime": MEANT * 1000}, 422, "dueTime", f"is in nanoseconds; {MEANT}"),
    "a fraction": ({"payload": 1, "dueTime": MEANT + 0.5}, 422, "dueTime", "a whole number"),
    "no unit at all": ({"payload": 1, "dueTime": 10**30}, 422, "dueTime", "a whole number"),
    "both times": ({"payload": 1, "dueTime": MEANT, "delay": 1}, 422, "dueTime, delay", "give one of the two"),
    "back in time": ({"payload": 1, "delay": -1}, 422, "delay", ""),
    "a delay in words": ({"payload": 1, "delay": "5m"}, 422, "delay", "is not a number"),
    "seconds below none": ({"payload": {"seconds": -1}}, 422, "payload.seconds", "from 0 to 3600"),
    "seconds without end": ({"payload": {"seconds": 10**9}}, 422, "payload.seconds", "from 0 to 3600"),
    "seconds in words": ({"payload": {"seconds": "2"}}, 422, "payload.seconds", "from 0 to 3600"),
    "too large": ({"payload": "x" * 300_000}, 413, "payload", ""),
    "far too large": (b"x" * 1_100_000, 413, None, ""),
}
"""Each body with the status of its answer, the field that is named, and words of the detail."""
PROBLEM = {"type", "title", "status", "detail", "code", "request_id"}


def _is_problem(document: Any, status: int) -> bool:
    """Returns True if the answer is an error in the form of every route of the port."""
    return bool(document.keys() >= PROBLEM and document["status"] == status)


@pytest.mark.rows("D34", "D35", "D37", "D46")
def test_same_submission_twice_is_two_jobs_and_invalid_is_none(delayed: Delayed) -> None:
    with delayed.servers(1) as (server,):
        due = delayed.now() + HOUR
        ids = []
        for _ in range(100):
            ids.append(server.schedule("the same", dueTime=due))
            time.sleep(0.002)
        assert sorted(set(ids)) == ids
        for what, (body, status, named, words) in REFUSED.items():
            try:
                answered, document = server.ask("/jobs", body)
            except OSError:  # it answered, and hung up on a body it does not want
                assert what == "far too large"
            else:
                assert (answered, document.get("field")) == (status, named), (what, document)
                assert _is_problem(document, status)
                assert all(each in document["detail"] for each in words.split("; ")), (what, document)
        assert server.ask("/v1/jobs/" + ids[0])[1]["state"] == "scheduled"
        assert server.ask("/health") == (200, {"status": "ok", "service": "delayed-queue"})
        assert delayed.places() == {"jobs": ids, "dueJobs": [], "unackedJobs": []}


@pytest.mark.rows("D37")
def test_every_error_on_the_port_has_one_format(delayed: Delayed) -> None:
    with delayed.servers(1) as (server,):
        asks = {
            "/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV": (404, "GET", None),
            "/jobs/nobody": (422, "GET", None),
            "/elsewhere": (404, "GET", None),
            "/v1/jobs/nobody": (422, "GET", None),
            "/v1/nothing": (404, "GET", None),
            "/jobs": (405, "GET", None),
            "/v1/queues": (405, "DELETE", None),
            "/jobs?form": (415, "POST", b'{"payload": 1}'),
            "/v1/jobs": (415, "POST", b'{"task": "callback"}'),
        }
        for path, (status, method, body) in asks.items():
            request = urllib.request.Request(server.url + path, body, method=method)  # noqa: S310 - ours, on this host
            answered, text = asked(request)
            assert (answered, _is_problem(json.loads(text), status)) == (status, True), (path, text)
        answered, document = server.ask("/v1/jobs", {"task": "callback", "payload": {"payload": {"seconds": -1}}})
        assert (answered, document["field"]) == (422, "payload.payload.seconds")


@pytest.mark.rows("D37")
def test_unavailable_store_is_answered_in_the_same_format(tmp_path: Path) -> None:
    with Redis() as own, closing(Delayed(own, tmp_path)) as delayed, delayed.servers(1) as (server,):
        own.stop()
        for path, body in (("/jobs", {"payload": 1}), ("/v1/queues", None)):
            answered, document = server.ask(path, body)
            assert (answered, _is_problem(document, 503)) == (503, True), document
        own.start()


def test_callback_pushed_by_hand_with_wrong_seconds_ends_dead(delayed: Delayed) -> None:
    with delayed.workers(LEADER):
        delayed.client.hset("delayed-queue:job:" + HAND, "payload", '{"payload": {"seconds": "2"}}')
        delayed.client.lpush("delayed-queue:dueJobs", HAND)
        until(lambda: delayed.job(HAND).get("state") == "dead", "the end of the job")
    assert delayed.claims(HAND) == 1


@pytest.mark.rows("D37")
@pytest.mark.parametrize("written", ["hi", '{"text": 1}', "[1]", "{"])
def test_payload_written_by_hand_is_shown_as_it_stands(delayed: Delayed, written: str) -> None:
    with delayed.workers(LEADER), delayed.servers(1) as (server,):
        delayed.client.hset("delayed-queue:job:" + HAND, "payload", written)
        delayed.client.lpush("delayed-queue:dueJobs", HAND)
        until(lambda: delayed.job(HAND).get("pickupTime"), "an attempt")
        status, document = server.ask(f"/jobs/{HAND}")
    expected = json.loads(written) if written in ('{"text": 1}', "[1]") else written
    assert (status, document["payload"]) == (200, expected)


# ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("D21")
def test_job_is_due_at_its_exact_instant(delayed: Delayed) -> None:
    due = delayed.now() + HOUR
    (job_id,) = delayed.submit(due)
    with delayed.store(now=lambda: due - 1) as before:
        assert before.maintenance.promote_due(limit=10) == 0
    assert delayed.place(job_id) == ["jobs"]
    with delayed.store(now=lambda: due) as then:
        assert then.maintenance.promote_due(limit=10) == 1
    assert delayed.place(job_id) == ["dueJobs"]


def _due(delayed: Delayed, count: int) -> list[str]:
    """So many more jobs in the sorted set that are due: they were submitted an hour ago."""
    begin = delayed.now()
    jobs = [
        NewJob(id=new_id(), task="callback", payload='{"payload": null}', run_at_us=begin + number, max_attempts=None)
        for number in range(count)
    ]
    with delayed.store(now=lambda: begin - HOUR) as store:
        store.queueing.submit(jobs)
    return [as_ulid(job.id) for job in jobs]


@pytest.mark.rows("D22")
def test_killed_promotion_loses_and_duplicates_nothing(delayed: Delayed) -> None:
    jobs, kills = 2000, 20
    ids = _due(delayed, jobs)
    interrupted = 0
    command = [sys.executable, "-m", "tests.examples.delayed_mover", delayed.url]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mover:
        assert mover.stdin is not None
        assert mover.stdout is not None
        while interrupted < kills:
            if delayed.client.zcard("delayed-queue:jobs") < jobs // 4:
                ids += _due(delayed, jobs)
            fewer = delayed.client.zcard("delayed-queue:jobs") - random.randint(2, 60)
            mover.stdin.write("go\n")
            mover.stdin.flush()
            moving = int(mover.stdout.readline())
            until(lambda fewer=fewer: delayed.client.zcard("delayed-queue:jobs") <= fewer, "some moves")
            os.kill(moving, signal.SIGKILL)
            assert mover.stdout.readline() == "gone\n"
            places = delayed.places()
            assert Counter(places["jobs"] + places["dueJobs"]) == dict.fromkeys(ids, 1)
            interrupted += bool(places["jobs"])
        mover.stdin.close()
        assert mover.wait(PATIENCE) == 0
    with delayed.store() as store:
        while store.maintenance.promote_due(limit=200):
            pass
    assert delayed.places() == {"jobs": [], "dueJobs": ids, "unackedJobs": []}
    assert delayed.client.hgetall("delayed-queue:counts") == {"queued:default": str(len(ids))}
