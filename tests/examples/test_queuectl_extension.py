"""Extending the queuectl example where its README says so, and jobs of other tasks in its commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.examples.queuectl_support import EXAMPLE, Dashboard, Queue, answer, call

STUB = re.compile(r"^def register\(.*?\n\n\n", re.MULTILINE | re.DOTALL)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path / "queue")
    yield made
    made.app.sync.close()


@pytest.fixture
def extended(queue: Queue, tmp_path: Path) -> Queue:
    """A queue whose commands are a copy of the example with the README's ``register``."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    shutil.copytree(EXAMPLE / "queuectl", tmp_path / "mine" / "queuectl")
    module = tmp_path / "mine" / "queuectl" / "app.py"
    extended, replaced = STUB.subn(lambda _: f"{block}\n\n", module.read_text(encoding="utf-8"))
    assert replaced == 1
    module.write_text(extended, encoding="utf-8")
    queue.example = tmp_path / "mine"
    return queue


@pytest.mark.crash
@pytest.mark.rows("Q84")
def test_what_is_registered_as_documented_works_in_workers_and_dashboard(extended: Queue) -> None:
    def post(task: str, payload: object) -> tuple[int, dict[str, str]]:
        answered = dashboard.client.post("/v1/jobs", json={"task": task, "payload": payload})
        return answered.status_code, answered.json()

    with closing(Dashboard(extended)) as dashboard, extended.workers(2) as workers:
        assert post("greet", {"nome": "Ann"})[0] == 422, "the dashboard knows the task"
        status, made = post("greet", {"name": "Ann"})
        assert status == 201
        failing = post("greet", {"name": ""})[1]["id"]
        submitted = _holdfast(extended, "enqueue", "greet", '{"name": "Bob"}', "--app", "queuectl.app:app")
        extended.enqueue({"id": "shell", "command": "echo plain"})
        assert extended.until(made["id"], "completed", "dead")["output"] == '"hello Ann"'
        assert extended.until(submitted, "completed", "dead")["output"] == '"hello Bob"'
        assert extended.until("shell", "completed", "dead")["output"] == "plain\n"
        extended.until(failing, "dead")
    log = workers.log()
    assert "begins: greet" in log
    assert "begins: command" in log
    assert re.findall("^dead: (.*)$", log, re.MULTILINE) == [failing]


def _holdfast(queue: Queue, *words: str) -> str:
    program = [sys.executable, "-m", "holdfast", *words]
    done = subprocess.run(program, cwd=queue.folder, env=queue.environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.rows("Q5", "Q15")
def test_jobs_of_other_tasks_are_shown_with_task_and_payload(queue: Queue) -> None:
    other = queue.app.sync.enqueue("anything", {"n": 1})
    dead = queue.app.sync.enqueue("anything", {})
    queue.edit("update holdfast_job set state = 5, result = '[2]', ended_at = run_at where seq = 1")
    queue.edit("update holdfast_job set state = 6, error = 'no such task', ended_at = run_at where seq = 2")
    queue.enqueue({"id": "job1", "command": "true"})
    listed = {each["id"]: each for each in answer(queue, "list", "--json")}
    assert {name: each["command"] for name, each in listed.items()} == {
        other.id: 'anything {"n":1}',
        dead.id: "anything {}",
        "job1": "true",
    }
    assert listed[other.id]["output"] == "[2]"
    assert "anything {}" in call(queue, "list").output
    assert "anything {}" in call(queue, "dlq", "list").output
    assert json.loads(call(queue, "show", other.id).output)["command"] == 'anything {"n":1}'
    assert other.id in call(queue, "dlq", "retry", other.id).stderr
    assert call(queue, "dlq", "retry", dead.id).exit_code == 0
