"""A chain of migrations is applied in its order, once; everything stored stays. The later ones exist only here."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from holdfast.core.errors import StoreMismatch
from holdfast.core.models import JobState
from tests.conformance.support import Opener, lengthen_migrations, put, settle, state_of, take
from tests.support.stores import STORES

HOMES = STORES


def run_script(home: str, script: str) -> list[Any]:
    """Runs a script beside the store; the rows of its last statement."""
    if home.startswith("sqlite"):
        with closing(sqlite3.connect(urlsplit(home).path, isolation_level=None)) as connection:
            if not script.startswith("select"):
                connection.executescript(script)
                return []
            return connection.execute(script).fetchall()
    with psycopg.connect(home.partition("?")[0]) as connection:
        cursor = connection.execute(script.encode())
        return cursor.fetchall() if cursor.description else []


def prefix_of(home: str) -> str:
    return "holdfast_" if home.startswith("sqlite") else f"{home.partition('schema=')[2].partition('&')[0]}."


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch, home: str) -> list[str]:
    """The names of a longer chain, which every store made from now on has."""
    return lengthen_migrations(monkeypatch)["sqlite" if home.startswith("sqlite") else "postgres"]


@pytest.mark.rows("J53", "J54", "J55", "J56")
async def test_stored_jobs_survive_every_migration(home: str, opener: Opener, chain: list[str]) -> None:
    run_script(home, opener.unopened().migration_sql("0..1"))
    insert = (
        "insert into {}job (id, queue, task, payload, state, rank, run_at, created_at) values "
        "('01900000-0000-7000-8000-000000000001', 'default', 'work', '{\"n\": 1}', 0, 0, 1, 1);"
    )
    run_script(home, insert.replace("{}job", f"{prefix_of(home)}job"))

    store = await opener()

    assert await store.migrate() == chain[1:]
    assert await (await opener()).migrate() == []
    query = "select j.note, n.note from {}job j join {}note n on n.job_id = cast(j.id as text)"
    notes = run_script(home, query.replace("{}", prefix_of(home)))
    assert notes == [("work", "default")]
    (job,) = await take(store, 1)
    assert (job.payload, (await settle(store, job)).accepted) == ('{"n": 1}', True)
    assert await state_of(store, job.id) is JobState.SUCCEEDED


@pytest.mark.rows("J56")
async def test_each_migration_can_be_run_by_another_tool(home: str, opener: Opener, chain: list[str]) -> None:
    for number in range(len(chain)):
        run_script(home, opener.unopened().migration_sql(f"{number}..{number + 1}"))

    store = await opener()

    assert await store.migrate() == []
    await put(store)
    assert len(await take(store, 1)) == 1


@pytest.mark.parametrize("number", [1, 3])
async def test_store_of_an_earlier_version_is_refused(home: str, opener: Opener, number: int) -> None:
    script = opener.unopened().migration_sql("0..1")
    older = "alter table {0}job rename column partition to other;\nupdate {0}migration set number = {1};"
    run_script(home, f"{script}\n{older.format(prefix_of(home), number)}")

    with pytest.raises(StoreMismatch, match=rf"made by an earlier Holdfast \(schema {number}\).* finish its jobs"):
        await opener()
