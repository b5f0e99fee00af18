"""Jobs of a tag on Redis, where a search takes several scripts."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Holdfast, WaitTimeout
from holdfast.core.clock import ManualClock
from holdfast.core.models import NewJob, Options
from holdfast.stores.base import Store
from holdfast.stores.redis import query
from holdfast.stores.redis.pool import NamespacePool
from tests.conformance.support import claim, new_job, put, settle

TAG = "run-7"


def tagged() -> NewJob:
    return new_job(queue="chain", options=Options(tags=(TAG,)))


async def test_jobs_added_during_a_search_are_awaited(
    store: Store, home: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = NamespacePool.run

    async def add_after_first_script(self: NamespacePool, script: Any, *words: Any) -> Any:
        """Runs a script; after the first one of a search, a job of the chain adds the next, and ends."""
        answer = await run(self, script, *words)
        if words[:2] in (("newest", query._NEWEST), ("oldest", 0)):
            (job,) = (await claim(store, 1, {"chain": 1})).jobs
            await put(store, tagged(), new_job(queue="idle"))
            await settle(store, job)
        return answer

    await put(store, tagged(), new_job(queue="idle"))
    monkeypatch.setattr(query, "_PART", 1)
    monkeypatch.setattr(query, "_SCANNED", 1)
    monkeypatch.setattr(NamespacePool, "run", add_after_first_script)
    async with Holdfast(home, now=clock) as app:
        with pytest.raises(WaitTimeout, match=r"1 of \d+ jobs of tag 'run-7' have not ended"):
            await app.wait_for_tag(TAG, timeout=0.05)
