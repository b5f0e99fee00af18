"""A store behind a network that misbehaves."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from holdfast.stores.connections import redis as redis_links
from holdfast.stores.postgres import pool as postgres_links
from tests.support.fault_proxy import FaultProxy
from tests.support.load import TEST_SECONDS
from tests.support.redis import Redis, shared
from tests.support.stores import STORES, stores_of


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=TEST_SECONDS))
    return True


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store, of the kind that the name of the test's file has."""
    (name,) = stores_of(request.module.__name__.rpartition(".")[2], older=False)
    with STORES[name](tmp_path) as url:
        yield url


@pytest.fixture
def proxy(url: str) -> Iterator[FaultProxy]:
    """Between the store and the server."""
    port = urlsplit(url).port
    assert port is not None
    with FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def proxied_url(url: str, proxy: FaultProxy) -> str:
    """The URL of the same store, through the proxy."""
    return url.replace(f":{urlsplit(url).port}/", f":{proxy.port}/")


@pytest.fixture
def server() -> Redis:
    """The running server that the tests of this process share, the stores at ``url`` on Redis too: spare it."""
    return shared()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines a test can wait for."""
    for pool in (postgres_links, redis_links):
        monkeypatch.setattr(pool, "RETRY_FOR", 0.3)
        monkeypatch.setattr(pool, "DEADLINE", 0.7)
        monkeypatch.setattr(pool, "_CONNECT", 0.7)
