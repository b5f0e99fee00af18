"""What takes its time in the queuectl example: delays, timeouts, locks. All of it runs side by side, in threads.

Each function ``q…`` is a check of its own, named by the rows it proves, with a queue and workers of its own.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.examples.queuectl_support import Queue, gaps, is_running, wait_until
from tests.support.load import slowness

pytestmark = pytest.mark.crash

NOTE = "date +%s.%N >> runs"
BACK_WITHIN = 10.0
"""Seconds from the end of a store's trouble until a worker is at work again."""


def late() -> float:
    """Seconds that a machine may add on which all of this runs at once."""
    return 1.0 * slowness()


def q26_q36_q37_q40_q41_q42_a_job_is_retried_after_2_4_and_8_seconds(queue: Queue) -> None:
    """Four executions; in between it is failed and says when it goes on; then it is dead."""
    queue.enqueue({"id": "job1", "command": f"{NOTE}; exit 7"})
    failed: dict[int, dict[str, Any]] = {}

    def is_dead() -> bool:
        job = queue.job("job1")
        if job["state"] == "failed":
            failed[job["attempts"]] = job
        return bool(job["state"] == "dead")

    with queue.workers(supervised=False):
        wait_until(is_dead, what="the last attempt")
    dead = queue.job("job1")
    ended = [each.ended_at_us / 1e6 for each in queue.app.sync.attempts("key:job1")]
    assert (dead["attempts"], dead["next_retry_at"]) == (4, None)
    assert "exit code 7" in dead["error"]
    assert 3 in failed, "a busy machine may miss what lasts 2 seconds, but not 8"
    for failures, each in failed.items():
        due = datetime.fromisoformat(each["next_retry_at"]).timestamp()
        assert due - ended[failures - 1] == pytest.approx(2**failures, abs=0.002)
        assert each["max_retries"] == 3
    for gap, delay in zip(gaps([float(each) for each in queue.lines("runs")]), (2, 4, 8), strict=True):
        assert delay <= gap <= delay + 0.2 + late()


def q27_q46_a_job_is_killed_at_its_timeout_with_all_it_started(queue: Queue) -> None:
    """The command ignores signals and has a child; neither is there a second later."""
    command = "trap '' TERM; sleep 60 & echo $! >> pids; echo $$ >> pids; sleep 60; sleep 60"
    queue.place.set("timeout", "2")
    queue.enqueue({"id": "job1", "command": command, "max_retries": 0})
    with queue.workers(supervised=False):
        started = datetime.fromisoformat(queue.until("job1", "processing")["locked_at"])
        dead = queue.until("job1", "dead")
        spent = (datetime.fromisoformat(dead["ended_at"]) - started).total_seconds()
        assert 2 <= spent <= 3 + late()
        assert "timeout" in dead["error"]
        time.sleep(1)
        pids = [int(each) for each in queue.lines("pids")]
        assert len(pids) == 2
        assert not any(map(is_running, pids))


def q42_q44_q45_what_cannot_succeed_fails_says_why_and_leaves_the_worker_alive(queue: Queue) -> None:
    """A command that is not there, an exit code, a signal."""
    queue.place.set("backoff_base", "1")
    assert queue.place.values()["max_retries"] == 3
    queue.enqueue(
        {"id": "missing", "command": "no-such-cmd-xyz", "max_retries": 1},
        {"id": "code", "command": "echo trouble >&2; exit 7", "max_retries": 1},
        {"id": "signal", "command": "kill -9 $$", "max_retries": 0},
    )
    with queue.workers(supervised=False) as workers:
        (pid,) = workers.ready()
        assert "not found" in queue.until("missing", "failed")["error"]
        assert "7" in queue.until("code", "failed", "dead")["error"]
        for name, attempts, words in (("missing", 2, "not found"), ("code", 2, "trouble"), ("signal", 1, "SIGKILL")):
            dead = queue.until(name, "dead")
            assert (dead["attempts"], dead["max_retries"]) == (attempts, attempts - 1)
            assert words in dead["error"]
        wait_until(lambda: workers.pids() == [pid], what="the worker's next sign of life")


def q48_the_job_of_a_killed_worker_is_run_again_when_its_lock_is_void(queue: Queue) -> None:
    """Not before: the lock is 3 s here."""
    queue.place.set("lock_timeout", "3")
    queue.enqueue({"id": "job1", "command": f"{NOTE}; [ $(wc -l < runs) -gt 1 ] || sleep 60"})
    with queue.workers(2) as workers:
        workers.ready(2)
        wait_until(lambda: queue.lines("runs"), what="the command")
        job = queue.job("job1")
        os.kill(int(job["locked_by"].split("-")[-2]), signal.SIGKILL)
        killed = time.time()
        assert queue.until("job1", "completed")["attempts"] == 1
    again = float(queue.lines("runs")[1]) - killed
    assert 1.5 <= again <= 3 + 0.2 + 2 + late()


def q3_q49_a_worker_outlasts_a_database_that_is_locked(queue: Queue) -> None:
    """A program holds the write lock for 35 seconds: longer than any call waits for it, and than a look or two."""
    queue.enqueue({"id": "before", "command": f"{NOTE}; sleep 1"})
    with queue.workers(supervised=False) as workers:
        (pid,) = workers.ready()
        wait_until(lambda: queue.lines("runs"), what="the command")
        with closing(sqlite3.connect(queue.place.database, isolation_level=None)) as blocker:
            blocker.execute("begin exclusive")
            held_until = time.monotonic() + 35
            wait_until(lambda: "store_trouble" in workers.log(), what="a word of the trouble")
            time.sleep(max(0.0, held_until - time.monotonic()))
            assert is_running(pid)
            blocker.execute("rollback")
        released = time.time()
        before = queue.until("before", "completed")
        queue.enqueue({"id": "after", "command": "true"})
        after = queue.until("after", "completed")
        assert (len(queue.lines("runs")), before["attempts"], after["attempts"]) == (1, 0, 0)
        for each in (before, after):
            ended = datetime.fromisoformat(each["ended_at"]).timestamp()
            assert ended - released <= BACK_WITHIN + late()
        wait_until(lambda: workers.pids() == [pid], what="the worker's next sign of life")


def q74_a_scheduled_job_starts_at_its_time(queue: Queue) -> None:
    """Neither before nor much later."""
    with queue.workers(supervised=False) as workers:
        workers.ready()
        at = datetime.now(UTC) + timedelta(seconds=3)
        queue.enqueue({"id": "job1", "command": NOTE, "run_at": at.isoformat()})
        assert queue.job("job1")["state"] == "pending"
        queue.until("job1", "completed")
    assert 0 <= float(queue.lines("runs")[0]) - at.timestamp() <= 0.2 + 0.5 + late()


def q22_q23_a_lock_is_void_after_five_minutes_and_every_kind_of_candidate_is_taken(queue: Queue) -> None:
    """The lock that was taken or renewed six minutes ago is void, the one of four minutes ago is not."""
    queue.place.config.unlink()  # the defaults: a lock of 300 s, a look every second
    names = ["stale", "held", "due", "pending"]
    queue.enqueue(*({"id": name, "command": f"echo {name} >> runs"} for name in names))
    now = time.time_ns() // 1000
    lock = "update holdfast_job set state = 2, claims = 1, attempts = 1, worker = 'gone', lease_until = ? where seq = ?"
    for seq, minutes in ((1, 6), (2, 4)):
        queue.edit(lock, now + (300 - minutes * 60) * 1_000_000, seq)
    queue.edit("update holdfast_job set state = 3, claims = 1, attempts = 1, run_at = ? where seq = 3", now - 1000)
    with queue.workers(supervised=False):
        for name in ("stale", "due", "pending"):
            queue.until(name, "completed")
        time.sleep(1.5)
        assert queue.job("held")["state"] == "processing"
    assert sorted(queue.lines("runs")) == ["due", "pending", "stale"]


def q18_q28_q29_q34_an_idle_worker_looks_once_per_interval_and_locks_what_it_runs(queue: Queue) -> None:
    """The jobs appear behind its back: no wake-up tells of them, only its own look."""
    waited = []
    queue.enqueue({"id": "warm", "command": "true"})
    far = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    command = "while [ ! -e go{} ]; do sleep 0.05; done"
    queue.enqueue(*({"id": f"job{each}", "command": command.format(each), "run_at": far} for each in range(5)))
    with queue.workers(supervised=False):
        queue.until("warm", "completed")
        for number in range(5):
            now = time.time_ns() // 1000
            queue.edit("update holdfast_job set run_at = ? where seq = ?", now, number + 2)
            job = queue.until(f"job{number}", "processing")
            waited.append(datetime.fromisoformat(job["locked_at"]).timestamp() - now / 1e6)
            assert queue.app.sync.workers()[0].heartbeat.worker == job["locked_by"]
            (queue.folder / f"go{number}").touch()
            done = queue.until(f"job{number}", "completed")
            assert (done["locked_by"], done["locked_at"]) == (None, None)
    assert max(waited) <= 0.2 + 0.3 + late()
    assert median(waited) <= (0.2 + 0.6) * slowness()


def q31_running_workers_follow_the_settings_within_five_seconds(queue: Queue) -> None:
    """The timeout and the base of the delays, in a worker that has long been running."""
    queue.enqueue({"id": "before", "command": "sleep 0.5"})
    with queue.workers(supervised=False) as workers:
        queue.until("before", "completed")
        assert queue.run("config", "set", "timeout", "0.5").returncode == 0
        assert queue.run("config", "set", "backoff_base", "30").returncode == 0
        wait_until(lambda: workers.log().count('"retry"'), 5 + late(), "the worker's word that it has seen it")
        queue.enqueue({"id": "after", "command": "sleep 20"})
        failed = queue.until("after", "failed")
        assert "timeout" in failed["error"]
        due = datetime.fromisoformat(failed["next_retry_at"]) - datetime.now(UTC)
        assert 10 <= due.total_seconds() <= 30  # 2, by the setting from before


CHECKS = [each for name, each in sorted(globals().items()) if name.startswith("q") and callable(each)]


@pytest.mark.timeout(400)
def test_everything_that_takes_time_side_by_side(tmp_path: Path) -> None:
    def run(check: Callable[[Queue], None]) -> None:
        queue = Queue(tmp_path / check.__name__[:40])
        try:
            check(queue)
        except Exception as error:
            error.add_note(f"in {check.__name__}")
            raise
        finally:
            queue.app.sync.close()

    with ThreadPoolExecutor(len(CHECKS)) as pool:
        ended = [pool.submit(run, check) for check in CHECKS]
    failures = [error for each in ended if isinstance(error := each.exception(), Exception)]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(CHECKS)} checks failed", failures)
