"""Rows that another program wrote, locks that it holds and triggers that it made: what a store does beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from holdfast.errors import HoldfastError
from holdfast.job import Held, JobState, Reason
from holdfast.store import Store
from tests.conformance.support import LEASE, claim, ending, new_job, pulse, put, running, state_of, stored, take


@contextmanager
def session(store: Store) -> Iterator[psycopg.Connection[Any]]:
    """Another program's connection to the schema of this store; in the end it is rolled back."""
    parts = urlsplit(store.url)
    path = f"-c search_path={parse_qs(parts.query)['schema'][0]}"
    connection = psycopg.connect(parts._replace(query="").geturl(), options=path)
    try:
        yield connection
    finally:
        connection.close()


async def test_options_nested_too_deep_kill_nobody(store: Store) -> None:
    deep, innocent = await put(store, new_job(), new_job())
    options = '{"metadata": {"a": ' + "[" * 3000 + "]" * 3000 + "}}"
    with session(store) as other:
        other.execute("update job set options = %s where id = %s", [options, deep])
        other.commit()

    assert (await stored(store, deep)).options is None
    assert [job.id for job in await take(store)] == [innocent]
    assert (await stored(store, deep)).reason == Reason.PAYLOAD


async def test_an_attempt_that_is_not_there_is_not_given_back(store: Store) -> None:
    robbed, neighbour = await running(store), await running(store)
    with session(store) as other:
        other.execute("update job set attempts = 0 where id = %s", [robbed.id])
        other.commit()

    answers = await store.settle([ending(job, JobState.QUEUED, refund=True) for job in (robbed, neighbour)])

    assert [answer.accepted for answer in answers] == [True, True]
    assert [(await stored(store, job.id)).attempts for job in (robbed, neighbour)] == [0, 0]


async def test_what_was_taken_before_a_claim_failed_is_delivered(store: Store) -> None:
    (job_id,) = await put(store, new_job(queue="q00"))
    (stuck,) = await put(store, new_job(queue="q39"))
    wants = {f"q{number:02}": 2 for number in range(40)}  # more than one statement looks into
    with session(store) as other:
        other.execute("create function refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$")
        other.execute(
            "create trigger refuse before update on job for each row when (new.queue = 'q39') execute function refuse()"
        )
        other.commit()

    assert [job.id for job in await take(store, 2, wants)] == [job_id]
    with pytest.raises(HoldfastError, match="no"):
        await take(store, 2, wants)
    assert await state_of(store, stuck) is JobState.QUEUED


async def test_a_foreign_key_to_a_job_is_not_in_its_way(store: Store) -> None:
    """Who inserted a row with one holds a key share until its transaction ends."""
    held = await running(store)
    (waiting,) = await put(store)
    with session(store) as other:
        other.execute("select from job where id = any(%s) for key share", [[held.id, waiting]])

        beat = await store.beat(pulse(), [held.lease], lease_for=LEASE * 2)
        assert beat.held == [Held.HELD]
        assert (await stored(store, held.id)).lease_until_us == await store.now_us() + 2 * LEASE.total_seconds() * 1e6
        assert [job.id for job in (await claim(store)).jobs] == [waiting]
