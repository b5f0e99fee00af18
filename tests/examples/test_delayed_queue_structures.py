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

import pytest

from tests.examples.common import PATIENCE, asked
from tests.examples.delayed_support import SECOND, Delayed
from tests.examples.programs import ROOT

pytestmark = pytest.mark.timeout(400)

HOUR = 3600 * SECOND
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def _minted(job_id: str) -> int:
    """The time in a ULID, microseconds since 1970."""
    milliseconds = 0
    for letter in job_id[:10]:
        milliseconds = milliseconds * 32 + CROCKFORD.index(letter)
    return milliseconds * 1000


def test_d15_d16_d32_d34_d36_d37_d45_d47_a_job_waits_in_the_sorted_set_by_its_due_time(delayed: Delayed) -> None:
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


REFUSED = {
    "no JSON": (b"hello", 400, "body"),
    "no payload": ({"delay": 1}, 400, "payload"),
    "an unknown field": ({"payload": 1, "due": 1}, 400, "due"),
    "milliseconds": ({"payload": 1, "dueTime": 1_795_273_740_000}, 422, "dueTime"),
    "both times": ({"payload": 1, "dueTime": 1_795_273_740_000_000, "delay": 1}, 422, "delay"),
    "too far": ({"payload": 1, "dueTime": 10**18}, 422, "dueTime"),
    "back in time": ({"payload": 1, "delay": -1}, 422, "delay"),
    "too large": ({"payload": "x" * 300_000}, 413, "payload"),
    "far too large": (b"x" * 1_100_000, 413, "body"),
}


def test_d34_d35_d37_d46_the_same_twice_is_two_jobs_and_what_is_wrong_is_none(delayed: Delayed) -> None:
    with delayed.servers(1) as (server,):
        due = delayed.now() + HOUR
        ids = []
        for _ in range(100):
            ids.append(server.schedule("the same", dueTime=due))
            time.sleep(0.002)
        assert sorted(set(ids)) == ids
        for what, (body, status, named) in REFUSED.items():
            try:
                answered, document = server.ask("/jobs", body)
            except OSError:  # it answered, and hung up on a body it does not want
                assert what == "far too large"
            else:
                assert (answered, named in document["error"]) == (status, True), (what, document)
        assert server.ask("/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV")[0] == 404
        assert server.ask("/jobs/nobody")[0] == 422
        assert server.ask("/elsewhere")[0] == 404
        text = urllib.request.Request(server.url + "/jobs", b'{"payload": 1}')  # noqa: S310 - as a form of a foreign page would
        assert asked(text)[0] == 415
        assert server.ask("/v1/jobs/" + ids[0])[1]["status"] == "scheduled"
        assert server.ask("/health") == (200, {"status": "ok", "service": "delayed-queue"})
        assert delayed.places() == {"jobs": ids, "dueJobs": [], "unackedJobs": []}


# ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_d21_a_job_is_due_at_its_very_instant(delayed: Delayed) -> None:
    due = delayed.now() + HOUR
    (job_id,) = delayed.submit(due)
    with delayed.store(now=lambda: due - 1) as before:
        assert before.promote(limit=10) == 0
    assert delayed.place(job_id) == ["jobs"]
    with delayed.store(now=lambda: due) as then:
        assert then.promote(limit=10) == 1
    assert delayed.place(job_id) == ["dueJobs"]


def test_d22_a_move_that_is_killed_loses_and_doubles_nothing(delayed: Delayed) -> None:
    jobs, kills = 2000, 20
    begin = delayed.now() + SECOND // 2
    ids = delayed.submit(*(begin + number for number in range(jobs)))
    while delayed.now() < begin + jobs:
        time.sleep(0.05)
    left = []
    command = [sys.executable, "-m", "tests.examples.delayed_mover", delayed.url]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mover:
        assert mover.stdin is not None
        assert mover.stdout is not None
        for _ in range(kills):
            mover.stdin.write("go\n")
            mover.stdin.flush()
            moving = int(mover.stdout.readline())
            time.sleep(random.uniform(0, 0.008))
            os.kill(moving, signal.SIGKILL)
            assert mover.stdout.readline() == "gone\n"
            places = delayed.places()
            assert Counter(places["jobs"] + places["dueJobs"]) == dict.fromkeys(ids, 1)
            left.append(len(places["jobs"]))
        mover.stdin.close()
        assert mover.wait(PATIENCE) == 0
    assert len(set(left)) > kills // 2, "the kills came before or after the move"
    with delayed.store() as store:
        while store.promote(limit=200):
            pass
    assert delayed.places() == {"jobs": [], "dueJobs": ids, "unackedJobs": []}
    assert delayed.client.hgetall("delayed-queue:counts") == {"queued:default": str(jobs)}
