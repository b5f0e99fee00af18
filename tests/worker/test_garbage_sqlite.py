"""Rows that no submission of ours would write: another program's, a newer version's, a damaged file's."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any, NamedTuple

import pytest

from holdfast import Holdfast, JobState
from holdfast.core.events import RetryUnreadable, StoreTrouble
from holdfast.stores.common.named_sql import STATES
from tests.worker.support import Recorder, harness

NEIGHBOURS = 5


class Ended(NamedTuple):
    """A row, read as it lies there: no reader of ours need be able to read it."""

    id: str
    state: JobState
    reason: str | None
    error: str | None
    attempts: int


def rows(app: Holdfast, sql: str, **values: Any) -> list[Any]:
    """What another program's connection does to the file of this application."""
    with closing(sqlite3.connect(app.settings.url.removeprefix("sqlite:///"))) as connection, connection:
        return connection.execute(sql, values).fetchall()


def spoil(app: Holdfast, job_id: str, changes: dict[str, Any]) -> None:
    names = ", ".join(f"{name} = :{name}" for name in changes)
    rows(app, f"update holdfast_job set {names} where id = :id", **changes, id=job_id)  # noqa: S608


async def spoiled(app: Holdfast, changes: dict[str, Any], events: Recorder) -> Ended:
    """What became of a job, its row changed so, among neighbours that all have to succeed."""

    @app.task("work")
    async def work() -> str:
        return "done"

    @app.task("break")
    async def broken() -> None:
        raise ValueError("it broke")

    async with harness(app, defer_for="0s", max_attempts=2) as harnessed:
        first = await work.enqueue()
        bad = await work.enqueue()
        spoil(app, bad.id, changes)
        later = [await work.enqueue() for _ in range(NEIGHBOURS)]
        await harnessed.run_until_idle(limit=86_400)
        assert [await handle.result() for handle in (first, *later)] == ["done"] * (NEIGHBOURS + 1)
        assert not any(hand.running.done() for hand in harnessed._workers), "the worker has gone"
        assert events.of(StoreTrouble) == []
        assert rows(app, "select count(*) from holdfast_job where lease_until is not null") == [(0,)]
        columns = "state, reason, error, attempts"
        ((state, *rest),) = rows(app, f"select {columns} from holdfast_job where id = '{bad.id}'")  # noqa: S608
        return Ended(bad.id, STATES[state], *rest)


DEAD: list[tuple[str, dict[str, Any], str]] = [
    ("payload no JSON", {"payload": "not JSON"}, "payload"),
    ("payload no object", {"payload": "[1]"}, "payload"),
    ("payload of another signature", {"payload": '{"x": 1}'}, "payload"),
    ("payload nested too deep", {"payload": '{"x": ' + "[" * 3000 + "]" * 3000 + "}"}, "payload"),
    ("payload of halves", {"payload": '{"x": "\\ud800"}'}, "payload"),
    ("task unknown", {"task": "unheard-of"}, "no_handler"),
    ("task no name", {"task": "../x"}, "no_handler"),
]


@pytest.mark.parametrize(("changes", "reason"), [row[1:] for row in DEAD], ids=[row[0] for row in DEAD])
async def test_readable_job_that_cannot_run_is_dead_with_reason(
    app: Holdfast, changes: dict[str, Any], reason: str
) -> None:
    job = await spoiled_by(app, changes)
    assert (job.state, job.reason) == (JobState.DEAD, reason)
    assert job.error


async def spoiled_by(app: Holdfast, changes: dict[str, Any]) -> Ended:
    return await spoiled(app, changes, Recorder(app))


UNREADABLE: list[tuple[str, dict[str, Any]]] = [
    ("options a list", {"options": "[1]"}),
    ("options a number", {"options": "7"}),
    ("timeout no number", {"options": '{"timeout": "soon"}'}),
    ("retry no object", {"options": '{"retry": 7}'}),
    ("tags no texts", {"options": '{"tags": [1]}'}),
    ("payload missing", {"payload": None}),
]


@pytest.mark.parametrize("changes", [row[1] for row in UNREADABLE], ids=[row[0] for row in UNREADABLE])
async def test_unreadable_job_is_dead_and_delays_no_other(app: Holdfast, changes: dict[str, Any]) -> None:
    job = await spoiled_by(app, changes)
    assert (job.state, job.reason) == (JobState.DEAD, "payload")
    assert "cannot be read" in (job.error or "")


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("option unknown", {"options": '{"colour": "red"}'}),
    ("priority out of range", {"rank": -1_000_000}),
    ("queue no name", {"queue": "Not A Name"}),
    ("budget nothing", {"max_attempts": 0}),
    ("run_at before time", {"run_at": -1}),
    ("worker unknown", {"worker": "\0"}),
]


@pytest.mark.parametrize("changes", [row[1] for row in RUNS], ids=[row[0] for row in RUNS])
async def test_what_can_be_run_is_run(app: Holdfast, changes: dict[str, Any]) -> None:
    assert (await spoiled_by(app, changes)).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "policy", ['{"base": "soon"}', '{"colour": "red"}', '{"base": -1}', '{"jitter": "some"}'], ids=str
)
async def test_unreadable_retry_policy_falls_back_to_the_task(app: Holdfast, policy: str) -> None:
    events = Recorder(app)
    job = await spoiled(app, {"task": "break", "options": f'{{"retry": {policy}}}'}, events)
    assert (job.state, job.reason, job.attempts) == (JobState.DEAD, "max_attempts", 2)
    assert {event.job_id for event in events.of(RetryUnreadable)} == {job.id}
