"""``app.edit``: the checks before the store is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Conflict, Holdfast, Invalid, JobState, NotFound, TooLarge
from holdfast.core.models import Reason
from holdfast.stores.base import ClaimRequest
from tests.conformance.support import LEASE, failing


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Holdfast]:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", payload_limit="1KiB", commands="argv")

    @app.task("work")
    async def work(n: int = 1) -> None: ...

    yield app
    app.sync.close()


def test_edit_returns_the_job_as_it_is_now(app: Holdfast) -> None:
    handle = app.sync.enqueue("work", {"n": 1}, key="k", tags=["a"])
    job = app.sync.edit("key:k", payload={"n": 2}, tags=["b"], priority=3, expires="1h")
    assert job == app.sync.get(handle.id)
    assert (job.payload, job.options_or_default.tags, job.priority) == ('{"n":2}', ("b",), 3)
    assert job.expires_at is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "edit"),
        ({"payload": {"n": "x"}}, "argument 'n' of task 'work'"),
        ({"payload": {"m": 1}}, "argument 'm' of task 'work'"),
        ({"payload": [1]}, "payload"),
        ({"priority": 101}, "priority"),
        ({"priority": True}, "priority"),
        ({"delay": "5"}, "delay"),
        ({"delay": 5, "run_at": "2035-01-31T08:00:00Z"}, "run_at"),
        ({"queue": ""}, "queue"),
        ({"tags": "abc"}, "tags"),
        ({"expires": 0}, "expires"),
    ],
)
def test_wrong_change_names_its_field(app: Holdfast, changes: dict[str, Any], field: str) -> None:
    handle = app.sync.enqueue("work")
    before = app.sync.get(handle.id)
    with pytest.raises(Invalid) as refused:
        app.sync.edit(handle.id, **changes)
    assert refused.value.field == field
    assert app.sync.get(handle.id) == before


def test_payload_beyond_the_limit_is_refused(app: Holdfast) -> None:
    handle = app.sync.enqueue("other")
    with pytest.raises(TooLarge):
        app.sync.edit(handle.id, payload={"n": "x" * 2000})


def test_unknown_job_is_not_found(app: Holdfast) -> None:
    with pytest.raises(NotFound):
        app.sync.edit("0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", priority=1)


def test_command_is_checked_as_in_a_submission(app: Holdfast) -> None:
    handle = app.sync.enqueue("command", {"argv": ["true"]}, delay="1h")
    with pytest.raises(Invalid, match="argv"):
        app.sync.edit(handle.id, payload={"argv": []})


@pytest.mark.parametrize(
    ("task", "payload", "wrong"),
    [
        ("command", {"argv": ["true"]}, {"argv": 5}),
        ("command", {"argv": ["true"]}, {"shell": "true"}),
        ("work", {}, {"n": "x"}),
        ("work", {}, [1]),
    ],
)
def test_payload_of_a_replay_is_checked_like_that_of_an_edit(
    app: Holdfast, task: str, payload: dict[str, Any], wrong: Any
) -> None:
    handle = app.sync.enqueue(task, payload)
    with pytest.raises(Invalid) as refused_edit:
        app.sync.edit(handle.id, payload=wrong)
    app.sync.cancel(handle.id)
    before = app.sync.get(handle.id)

    with pytest.raises(Invalid) as refused:
        app.sync.replay(handle.id, payload=wrong)

    assert str(refused.value) == str(refused_edit.value)
    assert app.sync.get(handle.id) == before


def test_unique_job_keeps_payload_and_queue(app: Holdfast) -> None:
    handle = app.sync.enqueue("work", {"n": 1}, unique="active")
    for changes in ({"payload": {"n": 2}}, {"queue": "other"}):
        with pytest.raises(Conflict, match=r"unique key.*cancel it, and submit another"):
            app.sync.edit(handle.id, **changes)
    assert app.sync.edit(handle.id, delay="1h", tags=["a"]).options_or_default.unique is not None


def test_job_that_has_begun_takes_no_expiry(app: Holdfast) -> None:
    handle = app.sync.enqueue("work", expires="1h")

    async def fail() -> None:
        store = await app.open_store()
        (job,) = (await store.queueing.claim(ClaimRequest("w", {"default": 1}, limit=1, lease_for=LEASE))).jobs
        await store.queueing.settle([failing(job, reason=Reason.ERROR, delay=LEASE)])

    app.run_blocking(fail())
    assert app.sync.get(handle.id).state is JobState.FAILED
    with pytest.raises(Conflict, match="has begun, and cannot expire"):
        app.sync.edit(handle.id, expires="2h")
    assert app.sync.edit(handle.id, expires="never").expires_at is None


def test_edit_that_loses_to_a_claim_is_refused(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = app.sync.enqueue("work")
    waiting = app.sync.get(handle.id)

    async def stale(_: str) -> Any:
        return waiting

    async def take() -> None:
        store = await app.open_store()
        await store.queueing.claim(ClaimRequest("w", {"default": 1}, limit=1, lease_for=LEASE))

    app.run_blocking(take())
    monkeypatch.setattr(app, "_get", stale)
    with pytest.raises(Conflict, match="cannot be edited: it is running"):
        app.sync.edit(handle.id, priority=5)
