"""One spelling of an id, on every store: who types another one is understood above the store, by the application."""

from __future__ import annotations

import pytest

from holdfast.core.ids import new_id
from holdfast.core.models import JobState
from holdfast.stores.base import Store
from tests.conformance.support import claim, put, state_of

SPELLINGS = {
    "capitals": str.upper,
    "no dashes": lambda job_id: job_id.replace("-", ""),
    "braces": lambda job_id: "{" + job_id + "}",
    "urn": lambda job_id: "urn:uuid:" + job_id,
    "a blank": lambda job_id: job_id + " ",
    "a line": lambda job_id: job_id + "\n",
    "no id": lambda job_id: "no id",
    "nothing": lambda job_id: "",
    "NUL": lambda job_id: "\0",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_other_spelling_of_an_id_matches_no_job(store: Store, spelling: str) -> None:
    (job_id,) = await put(store)
    other = SPELLINGS[spelling](job_id)

    assert await store.query.get(other) is None
    assert await store.query.attempts(other) == []
    for operated in (
        await store.admin.cancel([other]),
        await store.admin.replay([other]),
        await store.admin.delete([other]),
    ):
        assert (operated.changed, operated.refused) == ([], [(other, None)])
    delivered = await claim(store, ids=[other, new_id()])
    assert (delivered.jobs, delivered.refused) == ([], 2)
    assert await state_of(store, job_id) is JobState.QUEUED
    await store.queueing.wait([f"job:{other}"], timeout=0.01)
