"""An application on a schema of its own, with a table of the caller's beside it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

import psycopg

from holdfast import Holdfast
from tests.external_tx.kinds import AWAITED, INSERT, KINDS, django_connection, run
from tests.support.postgres import SUPERUSER, Postgres


@cache
def administrator(server: Postgres) -> psycopg.Connection[Any]:
    """A connection of the superuser that stays; each statement is a transaction."""
    connection = psycopg.connect(server.url(user=SUPERUSER), autocommit=True, connect_timeout=10)
    atexit.register(connection.close)
    return connection


class Undone(Exception):
    """Makes a caller roll back."""


class Place:
    """Where the jobs are and where the rows are."""

    def __init__(self, server: Postgres, url: str) -> None:
        self.server = server
        self.url = url
        self.schema = url.rpartition("=")[2]
        self.table = f"invoice_{self.schema}"
        self.insert = INSERT.replace("SCHEMA", self.schema)
        self.app = Holdfast(url)
        self.app.sync.count()
        django_connection(url)  # set up once, before threads do it at once
        self.execute("create table TABLE (n integer); alter table TABLE owner to app")

    def close(self) -> None:
        """Drop the caller's table."""
        self.app.sync.close()
        self.execute("drop table TABLE")

    def execute(self, sql: str, *values: object) -> list[Any]:
        """Run a statement in which TABLE is the caller's table and SCHEMA that of the jobs."""
        named = sql.replace("TABLE", self.table).replace("SCHEMA", self.schema)
        cursor = administrator(self.server).execute(named.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def rows(self) -> int:
        """How many the caller has committed."""
        return int(self.execute("select count(*) from TABLE")[0][0])

    def jobs(self) -> int:
        """How many there are."""
        return int(self.execute("select count(*) from SCHEMA.job")[0][0])

    def both(self) -> tuple[int, int]:
        """Rows and jobs."""
        return self.rows(), self.jobs()

    def is_held(self) -> bool:
        """Whether a transaction that wrote rows is open."""
        return self.transactions() > 0

    def transactions(self) -> int:
        """Returns the number of open transactions that wrote rows."""
        return int(self.execute("select count(distinct pid) from pg_locks where relation = 'TABLE'::regclass")[0][0])

    def holding(self, kind: str, body: Callable[[Any], Any]) -> None:
        """Run ``await body(hold)`` inside a transaction of that kind that wrote a row, and commits afterwards."""

        async def within() -> None:
            async with KINDS[kind](self.url) as held:
                await held.execute(self.insert)
                await body(held)
            if kind in AWAITED:
                await self.app.close()

        run(kind, within())
