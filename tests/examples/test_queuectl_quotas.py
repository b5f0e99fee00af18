"""Allowed programs, quotas and the sandbox of queuectl, and the file of its settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.main import main as holdfast
from tests.examples.queuectl_support import Queue, answer, call


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path / "queue")
    yield made
    made.app.sync.close()


@pytest.mark.rows("Q65")
def test_command_that_is_not_allowed_is_refused(queue: Queue) -> None:
    call(queue, "config", "set", "allowed_commands", "echo,true")
    assert call(queue, "enqueue", '{"command": "echo a"}').exit_code == 0
    for text in ("rm -r .", "echo a; rm -r .", "echo $(rm -r .)", "true\nrm -r .", "FOO=1 rm -r ."):
        refused = call(queue, "enqueue", json.dumps({"command": text}))
        assert refused.exit_code == 2
        assert "allowed are: echo, true" in refused.stderr
    assert answer(queue, "status", "--json")["total"] == 1


@pytest.mark.rows("Q68")
def test_job_over_its_quota_of_memory_is_dead_and_others_go_on(queue: Queue) -> None:
    assert call(queue, "config", "set", "max_memory", "64MiB").exit_code == 0
    hungry = "python3 -c 'import time; kept = bytearray(300 << 20); time.sleep(90)'"
    call(queue, "enqueue", json.dumps({"id": "hungry", "command": hungry, "max_retries": 0}))
    call(queue, "enqueue", json.dumps({"id": "near", "command": "echo fine"}))
    with queue.workers():
        assert queue.until("hungry", "dead", "completed")["state"] == "dead"
        assert queue.until("near", "completed")["output"] == "fine\n"
    assert "64MiB allowed" in queue.job("hungry")["error"]


def limit(queue: Queue, name: str, *options: str) -> None:
    """Adds a limit on pending jobs, as the README does."""
    words = ["limit", "add", name, "--queue", "default", *options, "--url", f"sqlite:///{queue.place.database}"]
    assert CliRunner().invoke(holdfast, words).exit_code == 0


@pytest.mark.rows("Q68")
def test_job_over_the_quota_of_pending_jobs_is_refused(queue: Queue) -> None:
    call(queue, "status")
    limit(queue, "pending", "--depth", "1")
    assert call(queue, "enqueue", '{"command": "true"}').exit_code == 0
    assert call(queue, "enqueue", '{"command": "true"}').exit_code == 75
    assert answer(queue, "status", "--json")["total"] == 1


@pytest.mark.rows("Q68")
@pytest.mark.parametrize("execution", ["shell", "argv"])
def test_job_over_the_quota_of_its_user_is_refused_and_those_of_others_are_not(queue: Queue, execution: str) -> None:
    assert call(queue, "config", "set", "execution", execution).exit_code == 0
    assert call(queue, "config", "set", "allowed_commands", "printenv").exit_code == 0
    limit(queue, "per-user", "--by", "args.env.QUEUECTL_USER", "--depth", "1")
    codes = [
        call(queue, "enqueue", json.dumps({"id": name, "command": "printenv QUEUECTL_USER", **user})).exit_code
        for name, user in (
            ("first", {"user": "ann"}),
            ("second", {"user": "ann"}),
            ("other", {"user": "bob"}),
            ("unnamed", {}),
            ("unnamed second", {}),
        )
    ]
    assert codes == [0, 75, 0, 0, 75]
    assert json.loads(call(queue, "show", "first").output)["user"] == "ann"
    assert answer(queue, "status", "--json")["total"] == 3
    with queue.workers():
        assert queue.until("first", "completed", "dead")["output"] == "ann\n"
    assert call(queue, "enqueue", '{"command": "printenv HOME", "user": "ann"}').exit_code == 0


@pytest.mark.rows("Q68")
def test_shell_goes_on_after_a_program_over_the_size_of_a_file_unless_told_not_to(queue: Queue) -> None:
    assert call(queue, "config", "set", "max_file_size", "1MiB").exit_code == 0
    writes = "dd if=/dev/zero of=large bs=1M count=2; echo went on"
    for name, command in (("goes-on", writes), ("stops", f"set -e; {writes}")):
        call(queue, "enqueue", json.dumps({"id": name, "command": command, "max_retries": 0}))
    with queue.workers():
        assert queue.until("goes-on", "completed", "dead")["output"] == "went on\n"
        assert queue.until("stops", "completed", "dead")["state"] == "dead"
    assert (queue.folder / "large").stat().st_size <= 1 << 20


@pytest.mark.rows("Q69")
def test_sandboxed_command_cannot_write_outside_its_directory(queue: Queue, tmp_path: Path) -> None:
    assert call(queue, "config", "set", "sandbox", "strict").exit_code == 0
    outside = tmp_path / "outside"
    text = f"echo kept > inside && cat inside; echo escaped > {outside}"
    call(queue, "enqueue", json.dumps({"id": "writer", "command": text, "max_retries": 0}))
    with queue.workers():
        error = queue.until("writer", "dead", "completed")["error"]
    assert str(outside) in error
    assert not outside.exists()


@pytest.mark.rows("Q30")
def test_settings_file_that_cannot_be_written_is_named(queue: Queue) -> None:
    lost = str(queue.folder / "nowhere" / "settings.json")
    called = call(queue, "--config", lost, "config", "set", "timeout", "5")
    assert called.exit_code == 78
    assert called.stderr == f"Error: {lost}: cannot be written: No such file or directory\n"
