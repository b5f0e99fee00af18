"""Dead queues and overtaken jobs, as a transport finds them in PostgreSQL."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobState
from holdfast.stores.base import Store
from holdfast.stores.postgres.store import PostgresStore
from holdfast.stores.transportable import TransportQueries
from tests.conformance.support import ended, new_job, put, running


def queries(store: Store) -> TransportQueries:
    return cast("PostgresStore", store).transport_queries


async def test_dead_queues_are_those_with_dead_jobs(store: Store) -> None:
    await put(store, new_job(queue="a"), new_job(queue="z"))
    assert await queries(store).dead_queues() == []
    for queue in ("m", "k", "k"):
        await ended(store, JobState.DEAD, queue=queue)
    assert await queries(store).dead_queues() == ["k", "m"]


async def test_overtaken_jobs_are_found_beside_running_ones_of_higher_priority(
    store: Store, clock: ManualClock
) -> None:
    await running(store, priority=9)
    (overtaken,) = await put(store)
    clock.advance(100)
    first_in_transport = await put(store)
    found = await queries(store).find_overtaken("default", first_in_transport, margin=timedelta(seconds=10), limit=1)
    assert found.ids == [overtaken]
