"""Limits on a SQLite file alone: what one claim can leave to the next."""

from __future__ import annotations

import pytest

from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.stores.base import Store
from holdfast.stores.sqlite import limits
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
