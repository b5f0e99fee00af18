"""A store behind a network that misbehaves."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.postgres import Postgres


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=50))
    return True


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[FaultProxy]:
    """Between the store and the server."""
    with FaultProxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture
def proxied_url(postgres: Postgres, postgres_url: str, proxy: FaultProxy) -> str:
    """The URL of an empty schema, through the proxy."""
    return postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
