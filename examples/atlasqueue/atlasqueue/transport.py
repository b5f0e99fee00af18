"""The lists of ids in Redis, for what AtlasQueue does with them beside Holdfast."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from holdfast import Settings
from holdfast.transports.contract import TransportKeys
from holdfast.transports.redis import RedisList, server_of, text_of


@asynccontextmanager
async def opened_lists(settings: Settings) -> AsyncIterator[RedisList]:
    """Yields the lists under the names of the settings. They connect when they are used."""
    names = TransportKeys(settings.transport_key, settings.transport_dead_key)
    lists = RedisList(server_of(settings.transport_url, names), names, consumer="atlasqueue")
    try:
        yield lists
    finally:
        await lists.close()


async def delete_lists(lists: RedisList, queues: Iterable[str]) -> None:
    """Deletes the lists of these queues, and of those that Redis knows, with what else the transport keeps there.

    No other key is touched: they are named one by one, after docs/transports.md, or found by the names that
    ``worker/limiter.py`` gives.
    """
    (key, dead_key), ask = lists.names, lists.pool.run_command
    used = [*await ask("ZRANGE", f"{key}@queues", 0, -1), *await ask("SMEMBERS", f"{key}@active")]
    names = {"default", *queues, *map(text_of, used), *await lists.dead_letter_queues()}
    per_queue = (TransportKeys(key, dead_key), TransportKeys(f"{key}@republished", dead_key))
    found = {name for keys in per_queue for queue in names for name in (keys.ready(queue), keys.dead_letter_key(queue))}
    kept = {f"{key}@{name}" for name in ("queues", "active", "new_queues", "sweep", "probe")}
    for name in ("rate", "turn"):
        pattern = re.sub(r"([][*?\\^-])", r"\\\1", key) + f":{name}:*"
        cursor = b"0"
        while True:
            cursor, part = await ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found |= set(map(text_of, part))
            if int(cursor) == 0:
                break
    await ask("UNLINK", *found, *kept, f"{dead_key}@queues")
