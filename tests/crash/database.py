"""The store as an outsider sees it: its tables or keys over a connection of its own, none of the product's code."""

from __future__ import annotations

import json
import sqlite3
import time
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg

from holdfast.core.batches import BATCH_TASK
from tests.crash.checker import Row
from tests.support.keys import Keys

STATES = ("queued", "scheduled", "running", "failed", "waiting", "succeeded", "dead", "cancelled")
PATIENCE = 60
"""Seconds in which a server that was killed must be back."""


@dataclass(frozen=True)
class Note:
    """What a submitter of the crash tests put into a job."""

    job: str
    by: str
    index: int
    keyed: bool


class Database(ABC):
    """What one store holds."""

    @abstractmethod
    def rows(self) -> dict[str, Row]:
        """Every job."""

    @abstractmethod
    def held_by(self, pid: int) -> list[tuple[str, int]]:
        """The leases of one process."""

    @abstractmethod
    def unended(self) -> int:
        """Jobs that have not reached their end."""

    @abstractmethod
    def notes(self) -> list[Note]:
        """What submitters submitted."""

    @abstractmethod
    def keys(self) -> dict[str, str]:
        """The job that each key stands for."""

    @abstractmethod
    def migrations(self) -> int:
        """How many steps its schema has taken."""

    @abstractmethod
    def recovered(self) -> dict[tuple[str, int], float]:
        """When (wall clock) each lease that ran out was found and settled."""

    @abstractmethod
    def integrity(self) -> str:
        """What a check of the whole says: ``ok``."""

    def any_running(self) -> bool:
        """Whether some job is being run."""
        return any(row.state == "running" for row in self.rows().values())


class Tables(Database):
    """The tables of one store. Statements are written with SQLite's names and placeholders."""

    @abstractmethod
    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Every row of a query."""

    def rows(self) -> dict[str, Row]:
        found = self.all(
            "select id, state, claims, attempts, reason, result, error from holdfast_job where task <> ?", BATCH_TASK
        )
        return {
            str(job): Row(
                str(job),
                STATES[state],
                claims,
                attempts,
                reason,
                None if result is None else json.loads(result)["claims"],
                error,
            )
            for job, state, claims, attempts, reason, result, error in found
        }

    def held_by(self, pid: int) -> list[tuple[str, int]]:
        sql = "select id, claims from holdfast_job where state = 2 and worker like ?"
        return [(str(job), claims) for job, claims in self.all(sql, f"%-{pid}-%")]

    def unended(self) -> int:
        return int(self.all("select count(*) from holdfast_job where state < 5")[0][0])

    def notes(self) -> list[Note]:
        found = [
            (str(job), json.loads(payload), bool(keyed))
            for job, payload, keyed in self.all("select id, payload, has_key from holdfast_job")
        ]
        return [Note(job, payload["by"], payload["index"], keyed) for job, payload, keyed in found]

    def keys(self) -> dict[str, str]:
        return {key: str(job) for key, job in self.all("select key, job_id from holdfast_key")}

    def migrations(self) -> int:
        return int(self.all("select count(*) from holdfast_migration")[0][0])


class File(Tables):
    """An SQLite file, read only."""

    def __init__(self, url: str) -> None:
        self._path = url.removeprefix("sqlite:///")

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10)) as connection:
            return connection.execute(sql, parameters).fetchall()

    def recovered(self) -> dict[tuple[str, int], float]:
        sql = """select j.id, a.claims, a.ended_at from holdfast_attempt a join holdfast_job j on j.seq = a.job_seq
                 where a.reason = 'crashed'"""
        return {(job, claims): ended / 1e6 for job, claims, ended in self.all(sql)}

    def integrity(self) -> str:
        return str(self.all("pragma integrity_check")[0][0])


class Schema(Tables):
    """A schema of a PostgreSQL database, on whichever server of the URL takes writes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._prefix = parse_qs(parts.query)["schema"][0] + "."
        self._url = parts._replace(query="target_session_attrs=read-write").geturl()

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        statement = sql.replace("holdfast_", self._prefix).replace("?", "%s").encode()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with psycopg.connect(self._url, autocommit=True, connect_timeout=5) as connection:
                    return connection.execute(statement, parameters or None).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def recovered(self) -> dict[tuple[str, int], float]:
        sql = "select job_id, claims, ended_at from holdfast_attempt where reason = 'crashed'"
        return {(str(job), claims): ended / 1e6 for job, claims, ended in self.all(sql)}

    def integrity(self) -> str:
        strays = """select 'attempt', job_id from holdfast_attempt where job_id not in (select id from holdfast_job)
                    union all select 'tag', job_id from holdfast_tag where job_id not in (select id from holdfast_job)
                    union all select 'lease', id from holdfast_job where (lease_until is null) = (state = 2)
                    union all select 'key', id from holdfast_job
                    where has_key and id not in (select job_id from holdfast_key)"""
        return ", ".join(f"{what} of {job}" for what, job in self.all(strays)) or "ok"


class Namespace(Database):
    """The keys of a namespace in Redis."""

    def __init__(self, url: str) -> None:
        self._keys = Keys(url)

    def rows(self) -> dict[str, Row]:
        rows = {}
        for job, fields in self._keys.jobs().items():
            if fields["spec"].endswith(f"\n{BATCH_TASK}"):  # no worker takes it
                continue
            result = fields.get("result")
            claims = _claims(fields)
            attempts = int(fields.get("attempts", claims))
            value = None if result is None else json.loads(result)["claims"]
            rows[job] = Row(job, fields["state"], claims, attempts, fields.get("reason"), value, fields.get("error"))
        return rows

    def held_by(self, pid: int) -> list[tuple[str, int]]:
        return [  # asked of the leases alone: it has to be quicker than they end
            (job, _claims(fields))
            for job, fields in self._keys.jobs(self._keys.leased()).items()
            if fields["state"] == "running" and f"-{pid}-" in fields["worker"]
        ]

    def unended(self) -> int:
        return sum(fields["state"] in STATES[:5] for fields in self._keys.jobs().values())

    def notes(self) -> list[Note]:
        found = [(job, json.loads(fields["payload"]), "key" in fields) for job, fields in self._keys.jobs().items()]
        return [Note(job, payload["by"], payload["index"], keyed) for job, payload, keyed in found]

    def keys(self) -> dict[str, str]:
        return {key: held.partition(" ")[2] for key, held in self._keys.hash("keys").items()}

    def migrations(self) -> int:
        return int(self._keys.hash("meta").get("schema", 0))

    def recovered(self) -> dict[tuple[str, int], float]:
        return {
            (job, int(record[0])): int(record[4]) / 1e6
            for job in self._keys.jobs()
            for record in self._keys.attempts(job)
            if record[6] == "crashed"
        }

    def integrity(self) -> str:
        return ", ".join(sorted(set(self._keys.strays()))) or "ok"


def _claims(fields: dict[str, str]) -> int:
    """A line without the job that was picked up."""
    return int(fields.get("claims", "pickupTime" in fields))


def database_of(url: str) -> Database:
    """The database behind the URL of a store."""
    if url.startswith("redis:"):
        return Namespace(url)
    return File(url) if url.startswith("sqlite:") else Schema(url)
