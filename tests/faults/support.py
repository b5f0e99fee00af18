"""What fault tests say often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast.core.errors import Unavailable
from holdfast.core.models import Finding
from holdfast.stores import open_store
from holdfast.stores.base import Store

RESUMED = 30.0
"""Seconds within which everything works again once the server is back, on any machine."""
EVER = 1_000_000
"""Times: until the proxy is healed."""


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """The store of this URL, open."""
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def until_it_works(call: Callable[[], Awaitable[Any]]) -> Any:
    """What ``call`` returns, once the store does again what it should."""
    deadline = time.monotonic() + RESUMED
    while True:
        try:
            return await call()
        except Unavailable:
            assert time.monotonic() < deadline, "the store did not recover"
            await asyncio.sleep(0.1)


async def finding(store: Store, name: str) -> Finding:
    """What the doctor says under this name."""
    (found,) = [each for each in await store.health.doctor() if each.name == name]
    return found
