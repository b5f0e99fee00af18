"""Blocking on Redis while it goes away."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from holdfast.core.errors import Unavailable
from holdfast.stores.connections.redis import RedisPool
from holdfast.stores.connections.redis_url import parse_server
from holdfast.transports.redis import BlockingReader
from tests.support.redis import Redis


async def test_server_failure_during_a_nudge_leaves_no_unretrieved_error(redis_of_its_own: Redis) -> None:
    """asyncio logs as an error what a future has failed with if it is never read."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    pool = RedisPool(parse_server(redis_of_its_own.url())[0], "atlas:jobs", retry_for=1, deadline=1)
    wire = await pool.connect(protocol=2)
    reader, stop = BlockingReader(wire, pool, int(await wire.send_command("CLIENT", "ID"))), asyncio.Event()
    await pool.run_command("PING")
    asking = asyncio.create_task(reader.read_blocking("BRPOP", "nothing", "30", seconds=30, stop=stop))
    await asyncio.sleep(0.1)
    redis_of_its_own.freeze()
    stop.set()
    await asyncio.sleep(0.1)
    redis_of_its_own.kill()
    with pytest.raises(Unavailable):
        await asking
    wire.close()
    await pool.close()
    del asking, reader, wire
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
