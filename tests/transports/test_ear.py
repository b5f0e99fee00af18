"""Blocking on Redis while it goes away."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from holdfast.core.errors import Unavailable
from holdfast.stores.connections.redis import RedisPool
from holdfast.stores.connections.redis_url import parse_server
from holdfast.transports.base import BlockingReader
from tests.support.redis import Redis


async def test_a_server_that_dies_under_a_nudge_leaves_no_error_unseen(redis_of_its_own: Redis) -> None:
    """asyncio logs as an error what a future has failed with if nobody ever looks at it."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    links = RedisPool(parse_server(redis_of_its_own.url())[0], "atlas:jobs", patience=1, deadline=1)
    wire = await links.connect(protocol=2)
    ear, stop = BlockingReader(wire, links, int(await wire.ask("CLIENT", "ID"))), asyncio.Event()
    await links.command("PING")
    asking = asyncio.create_task(ear.ask("BRPOP", "nothing", "30", seconds=30, stop=stop))
    await asyncio.sleep(0.1)
    redis_of_its_own.freeze()
    stop.set()
    await asyncio.sleep(0.1)
    redis_of_its_own.kill()
    with pytest.raises(Unavailable):
        await asking
    ear.close()
    await links.close()
    del asking, wire
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
