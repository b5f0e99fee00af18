"""The API as a client sees it, in this process and on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import CARRIED, MIGRATED, one_of, stores_of
from tests.web.client import Api


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        names = stores_of(metafunc.module.__name__.rpartition(".")[2], older=False)
        metafunc.parametrize("home", one_of(CARRIED, names, metafunc.function.__name__), indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    with MIGRATED[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def api(home: str) -> Iterator[Api]:
    """The API of an application with an empty store."""
    with Api(home) as api:
        yield api
