"""Where somebody waits for the answer: what is given up here ends on the server too."""

from __future__ import annotations

import time

import pytest

from holdfast.errors import Unavailable
from holdfast.stores.postgres.statements import Query
from holdfast.stores.postgres.store import PostgresStore
from tests.faults.support import until_it_works
from tests.support.postgres import shared

NEEDLE = "select pg_sleep(31)"


async def _ended() -> None:
    rows = shared().execute("select pid from pg_stat_activity where query = %s and state = 'active'", NEEDLE)
    if rows:
        raise Unavailable(f"{len(rows)} go on")


async def test_a_call_that_was_given_up_ends_on_the_server_too(url: str) -> None:
    store = PostgresStore(url, patience=0.3)
    await store.open()
    begun = time.monotonic()

    with pytest.raises(Unavailable, match="no answer in time"):
        await store._open.links.fetch(Query("needle", NEEDLE, ()))

    assert time.monotonic() - begun < 1.0
    await until_it_works(_ended)
    assert time.monotonic() - begun < 10.0, "it went on until its own timeout"
    await store.close()
