"""What an earlier version made is brought up to date by opening it; everything in it stays."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from urllib.parse import urlsplit

import psycopg

from holdfast.core.job_logs import Record
from tests.conformance.support import Opener, put, take
from tests.conformance.test_lines import lines_of, said
from tests.support.stores import STORES, migrations

HOMES = STORES


def run_script(home: str, script: str) -> None:
    if home.startswith("sqlite"):
        with closing(sqlite3.connect(urlsplit(home).path)) as connection:
            connection.executescript(script)
    else:
        with psycopg.connect(home.partition("?")[0]) as connection:
            connection.execute(script.encode())


async def test_the_first_schema_is_brought_up_to_date(home: str, opener: Opener) -> None:
    run_script(home, opener.unopened().migration_sql("0..1"))
    store = await opener()
    names = migrations("sqlite" if home.startswith("sqlite") else "postgres")
    (job_id,) = await put(store)

    assert await store.migrate() == names[1:]

    (job,) = await take(store, 1)
    assert await store.append_logs([Record(job.lease, said("kept"))]) == [True]
    assert [line.text for line in await lines_of(store, job_id)] == ["kept"]


async def test_each_migration_can_be_run_by_another_tool(home: str, opener: Opener) -> None:
    names = migrations("sqlite" if home.startswith("sqlite") else "postgres")
    for number in range(len(names)):
        run_script(home, opener.unopened().migration_sql(f"{number}..{number + 1}"))

    store = await opener()

    assert await store.migrate() == []
    (job_id,) = await put(store)
    (job,) = await take(store, 1)
    assert await store.append_logs([Record(job.lease, said("kept"))]) == [True]
    assert [line.text for line in await lines_of(store, job_id)] == ["kept"]
