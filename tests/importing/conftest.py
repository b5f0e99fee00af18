"""A private Redis as the peer's store, and Holdfast on a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis as Client

from holdfast import Holdfast
from tests.interfaces.cli import ROOT, Cli, cli
from tests.support.redis import shared

__all__ = ["cli"]

DATABASE = 7
TARGET = "tests.importing.peer_jobs:app"


@pytest.fixture
def peer_url() -> Iterator[str]:
    """The URL of an empty database."""
    url = f"redis://127.0.0.1:{shared().port}/{DATABASE}"
    with Client.from_url(url, protocol=2) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture
def peer(peer_url: str) -> Iterator[Client]:
    """A client of the peer's store that answers bytes."""
    with Client.from_url(peer_url, protocol=2) as client:
        yield client


@pytest.fixture
def here(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holdfast]:
    """The application that takes the jobs, on a file of this test."""
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{cli.folder}/here.db")
    monkeypatch.setenv("HOLDFAST_APP", TARGET)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.delitem(sys.modules, "tests.importing.peer_jobs", raising=False)
    from tests.importing.peer_jobs import app

    yield app
    app.sync.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
