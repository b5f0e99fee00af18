"""What the tests of callers' transactions share."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Holdfast
from tests.external_tx.support import Place
from tests.support.postgres import Postgres


@pytest.fixture
def place(postgres: Postgres, postgres_url: str) -> Iterator[Place]:
    place = Place(postgres, postgres_url)
    yield place
    place.close()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Holdfast]:
    """An application in one SQLite file with a table of its user."""
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    app.sync.count()
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        connection.execute("create table invoice (n)")
    yield app
    app.sync.close()
