"""Log lines on PostgreSQL, where a job is deleted while they are written."""

from __future__ import annotations

import asyncio

from holdfast.stores.base import Store
from holdfast.stores.postgres.pool import parse_url
from tests.conformance.support import running
from tests.conformance.test_events_postgres import connected
from tests.conformance.test_job_logs import given, lines_of, record


async def test_a_job_that_is_being_deleted_gets_no_lines(store: Store) -> None:
    """They would stay for ever."""
    job = await running(store)
    schema = parse_url(store.url).schema
    async with connected(store) as link, link.transaction():
        await link.execute(f'delete from "{schema}".job')  # noqa: S608 - a name of ours
        recording = asyncio.create_task(store.queueing.append_logs([record(job, given("late"))]))
        await asyncio.wait([recording], timeout=1)

    assert await recording == [False]
    assert await lines_of(store, job.id) == []
