"""Programs whose SQLite files are removed while they run end with exit code 75; no acknowledged job is lost."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.interfaces.cli import Cli

_DEADLINE = 60.0
BRIEF = {"HOLDFAST_HEARTBEAT": "1s", "HOLDFAST_LEASE": "5s"}


@contextmanager
def started(cli: Cli, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with cli.process(*words, env=BRIEF) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_worker_ends_with_75_when_a_file_is_removed(cli: Cli, suffix: str) -> None:
    target = cli.write_jobs()
    cli.run("migrate")
    with started(cli, "worker", "start", "--app", target) as worker:
        until(lambda: cli.json("worker", "list")["workers"])
        (cli.folder / f"holdfast.db{suffix}").unlink()
        given, problem = worker.communicate(timeout=_DEADLINE)
    assert worker.returncode == 75
    events = [json.loads(line) for line in given.splitlines()]
    (stopping,) = [line for line in events if line["event"] == "worker_stopping"]
    assert stopping["reason"] == "store_replaced"
    assert not [line for line in events if line["event"] == "store_trouble" and line["retry_in"] == 0.0]
    # The worker may open the next of its connections, and make a new file, before it sees that the old one is gone.
    reason = rf"holdfast\.db{suffix} was (removed|replaced) while this program had it open; restart this program"
    assert re.search(reason, problem.decode())
    assert "Traceback" not in problem.decode()
    assert b"never retrieved" not in problem


@pytest.mark.parametrize("words", [("dev", "--no-reload", "--port", "0"), ("api", "--port", "0")], ids=["dev", "api"])
def test_dev_and_api_end_with_75_when_shm_is_removed(cli: Cli, words: tuple[str, ...]) -> None:
    target = cli.write_jobs()
    cli.run("migrate")
    with started(cli, *words, "--app", target) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"the API is at" in process.stderr.readline() if words[0] == "dev" else process.stdout.readline()
        (cli.folder / "holdfast.db-shm").unlink()
        _, problem = process.communicate(timeout=_DEADLINE)
    assert process.returncode == 75, problem
    assert re.search(rb"-shm was (removed|replaced) while this program had it open", problem)
    assert b"Traceback" not in problem


def test_api_ends_when_new_files_replace_those_it_has_open(cli: Cli) -> None:
    cli.run("migrate")
    with started(cli, "api", "--port", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        for suffix in ("", "-wal", "-shm"):
            (cli.folder / f"holdfast.db{suffix}").unlink()
        (cli.folder / "holdfast.db").touch()
        _, problem = process.communicate(timeout=_DEADLINE)
    assert process.returncode == 75, problem
    assert b"while this program had it open" in problem


def test_acknowledged_jobs_survive_removal_of_shm(cli: Cli) -> None:
    target = cli.write_jobs()
    cli.run("migrate")
    with started(cli, "worker", "start", "--processes", "2", "--queues", "other", "--app", target):
        until(lambda: len(cli.json("worker", "list")["workers"]) == 2)
        (cli.folder / "holdfast.db-shm").unlink()
        ended = [cli.complete("enqueue", "mail.send", "--arg", "to=a", "--app", target) for _ in range(12)]
        acknowledged = {each.stdout.decode().strip() for each in ended if each.returncode == 0}
        refused = [each for each in ended if each.returncode != 0]
        assert acknowledged  # the workers have ended, were restarted and use the new files
        assert {each.returncode for each in refused} <= {75}
        assert all(re.search(rb"-(shm|wal) was (removed|replaced)", each.stderr) for each in refused)
    assert {job["id"] for job in cli.json("list", "--limit", "100")["jobs"]} == acknowledged
