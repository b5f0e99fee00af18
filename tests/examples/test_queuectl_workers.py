"""The queuectl example at work: real worker processes, killed and stopped. Tests are named by the rows they prove."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast import Holdfast
from holdfast.core.models import Claim
from holdfast.stores.base import ClaimRequest
from tests.examples.programs import environment
from tests.examples.queuectl_support import EXAMPLE, Queue, Workers, is_running, wait_until
from tests.examples.readme import Readme, free_ports
from tests.support.load import slowness

pytestmark = [pytest.mark.crash, pytest.mark.timeout(150)]


@pytest.mark.rows("Q1", "Q35", "Q43", "Q83")
def test_command_line_runs_jobs_from_enqueue_to_end(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    assert queue.run("config", "set", "backoff_base", "1").returncode == 0
    for job in ({"id": "good", "command": "echo hello"}, {"id": "bad", "command": "exit 3", "max_retries": 1}):
        assert queue.run("enqueue", json.dumps(job)).returncode == 0
    with queue.workers() as workers:
        queue.until("good", "completed")
        queue.until("bad", "dead")
        assert json.loads(queue.run("status", "--json").stdout)["jobs"]["completed"] == 1
        assert json.loads(queue.run("show", "good").stdout)["output"] == "hello\n"
        assert "exit code 3" in queue.run("dlq", "list").stdout
        assert len(json.loads(queue.run("show", "bad").stdout)["failures"]) == 2
        assert queue.run("dlq", "retry", "bad").returncode == 0
        assert queue.until("bad", "dead")["attempts"] == 2
        assert queue.run("worker", "stop", "--wait").returncode == 0
        assert workers.process.wait(60) == 0
    queue.app.sync.close()


@pytest.mark.rows("Q4", "Q20", "Q56", "Q57")
def test_ten_workers_run_each_of_500_jobs_once(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.app.sync.migrate()
    with queue.workers(10) as workers:
        workers.ready(10)
        began = time.monotonic()
        submitters = [queue.start("enqueue", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
        for number, submitter in enumerate(submitters):
            mine = ({"id": f"{number}-{each}", "command": f"echo {number}-{each} >> runs"} for each in range(125))
            _, trouble = submitter.communicate("\n".join(map(json.dumps, mine)), timeout=120)
            assert trouble == ""
        wait_until(lambda: queue.states()["completed"] == 500, 200, "500 completed jobs")
        rate = 500 / (time.monotonic() - began)
    assert Counter(queue.lines("runs")) == {f"{number}-{each}": 1 for number in range(4) for each in range(125)}
    assert rate >= min(50, _commands_per_second() / 10)
    assert "store_trouble" not in workers.log()
    assert "lock" not in workers.log().replace("locked_until", "")
    queue.app.sync.close()


def _commands_per_second(count: int = 50) -> float:
    """What this machine can do just now without a queue: other tests may keep it busy."""
    began = time.monotonic()
    for _ in range(count):
        subprocess.run(["/bin/sh", "-c", "echo x > /dev/null"], check=True)
    return count / (time.monotonic() - began)


@pytest.mark.rows("Q5", "Q13", "Q24")
def test_workers_are_processes_and_survive_each_other(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    with queue.workers(3) as workers:
        pids = workers.ready(3)
        assert len({*pids, workers.process.pid}) == 4
        assert len({os.getsid(pid) for pid in pids}) == 3
        shown = json.loads(queue.run("status", "--json").stdout)["workers"]
        assert {each["pid"] for each in shown} >= set(pids)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: not is_running(pids[0]), what="the death of the killed one")
        assert all(map(is_running, pids[1:]))
        queue.enqueue({"id": "job1", "command": "true"})
        queue.until("job1", "completed")
        fresh = set(workers.ready(3)) - set(pids)
        assert len(fresh) == 1, "the supervisor has started another one"
    queue.app.sync.close()


@pytest.mark.rows("Q16", "Q25")
def test_stopped_worker_finishes_its_job_and_takes_no_other(tmp_path: Path) -> None:
    stops: dict[str, Callable[[Queue, Workers], object]] = {
        "sigterm": lambda queue, workers: workers.process.send_signal(signal.SIGTERM),
        "sigint": lambda queue, workers: workers.process.send_signal(signal.SIGINT),
        "command": lambda queue, workers: queue.run("worker", "stop"),
    }
    for name, stop in stops.items():
        queue = Queue(tmp_path / name)
        until_allowed = "touch begun; while [ ! -e go ]; do sleep 0.05; done; echo finished"
        queue.enqueue({"id": "first", "command": until_allowed}, {"id": "next", "command": "true"})
        with queue.workers() as workers:
            # Not only claimed: what has not begun is given back when a worker stops.
            wait_until((queue.folder / "begun").exists, what="the command")
            stop(queue, workers)
            wait_until(partial(_is_stopping, workers), what="the stop")
            assert queue.job("first")["state"] == "processing"
            (queue.folder / "go").touch()
            assert workers.process.wait(60) == 0
        assert queue.job("first")["output"] == "finished\n"
        assert queue.job("next")["state"] == "pending"
        queue.app.sync.close()


def _is_stopping(workers: Workers) -> bool:
    return "worker_stopping" in workers.log()


@pytest.mark.rows("Q21")
def test_two_processes_never_take_the_same_job(tmp_path: Path) -> None:
    rounds = 200
    queue = Queue(tmp_path)
    queue.app.sync.migrate()
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.examples.racer", str(tmp_path), name, str(rounds)],
            env=queue.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    with racers[0] as first, racers[1] as second:
        assert [racer.stdout.readline() for racer in (first, second) if racer.stdout] == ["ready\n"] * 2
        won: Counter[str] = Counter()
        for number, order in zip(range(rounds), cycle(((first, second), (second, first))), strict=False):
            queue.enqueue({"id": f"job{number}", "command": "true"})
            for racer in order:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            claimed = [int(racer.stdout.readline()) for racer in (first, second) if racer.stdout]
            assert sum(claimed) == 1, f"round {number}: {claimed}"
            won.update(name for name, jobs in zip(("one", "two"), claimed, strict=True) if jobs)
    assert min(won["one"], won["two"]) > 0, "it was no race"
    queue.app.sync.close()


@pytest.mark.rows("Q50")
def test_fifty_kills_leave_a_sound_database(tmp_path: Path) -> None:
    """Commands and workers are killed at random instants; what was acknowledged is there, whole, and runs."""
    queue = Queue(tmp_path, lock_timeout=1, max_retries=20, backoff_base=1)
    queue.app.sync.migrate()
    chance = random.Random(50)
    acknowledged: set[str] = set()
    for round_ in range(25):
        worker = queue.start("worker", "run", stdout=subprocess.DEVNULL)
        given = "\n".join(json.dumps({"id": f"{round_}-{each}", "command": "true"}) for each in range(8))
        with queue.start("enqueue", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
            assert command.stdin is not None
            assert command.stdout is not None
            command.stdin.write(given)
            command.stdin.close()
            if round_ % 5 == 0:  # this one is killed the moment it has answered
                answered = command.stdout.readline()
            else:
                time.sleep(chance.uniform(0.05, 0.5))
                answered = ""
            command.kill()
            if answered or command.stdout.read():
                acknowledged |= {f"{round_}-{each}" for each in range(8)}
        time.sleep(chance.uniform(0, 0.3))
        worker.kill()
        worker.wait()
    assert len(acknowledged) >= 5 * 8
    _check_sound(queue, acknowledged)
    queue.enqueue({"id": "last", "command": "true"})  # so that these workers have begun before they are stopped
    with queue.workers(2):
        wait_until(lambda: queue.states()["completed"] == sum(queue.states().values()), 120, "the end of all jobs")
    assert all(queue.job(each)["state"] == "completed" for each in acknowledged)
    queue.app.sync.close()


def _check_sound(queue: Queue, acknowledged: set[str]) -> None:
    with closing(sqlite3.connect(queue.place.database)) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert connection.execute("pragma foreign_key_check").fetchall() == []
        impossible = (
            "select count(*) from holdfast_job where state not between 0 and 7 or attempts > claims"
            " or (state = 2) <> (lease_until is not null) or (state >= 5) <> (ended_at is not null)"
        )
        assert connection.execute(impossible).fetchone() == (0,)
    jobs = json.loads(queue.run("list", "--limit", "1000", "--json").stdout)
    assert {each["id"] for each in jobs} >= acknowledged
    by_round = Counter(each["id"].split("-")[0] for each in jobs)
    assert set(by_round.values()) == {8}, "a batch is there whole, or not at all"


@pytest.mark.rows("Q62", "Q73")
def test_highest_priority_goes_first_and_then_the_oldest(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    priorities = [1, 5, 3, 5, 0]
    queue.enqueue(
        *({"id": f"job{n}", "command": f"echo {n} >> runs", "priority": each} for n, each in enumerate(priorities))
    )
    with queue.workers():
        wait_until(lambda: len(queue.lines("runs")) == 5, what="five runs")
    assert queue.lines("runs") == ["1", "3", "2", "0", "4"]
    queue.app.sync.close()


@pytest.mark.rows("Q63", "Q65", "Q66")
def test_commands_run_by_shell_or_argv_as_set(tmp_path: Path) -> None:
    shell, argv = Queue(tmp_path / "shell"), Queue(tmp_path / "argv", execution="argv")
    shell.enqueue({"id": "both", "command": "echo a && echo b"}, {"id": "later", "command": "touch x.marker"})
    argv.enqueue({"id": "words", "command": "echo a; touch x.marker"}, {"id": "quoted", "command": "echo 'a  b'"})
    with shell.workers():
        assert shell.until("both", "completed")["output"] == "a\nb\n"
        shell.until("later", "completed")
    with argv.workers():
        assert argv.until("words", "completed")["output"] == "a; touch x.marker\n"
        assert argv.until("quoted", "completed")["output"] == "a  b\n"
    assert (tmp_path / "shell" / "x.marker").exists()
    assert not (tmp_path / "argv" / "x.marker").exists()
    # A job that was accepted before its command was forbidden is refused when it would run.
    shell.enqueue({"id": "forbidden", "command": "touch y.marker"})
    assert shell.run("config", "set", "allowed_commands", "echo").returncode == 0
    with shell.workers():
        assert "allowed are: echo" in shell.until("forbidden", "dead")["error"]
    assert not (tmp_path / "shell" / "y.marker").exists()
    shell.app.sync.close()
    argv.app.sync.close()


@pytest.mark.rows("Q28")
@pytest.mark.parametrize("interval", [0.2, 0.5])
def test_idle_worker_looks_no_more_than_once_per_interval(tmp_path: Path, interval: float) -> None:
    looks, seconds = asyncio.run(_count_looks(Queue(tmp_path, check_interval=interval).app))
    assert looks <= seconds / interval + 3  # two at the start, and one between two intervals
    assert looks >= seconds / interval / (2 * slowness())


async def _count_looks(app: Holdfast) -> tuple[int, float]:
    """Returns how often an idle worker looks for jobs, and in how many seconds."""
    looks = 0

    async def counted(request: ClaimRequest) -> Claim:
        nonlocal looks
        looks += 1
        return await claim(request)

    async with app:
        queueing = (await app.open_store()).queueing
        claim = queueing.claim
        began = time.monotonic()
        with patch.object(queueing, "claim", counted):
            async with app.worker():
                await asyncio.sleep(3)
        return looks, time.monotonic() - began


@pytest.mark.rows("Q47")
def test_worker_returns_a_job_it_cannot_run(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.enqueue({"id": "job1", "command": "echo done"})
    ran = subprocess.run(
        [sys.executable, "-m", "tests.examples.starved", str(tmp_path)],
        env=queue.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    job = queue.job("job1")
    assert (job["state"], job["output"], job["attempts"]) == ("completed", "done\n", 0)
    events = [json.loads(line)["event"] for line in ran.stdout.splitlines()]
    assert events.index("job_released") < events.index("job_succeeded")
    assert "Too many open files" in ran.stdout
    queue.app.sync.close()


def test_readme_commands_run(tmp_path: Path) -> None:
    with free_ports(1) as (port,):
        variables = environment(EXAMPLE, ("QUEUECTL_",))
        readme = Readme(EXAMPLE / "README.md", tmp_path, variables, {"8080": port}, ["worker_started"])
        readme.run()
    assert readme.ran[-1] == "queuectl worker stop"
    assert len(readme.ran) == 12
