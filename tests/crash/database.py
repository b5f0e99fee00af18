"""The store as an outsider sees it: plain SQL over a read-only connection, none of the product's code."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.crash.checker import Row

STATES = ("queued", "scheduled", "running", "failed", "waiting", "succeeded", "dead", "cancelled")


class Database:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=10)) as connection:
            yield connection

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Every row of a query."""
        with self._open() as connection:
            return connection.execute(sql, parameters).fetchall()

    def rows(self) -> dict[str, Row]:
        """Every job."""
        found = self.all("select id, state, claims, attempts, reason, result from holdfast_job")
        return {
            job: Row(job, STATES[state], claims, attempts, reason, None if result is None else json.loads(result))
            for job, state, claims, attempts, reason, result in found
        }

    def held_by(self, pid: int) -> list[tuple[str, int]]:
        """The leases of one process."""
        sql = "select id, claims from holdfast_job where state = 2 and worker like ?"
        return [(job, claims) for job, claims in self.all(sql, f"%-{pid}-%")]

    def unended(self) -> int:
        """Jobs that have not reached their end."""
        return int(self.all("select count(*) from holdfast_job where state < 5")[0][0])

    def recovered(self) -> dict[tuple[str, int], float]:
        """When (wall clock) each lease that ran out was found and settled."""
        sql = """select j.id, a.claims, a.ended_at from holdfast_attempt a join holdfast_job j on j.seq = a.job_seq
                 where a.reason = 'crashed'"""
        return {(job, claims): ended / 1e6 for job, claims, ended in self.all(sql)}

    def integrity(self) -> str:
        """What SQLite's own check says: ``ok``."""
        return str(self.all("pragma integrity_check")[0][0])
