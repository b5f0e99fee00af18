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
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from tests.examples.queuectl_support import Queue, gaps, is_running, wait_until

LATE = 4.0  # seconds: what a busy machine may add
NOTE = "date +%s.%N >> runs"


def q26_q36_q37_q40_q41_a_job_is_retried_after_2_4_and_8_seconds(queue: Queue) -> None:
    """Four executions; in between it is failed and says when it goes on; then it is dead."""
    queue.enqueue({"id": "job1", "command": f"{NOTE}; exit 7"})
    with queue.workers(supervised=False):
        for failures, delay in enumerate((2, 4, 8), 1):
            wait_until(partial(_has_run, queue, failures), 30, f"execution {failures}")
            failed = queue.until("job1", "failed")
            assert (failed["attempts"], failed["max_retries"]) == (failures, 3)
            ended_us = queue.app.sync.attempts("key:job1")[-1].ended_at_us
            due = datetime.fromisoformat(failed["next_retry_at"]).timestamp()
            assert due - ended_us / 1e6 == pytest.approx(delay, abs=0.002)
        dead = queue.until("job1", "dead", seconds=30)
    assert (dead["attempts"], dead["next_retry_at"]) == (4, None)
    assert "exit code 7" in dead["error"]
    for gap, delay in zip(gaps([float(each) for each in queue.lines("runs")]), (2, 4, 8), strict=True):
        assert delay <= gap <= delay + 0.2 + LATE


def _has_run(queue: Queue, times: int) -> bool:
    return len(queue.lines("runs")) == times


def q27_q46_a_job_is_killed_at_its_timeout_with_all_it_started(queue: Queue) -> None:
    """The command ignores signals and has a child; neither is there a second later."""
    command = "trap '' TERM; sleep 60 & echo $! >> pids; echo $$ >> pids; sleep 60; sleep 60"
    queue.place.set("timeout", "2")
    queue.enqueue({"id": "job1", "command": command, "max_retries": 0})
    with queue.workers(supervised=False):
        started = datetime.fromisoformat(queue.until("job1", "processing")["locked_at"])
        dead = queue.until("job1", "dead")
        spent = (datetime.fromisoformat(dead["ended_at"]) - started).total_seconds()
        assert 2 <= spent <= 3 + LATE
        assert "timeout" in dead["error"]
        time.sleep(1)
        pids = [int(each) for each in queue.lines("pids")]
        assert len(pids) == 2
        assert not any(map(is_running, pids))


def q44_q45_what_cannot_succeed_fails_says_why_and_leaves_the_worker_alive(queue: Queue) -> None:
    """A command that is not there, an exit code, a signal."""
    queue.place.set("backoff_base", "1")
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
            assert dead["attempts"] == attempts
            assert words in dead["error"]
        assert workers.pids() == [pid]


def q48_the_job_of_a_killed_worker_is_run_again_when_its_lock_is_void(queue: Queue) -> None:
    """Not before: the lock is 3 s here."""
    queue.place.set("lock_timeout", "3")
    queue.enqueue({"id": "job1", "command": f"{NOTE}; sleep 1.2"})
    with queue.workers(2) as workers:
        workers.ready(2)
        job = queue.until("job1", "processing")
        time.sleep(0.3)
        os.kill(int(job["locked_by"].split("-")[-2]), signal.SIGKILL)
        killed = time.time()
        assert queue.until("job1", "completed")["attempts"] == 1
    again = float(queue.lines("runs")[1]) - killed
    assert 1.5 <= again <= 3 + 0.2 + 2 + LATE


def q3_q49_a_worker_outlasts_a_database_that_is_locked(queue: Queue) -> None:
    """Somebody holds the write lock for longer than any call waits for it."""
    queue.enqueue({"id": "before", "command": "sleep 1"})
    with queue.workers(supervised=False) as workers:
        (pid,) = workers.ready()
        queue.until("before", "processing")
        with closing(sqlite3.connect(queue.place.database, isolation_level=None)) as blocker:
            blocker.execute("begin exclusive")
            wait_until(lambda: "store_trouble" in workers.log(), 30, "a word of the trouble")
            time.sleep(5)
            blocker.execute("rollback")
        queue.until("before", "completed", seconds=30)
        queue.enqueue({"id": "after", "command": "true"})
        queue.until("after", "completed")
        assert workers.pids() == [pid]


def q74_a_scheduled_job_starts_at_its_time(queue: Queue) -> None:
    """Neither before nor much later."""
    with queue.workers(supervised=False) as workers:
        workers.ready()
        at = datetime.now(UTC) + timedelta(seconds=3)
        queue.enqueue({"id": "job1", "command": NOTE, "run_at": at.isoformat()})
        assert queue.job("job1")["state"] == "pending"
        queue.until("job1", "completed")
    assert 0 <= float(queue.lines("runs")[0]) - at.timestamp() <= 0.2 + 0.5 + LATE


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
    late = []
    queue.enqueue({"id": "warm", "command": "true"})
    far = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    queue.enqueue(*({"id": f"job{number}", "command": "sleep 0.2", "run_at": far} for number in range(5)))
    with queue.workers(supervised=False):
        queue.until("warm", "completed")
        for number in range(5):
            now = time.time_ns() // 1000
            queue.edit("update holdfast_job set run_at = ? where seq = ?", now, number + 2)
            job = queue.until(f"job{number}", "processing")
            late.append(datetime.fromisoformat(job["locked_at"]).timestamp() - now / 1e6)
            assert queue.app.sync.workers()[0].pulse.worker == job["locked_by"]
            done = queue.until(f"job{number}", "completed")
            assert (done["locked_by"], done["locked_at"]) == (None, None)
    assert max(late) <= 0.2 + 0.3 + LATE
    assert median(late) <= 0.2 + 0.6


def q31_running_workers_follow_the_settings_within_five_seconds(queue: Queue) -> None:
    """The timeout and the base of the delays, in a worker that has long been running."""
    queue.enqueue({"id": "before", "command": "sleep 0.5"})
    with queue.workers(supervised=False) as workers:
        queue.until("before", "completed")
        assert queue.run("config", "set", "timeout", "0.5").returncode == 0
        assert queue.run("config", "set", "backoff_base", "30").returncode == 0
        wait_until(lambda: workers.log().count('"retry"'), 5 + LATE, "the worker's word that it has seen it")
        queue.enqueue({"id": "after", "command": "sleep 20"})
        failed = queue.until("after", "failed", seconds=5)
        assert "timeout" in failed["error"]
        due = datetime.fromisoformat(failed["next_retry_at"]) - datetime.now(UTC)
        assert 25 <= due.total_seconds() <= 30


CHECKS = [each for name, each in sorted(globals().items()) if name.startswith("q") and callable(each)]


@pytest.mark.timeout(120)
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
