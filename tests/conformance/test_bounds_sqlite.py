"""What a look, and an operation by filter, may not cost: others their turn, or more than they are about."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.models import BulkResult, JobFilter, JobState
from holdfast.stores.base import Store
from holdfast.stores.sqlite.admin import Chosen, SqliteAdmin
from tests.conformance.support import ended, new_job, put, state_of, states_of


@pytest.fixture
def connection(store: Store, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The owner's own connection to the store's file."""
    connection = sqlite3.connect(tmp_path / "holdfast.db", isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


async def test_waiting_for_a_job_reads_only_its_state(store: Store, connection: sqlite3.Connection) -> None:
    """The rest of the row may be a megabyte, or (as here) not to be read at all."""
    job_id = await ended(store, JobState.SUCCEEDED)
    connection.execute("update holdfast_job set options = '[]'")

    await store.queueing.wait([f"job:{job_id}"], timeout=30)


async def test_operation_by_filter_selects_jobs_without_the_write_lock(
    store: Store, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a large table that takes long; under the write lock no client could submit or settle meanwhile."""
    ids = await put(store, *[new_job() for _ in range(3)])
    choose = SqliteAdmin._choose_in

    def writing_meanwhile(self: SqliteAdmin, *args: Any, **options: Any) -> Chosen:
        connection.execute("begin immediate")
        chosen = choose(self, *args, **options)
        connection.execute("commit")
        return chosen

    monkeypatch.setattr(SqliteAdmin, "_choose_in", writing_meanwhile)

    for call in (store.admin.cancel, store.admin.replay, store.admin.delete):
        assert [job_id for job_id, _ in (await call(JobFilter())).changed] == ids
    assert await states_of(store, ids) == [None] * 3


async def test_operation_skips_jobs_that_no_longer_match_when_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, connection: sqlite3.Connection
) -> None:
    first, second = await put(store, new_job(), new_job())
    choose = SqliteAdmin._choose_in

    def started_meanwhile(self: SqliteAdmin, *args: Any, **options: Any) -> Chosen:
        chosen = choose(self, *args, **options)
        connection.execute("update holdfast_job set state = 2, lease_until = 1 << 62 where id = ?", (first,))
        return chosen

    monkeypatch.setattr(SqliteAdmin, "_choose_in", started_meanwhile)

    done = await store.admin.cancel(JobFilter(states=(JobState.QUEUED,)))

    assert done == BulkResult([(second, JobState.CANCELLED)], [])
    running = await store.query.get(first)
    assert running is not None
    assert (running.state, running.cancelling) == (JobState.RUNNING, False)


async def test_a_filter_that_matches_nothing_waits_for_no_writer(store: Store, connection: sqlite3.Connection) -> None:
    (job_id,) = await put(store)
    connection.execute("begin immediate")

    assert await store.admin.cancel(JobFilter(queue="empty")) == BulkResult([], [])

    connection.execute("rollback")
    assert await state_of(store, job_id) is JobState.QUEUED
