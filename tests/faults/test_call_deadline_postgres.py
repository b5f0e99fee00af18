"""Calls with a deadline: a call that is given up here ends on the server too."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import parse_qs, urlsplit

import pytest

from holdfast.core.errors import Unavailable
from holdfast.core.ids import new_id
from holdfast.core.models import JobState
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.store import PostgresStore
from tests.conformance.support import new_job, put
from tests.faults.support import until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.load import slowness
from tests.support.postgres import shared

NEEDLE = "select pg_sleep(31)"


async def _ended() -> None:
    rows = shared().execute("select pid from pg_stat_activity where query = %s and state = 'active'", NEEDLE)
    if rows:
        raise Unavailable(f"{len(rows)} go on")


async def test_abandoned_call_is_cancelled_on_the_server(url: str) -> None:
    store = PostgresStore(url, call_deadline=0.3)
    await store.open()
    begun = time.monotonic()

    with pytest.raises(Unavailable, match="no answer in time"):
        await store._resources.pool.fetch(NumberedStatement("needle", NEEDLE, ()))

    assert time.monotonic() - begun < 1.0 * slowness()
    await until_it_works(_ended)
    assert time.monotonic() - begun < 30.0, "it went on until its own timeout"
    await store.close()


async def test_a_change_of_jobs_takes_its_time(url: str) -> None:
    """However many log lines and attempts hang on its jobs."""
    (schema,) = parse_qs(urlsplit(url).query)["schema"]
    patient = PostgresStore(url)
    await patient.open()
    waiting, again, gone = await put(patient, *[new_job() for _ in range(3)])
    await patient.admin.cancel([again, gone])
    await patient.close()
    store = PostgresStore(url, call_deadline=0.3)
    await store.open()
    body = "begin perform pg_sleep(0.5); return null; end"
    shared().execute(f"create function {schema}.slow() returns trigger language plpgsql as $${body}$$")
    slow = f"before update or delete on {schema}.job for each statement execute function {schema}.slow()"
    shared().execute(f"create trigger slow {slow}")

    answers = await asyncio.gather(
        store.admin.cancel([waiting]), store.admin.replay([again]), store.admin.delete([gone])
    )

    assert [each.changed for each in answers] == [
        [(waiting, JobState.CANCELLED)],
        [(again, JobState.QUEUED)],
        [(gone, JobState.CANCELLED)],
    ]
    await store.close()


async def test_write_to_a_silent_server_is_abandoned_in_time(proxied_url: str, proxy: FaultProxy) -> None:
    store = PostgresStore(proxied_url, call_deadline=0.3)
    await store.open()
    await store.admin.delete([new_id()])
    proxy.hold()
    begun = time.monotonic()

    with pytest.raises(Unavailable):
        await store.admin.delete([new_id()])

    assert time.monotonic() - begun < 2.0 * slowness()
    proxy.heal()
    await store.close()
