"""What the tests of several examples run: real processes, and their database."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from tests.examples.common import PATIENCE, until
from tests.support import forks
from tests.support.postgres import Postgres

ROOT = Path(__file__).resolve().parents[2]


def environment(example: Path, foreign: Sequence[str], **variables: str) -> dict[str, str]:
    """That of a process of an example: without variables that begin as the ``foreign`` do, and with these."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", *foreign))}
    return {**known, "PYTHONPATH": os.pathsep.join([str(ROOT), str(example)]), **variables}


class Database:
    """A database of a test's own."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.database = server.create_database()
        self.url = server.url(self.database)
        self._connection: psycopg.Connection | None = None

    def close(self) -> None:
        """Leave it."""
        if self._connection is not None:
            self._connection.close()

    def sql(self, statement: str, *values: object) -> list[Any]:
        """Run a statement as the owner of the database, on a connection that is kept: who waits asks fifty times a
        second."""
        cursor = self._connected().execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def _connected(self) -> psycopg.Connection:
        """A connection that was there a moment ago: tests stop servers."""
        if self._connection is not None:
            with suppress(psycopg.OperationalError):
                self._connection.execute(b"")
                return self._connection
            self._connection.close()
        self._connection = psycopg.connect(self.url, autocommit=True, connect_timeout=10)
        return self._connection

    def value(self, statement: str, *values: object) -> Any:
        """The one value of a statement."""
        ((value,),) = self.sql(statement, *values)
        return value


class Program:
    """``python -m MODULE …`` in a folder, its lines in a file. Left as a context it is stopped, and must end well."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._words = words
        self._folder = folder
        self._log = folder / f"log-{len(list(folder.glob('log-*')))}"
        self._variables = variables
        self.start()

    def start(self) -> None:
        """Start the process; again, after it was killed."""
        with self._log.open("a", encoding="utf-8") as log:
            self.process = forks.start(
                self._words, folder=self._folder, environment=self._variables, output=log.fileno()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            asked = self.process.poll() is None
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(PATIENCE)
        finally:
            self.kill()
        if kind is None and asked:
            assert code == 0, (code, self.log())

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """All its output."""
        return self._log.read_text(encoding="utf-8")

    def says(self, text: str) -> None:
        """Wait for that output; it must not have ended."""

        def given() -> bool:
            assert self.process.poll() is None, self.log()
            return text in self.log()

        until(given, text)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names that it has logged, in their order; all of them where none is named."""
        parsed = (json.loads(line) for line in self.log().splitlines() if line.startswith("{"))
        return [event for event in parsed if not names or event["event"] in names]

    def wait_for_events(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        """The events of this name, once there are so many."""

        def enough() -> list[dict[str, Any]]:
            events = self.events(name)
            return events if len(events) >= number else []

        return list(until(enough, f"{number} lines of {name}"))
