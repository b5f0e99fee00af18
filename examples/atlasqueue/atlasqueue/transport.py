"""The lists of ids in Redis, for what AtlasQueue does with them beside Holdfast."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast import Settings
from holdfast.transports.contract import TransportKeys
from holdfast.transports.redis import RedisList, server_of


@asynccontextmanager
async def opened_lists(settings: Settings) -> AsyncIterator[RedisList]:
    """Yields the lists under the names of the settings. They connect when they are used."""
    names = TransportKeys(settings.transport_key, settings.transport_dead_key)
    lists = RedisList(server_of(settings.transport_url, names), names, consumer="atlasqueue")
    try:
        yield lists
    finally:
        await lists.close()
