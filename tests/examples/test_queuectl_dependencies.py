"""Dependencies of the queuectl example: a job that depends on others starts when they have completed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.examples.queuectl_support import Queue, answer, call


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path)
    yield made
    made.app.sync.close()


def enqueue(queue: Queue, *jobs: dict[str, object]) -> str:
    """Returns the output of `queuectl enqueue -` for these lines."""
    from queuectl.cli import main

    lines = "\n".join(map(json.dumps, jobs))
    return CliRunner().invoke(main, ["enqueue", "-"], obj=queue.place, input=lines).output


@pytest.mark.rows("Q75")
def test_job_starts_after_those_it_depends_on(queue: Queue) -> None:
    order = queue.folder / "order"
    line = "echo {} >> " + str(order)
    jobs = [
        {"id": "a", "command": line.format("a")},
        {"id": "b", "command": line.format("b"), "depends_on": ["a"]},
        {"id": "c", "command": line.format("c"), "depends_on": ["a", "b"]},
    ]
    assert "3 jobs enqueued" in enqueue(queue, *jobs)
    assert queue.job("c")["state"] == "pending"
    with queue.workers():
        queue.until("c", "completed")
    assert order.read_text().split() == ["a", "b", "c"]


@pytest.mark.rows("Q75")
def test_dependencies_and_timeout_of_a_job_are_shown(queue: Queue) -> None:
    enqueue(queue, {"id": "a", "command": "true", "timeout": 7}, {"id": "b", "command": "true"})
    enqueue(queue, {"id": "c", "command": "true", "depends_on": ["a", "b"], "timeout": 0.5})
    made = answer(queue, "enqueue", '{"id": "d", "command": "true", "depends_on": ["c"]}', "--json")
    listed = {each["id"]: (each["depends_on"], each["timeout"]) for each in answer(queue, "list", "--json")}
    shown = answer(queue, "show", "c")
    assert (made["depends_on"], made["timeout"]) == (["c"], None)
    assert (shown["depends_on"], shown["timeout"]) == (["a", "b"], 0.5)
    assert listed == {"a": ([], 7), "b": ([], None), "c": (["a", "b"], 0.5), "d": (["c"], None)}


@pytest.mark.rows("Q75")
def test_job_does_not_run_if_one_it_depends_on_is_dead(queue: Queue) -> None:
    enqueue(
        queue,
        {"id": "a", "command": "exit 3", "max_retries": 0},
        {"id": "b", "command": "echo b", "depends_on": ["a"]},
        {"id": "c", "command": "echo c", "depends_on": ["b"]},
    )
    with queue.workers():
        cancelled = queue.until("b", "cancelled")
    assert cancelled["error"].endswith("for which it waited, is dead")
    assert answer(queue, "show", cancelled["error"].split()[1].strip(","))["id"] == "a"
    assert cancelled["run_at"] is None
    assert queue.job("a")["state"] == "dead"
    assert "is cancelled" in queue.job("c")["error"]
    assert {each["id"] for each in answer(queue, "list", "--state", "cancelled", "--json")} == {"b", "c"}


@pytest.mark.rows("Q75")
def test_retry_of_a_dead_job_takes_along_those_it_cancelled(queue: Queue) -> None:
    repaired = queue.folder / "repaired"
    command = f"test -e {repaired}"
    enqueue(
        queue,
        {"id": "a", "command": command, "max_retries": 0},
        {"id": "b", "command": "true", "depends_on": ["a"]},
        {"id": "c", "command": "true", "depends_on": ["b"]},
    )
    with queue.workers():
        queue.until("c", "cancelled")
        refused = call(queue, "dlq", "retry", "b")
        assert (refused.exit_code, "cancelled because of it" in refused.stderr) == (1, True)
        repaired.touch()
        assert call(queue, "dlq", "retry", "a").exit_code == 0
        queue.until("c", "completed")


@pytest.mark.rows("Q75")
@pytest.mark.parametrize(
    "jobs",
    [
        [{"id": "a", "command": "true", "depends_on": ["a"]}],
        [{"id": "a", "command": "true", "depends_on": ["b"]}, {"id": "b", "command": "true", "depends_on": ["a"]}],
        [{"id": "a", "command": "true"}, {"id": "b", "command": "true", "depends_on": ["missing"]}],
        [
            {"id": "a", "command": "true"},
            {"id": "b", "command": "true", "depends_on": ["a"], "run_at": "2030-01-31T08:00:00Z"},
        ],
    ],
    ids=["itself", "a circle", "one that is not there", "with a time"],
)
def test_dependency_that_cannot_be_is_refused_whole(queue: Queue, jobs: list[dict[str, object]]) -> None:
    assert "depends_on" in enqueue(queue, *jobs)
    assert sum(queue.states().values()) == 0
