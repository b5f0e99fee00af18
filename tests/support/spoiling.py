"""What other programs do to a job's row or hash, of which this program knows nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, LiteralString, cast
from urllib.parse import parse_qs, urlsplit

import psycopg

from tests.support.keys import Keys


@contextmanager
def session(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Another program's connection to the schema of a PostgreSQL store; in the end it is rolled back."""
    parts = urlsplit(url)
    path = f"-c search_path={parse_qs(parts.query)['schema'][0]}"
    with closing(psycopg.connect(parts._replace(query="").geturl(), options=path)) as connection:
        yield connection
        connection.rollback()  # its locks are gone when this returns; the server notices a closed connection later


def spoil(url: str, job_id: str, **changes: Any) -> None:
    """Write these columns, or fields, of a job."""
    if url.startswith("redis:"):
        keys = Keys(url)
        keys.hset(f"job:{job_id}", mapping=changes)
        keys.client.close()
        return
    names = ", ".join(f"{name} = :{name}" for name in changes)
    statement = f"update holdfast_job set {names} where id = :id"  # noqa: S608 - names the test has written
    by_hand(url, statement, **changes, id=job_id)


def spoil_document(url: str, kind: str, name: str, document: str) -> None:
    """Write the document of a "schedule" or "limit"; its revision stays."""
    if url.startswith("redis:"):
        keys = Keys(url)
        revision = keys.hget(f"{kind}s", name).partition(" ")[0]
        keys.hset(f"{kind}s", name, f"{revision} {document}")
        keys.client.close()
        return
    is_sqlite = url.startswith("sqlite:")
    table = f"holdfast_{kind}" if is_sqlite else "job_limit" if kind == "limit" else kind
    by_hand(url, f"update {table} set document = :document where name = :name", document=document, name=name)  # noqa: S608


def by_hand(url: str, statement: str, **values: Any) -> None:
    """Run a statement, in SQLite's words, on either SQL store's ``holdfast_job``."""
    if url.startswith("sqlite:"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(statement, values)
        return
    with session(url) as other:
        words = statement.replace("holdfast_job", "job")
        for name in values:
            words = words.replace(f":{name}", f"%({name})s")
        other.execute(cast(LiteralString, words), values or None)
        other.commit()


def refuse_writes(url: str, job_id: str) -> None:
    """Let a SQL store refuse every later change of this job's row."""
    if url.startswith("sqlite:"):
        then = "begin select raise(abort, 'the row is frozen'); end"
        by_hand(url, f"create trigger frozen before update on holdfast_job when old.id = '{job_id}' {then}")
        return
    frozen = "create function frozen() returns trigger language plpgsql as $$ begin raise 'the row is frozen'; end $$"
    when = f"for each row when (old.id = '{job_id}') execute function frozen()"
    by_hand(url, f"{frozen}; create trigger frozen before update on holdfast_job {when}")


def accept_writes(url: str) -> None:
    """Undoes ``refuse_writes``."""
    by_hand(url, "drop trigger frozen" if url.startswith("sqlite:") else "drop trigger frozen on holdfast_job")
