"""Submitting inside a transaction the caller holds, on whatever connection they hold it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import Conflict, Invalid
from holdfast.job import NewJob, Submitted
from holdfast.store import Store
from holdfast.stores.sqlite.connection import SOUND_CHECKPOINT
from holdfast.stores.sqlite.store import SQLiteStore


async def submit_within(store: Store, connection: object, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Submit on ``connection``: the jobs exist once its owner commits, and never if they roll back."""
    if not isinstance(store, SQLiteStore) or not isinstance(connection, sqlite3.Connection):
        raise Invalid(
            "connection", connection, "give a sqlite3.Connection to the file of this application, or leave it out"
        )
    _check_same_file(connection, store.path)
    by_itself = connection.isolation_level is None or getattr(connection, "autocommit", None) is True  # Python 3.12
    if by_itself and not connection.in_transaction:
        raise Conflict("connection: no transaction is open on it, so the job would commit by itself; BEGIN one first")
    if sqlite3.sqlite_version_info < SOUND_CHECKPOINT:
        connection.execute("pragma wal_autocheckpoint=0")  # see stores/sqlite/connection.py: ours run alone
    submission = store.submission(jobs)
    rows = [connection.execute(each.sql, each.parameters).fetchall() for each in submission.statements]
    return submission.answer(rows)


def _check_same_file(connection: sqlite3.Connection, path: str) -> None:
    file = next((row[2] for row in connection.execute("pragma database_list") if row[1] == "main"), "")
    if not file or not Path(file).samefile(path):
        raise Invalid(
            "connection", file or ":memory:", f"it is open on another database; this application's jobs are in {path}"
        )
