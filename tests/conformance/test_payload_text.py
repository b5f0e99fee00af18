"""A payload is JSON text that a store keeps to the letter: no parser of a database may write it anew."""

from __future__ import annotations

import pytest

from holdfast.core.models import JobState, NewJob, Options
from holdfast.stores.base import Store
from tests.conformance.support import ended, new_job, put, stored, take

PAYLOADS = [
    '{"z":1,"a":2,"m":3}',
    '{ "spaced"  :  [1 ,  2] }',
    '{"float":1.0,"whole":1,"padded":1.10,"exponent":1E2,"minus":-0}',
    '{"twice":1,"twice":2}',
    '{"big":12345678901234567890123456789}',
    '{"text":"\\u00e9 é \\/ \\ud83d\\ude00"}',
    '{"long":"' + "x" * 5000 + '","a":1.0}',
]


def batch_of(kind: str) -> list[NewJob]:
    """One job for each payload, as the stores' different ways of inserting take them."""
    return [
        new_job(
            payload=payload,
            priority=-number,
            queue=f"q{number % 2}" if kind == "mixed" else "default",
            key=f"k{number}" if kind == "keyed" else None,
            options=Options(tags=(f"t{number}",)) if kind == "tagged" else None,
        )
        if kind != "alike"
        else new_job(payload=payload)
        for number, payload in enumerate(PAYLOADS)
    ]


@pytest.mark.parametrize("kind", ["alike", "mixed", "keyed", "tagged"])
async def test_batch_keeps_payloads_to_the_letter(store: Store, kind: str) -> None:
    jobs = batch_of(kind)
    await put(store, *jobs)
    assert [(await stored(store, job.id)).payload for job in jobs] == PAYLOADS
    taken = {job.id: job.payload for _ in jobs for job in await take(store, capacity={"*": 100})}
    assert taken == {job.id: job.payload for job in jobs}


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
async def test_lone_job_and_replay_keep_payloads_to_the_letter(store: Store, payload: str) -> None:
    (job_id,) = await put(store, new_job(payload=payload))
    assert (await stored(store, job_id)).payload == payload
    dead = await ended(store, JobState.DEAD)
    await store.admin.replay([dead], payload=payload)
    assert (await stored(store, dead)).payload == payload
