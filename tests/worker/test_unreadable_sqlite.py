"""Rows another program has spoiled: they are read as far as they go, and delay no other job."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Holdfast, JobState
from holdfast.stores.base import ClaimRequest
from tests.worker.support import harness


def spoil(app: Holdfast, job_id: str, **changes: Any) -> None:
    """What another program's connection does to a row of this application."""
    names = ", ".join(f"{name} = :{name}" for name in changes)
    with closing(sqlite3.connect(app.settings.url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute(f"update holdfast_job set {names} where id = :id", {**changes, "id": job_id})  # noqa: S608


@pytest.mark.parametrize(
    "changes",
    [
        {"options": "[1]"},
        {"options": "7"},
        {"options": '{"timeout": "soon"}'},
        {"options": '{"retry": 7}'},
        {"options": '{"tags": [1]}'},
        {"payload": None},
    ],
    ids=str,
)
async def test_unreadable_job_is_omitted_and_hides_no_other(app: Holdfast, changes: dict[str, Any]) -> None:
    good, bad = await app.enqueue("work"), await app.enqueue("work")
    spoil(app, bad.id, **changes)
    assert {job.id for job in (await app.find()).jobs} == {good.id, bad.id}
    assert (await app.get(bad.id)).options is None
    assert (await app.cancel([good.id, bad.id])).refused == []
    await app.delete([good.id, bad.id])
    assert await app.count() == 0
    await app.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -(2**63)},
        {"claims": 2**63 - 1},
        {"attempts": -1},
        {"state": 8},
        {"state": 2, "lease_until": None},
        {"options": "{"},
    ],
    ids=str,
)
async def test_schema_refuses_rows_that_cannot_be_handled(app: Holdfast, changes: dict[str, Any]) -> None:
    job = await app.enqueue("work")
    with pytest.raises(sqlite3.IntegrityError):
        spoil(app, job.id, **changes)
    await app.close()


async def test_unreadable_lost_job_does_not_stop_the_sweeper(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> str:
        return "done"

    async with harness(app) as harnessed:
        store = await app.open_store()
        bad, lost = await work.enqueue(), await work.enqueue()
        await store.queueing.claim(ClaimRequest("doomed", {"*": 2}, limit=2, lease_for=timedelta(seconds=1)))
        spoil(app, bad.id, options="7")
        await harnessed.advance(60)
        assert await lost.result() == "done"
        assert await bad.state() is JobState.DEAD
