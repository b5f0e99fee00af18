"""The own database of the service in the chaos scenarios: a row for each user that a job has stored.

Where the jobs are in PostgreSQL or a SQLite file, the table is there too, without a unique key: the row and the step
are one commit. Where they are in Redis, it is in a SQLite file of its own, and the job's id is the row's key.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psycopg

from holdfast import Context


class UserTable:
    """The table of users, by the URL of the jobs' store and the folder of the test."""

    def __init__(self, url: str, folder: Path) -> None:
        parts = urlsplit(url)
        self._is_shared = parts.scheme != "redis"
        self._server = parts._replace(query="").geturl() if parts.scheme == "postgresql" else None
        self._file = parts.path if parts.scheme == "sqlite" else str(folder / "users.db")
        self._schema = parse_qs(parts.query).get("schema", [""])[0]
        self._name = f'"{self._schema}".service_user' if self._server else "service_user"

    def create(self) -> None:
        """Creates the table."""
        key = "" if self._is_shared else "primary key"
        statement = f"create table {self._name} (job text not null {key}, number text not null)"
        if self._server is not None:
            with psycopg.connect(self._server) as server:
                server.execute(f'create schema if not exists "{self._schema}"'.encode())
                server.execute(statement.encode())
            return
        with closing(sqlite3.connect(self._file)) as link, link:
            link.execute(statement)

    def count(self) -> Counter[str]:
        """Counts the users of each job."""
        query = f"select job from {self._name}"  # noqa: S608 - the name is ours
        if self._server is not None:
            with psycopg.connect(self._server) as server:
                return Counter(job for (job,) in server.execute(query.encode()))
        with closing(sqlite3.connect(self._file)) as link:
            return Counter(job for (job,) in link.execute(query))

    async def store(self, context: Context, number: str) -> None:
        """Stores the user of a job, in a step."""
        if self._server is not None:
            await self._store_in_postgres(self._server, context, number)
        elif self._is_shared:
            with closing(sqlite3.connect(self._file, timeout=30)) as link, link:
                await context.step_in(link, "store", self._insert, link, context.id, number)
        else:
            await context.step("store", self._insert_once, context.id, number)

    async def _store_in_postgres(self, server: str, context: Context, number: str) -> None:
        link = await asyncpg.connect(server)
        try:
            async with link.transaction():
                statement = f"insert into {self._name} values ($1, $2)"  # noqa: S608 - the name is ours
                await context.step_in(link, "store", link.execute, statement, context.id, number)
        finally:
            await link.close()

    def _insert(self, link: sqlite3.Connection, job: str, number: str) -> None:
        link.execute(f"insert into {self._name} values (?, ?)", (job, number))  # noqa: S608 - the name is ours

    def _insert_once(self, job: str, number: str) -> None:
        with closing(sqlite3.connect(self._file, timeout=30)) as link, link:
            link.execute(f"insert or ignore into {self._name} values (?, ?)", (job, number))  # noqa: S608 - the name is ours
