"""Limits on a SQLite file alone: what one claim can leave to the next, and need not look at."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.limits import Admission, Limit, LimitChange, LimitTable, LimitValues
from holdfast.stores.base import Store
from holdfast.stores.sqlite import limits
from tests.conformance.limited import job_of, limit, limit_again
from tests.conformance.support import new_job, put, take


async def test_jobs_without_a_partition_wait_until_a_claim_gave_them_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_ASSIGNED", 1)
    monkeypatch.setattr(limits, "_MAX_ASSIGNED", 2)
    await put(store, *[new_job(queue="big") for _ in range(9)])
    values = LimitValues(concurrency=1)
    await store.limits.write_limit(LimitChange(Limit(name="late", queue="big", values=values), 0))
    assert [len(await take(store, 5, {"big": 5})) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    "values",
    [{"concurrency": 1}, {"rate": 1, "period_us": 3_600_000_000}, {"concurrency": 300}],
    ids=("full", "rate", "paused"),
)
@pytest.mark.parametrize(("of", "at_most"), [({"queue": "default"}, 1), ({"task": "work"}, 100)], ids=("queue", "task"))
async def test_keys_behind_a_closed_limit_are_not_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], values: dict[str, Any], at_most: int
) -> None:
    """A limit without a key, of the queue or of a task, beside one with many keys."""
    await limit(store, "all", **of, **values)
    await limit(store, "each", by="args.tenant", concurrency=5)
    await put(store, *[job_of(number) for number in range(300)])
    await take(store, 1)
    if values == {"concurrency": 300}:
        await store.limits.pause_buckets(["all"], timedelta(hours=1))
    looked_at: list[str] = []
    admit = Admission.admit

    def admit_counted(self: Admission, partition: str, *args: Any, **options: Any) -> int | None:
        looked_at.append(partition)
        return admit(self, partition, *args, **options)

    monkeypatch.setattr(Admission, "admit", admit_counted)

    assert await take(store, 100) == []

    assert 0 < len(looked_at) <= at_most


async def test_claim_obeys_the_limits_that_its_own_transaction_saw(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of the store looks at the same time, in a snapshot from before a change."""
    await limit(store, concurrency=50)
    await put(store, *[new_job() for _ in range(20)])
    current_table = limits.SqliteLimits.current_table
    with closing(sqlite3.connect(tmp_path / "holdfast.db", isolation_level=None, check_same_thread=False)) as snapshot:
        snapshot.execute("begin")
        snapshot.execute("select * from holdfast_limit").fetchall()
        await limit_again(store, concurrency=1)

        def look_at_once(self: limits.SqliteLimits, connection: sqlite3.Connection) -> LimitTable | None:
            table = current_table(self, connection)
            current_table(self, snapshot)
            return table

        monkeypatch.setattr(limits.SqliteLimits, "current_table", look_at_once)

        assert len(await take(store, 10)) == 1
