"""Transports: Redis tells workers of ready jobs, while PostgreSQL holds the jobs.

transport_store.py       a store whose ready jobs' ids a transport carries: it announces them, and claims arrived ids
claiming.py              one claim of arrived ids
alternating_claiming.py  claims of arrived ids, and of jobs under limits
session.py               the deliveries of one event loop, and whether the transport is there
reconciler.py            the sweep: lost ids are announced again
contract.py              the contract of a transport, and the names of its keys
redis.py                 a list of ids a queue, or a stream of them read by a consumer group
scripts/                 Lua: the operations of each kind (list_stream.lua), and the steps made of it (deliveries.lua)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, cast

from holdfast.core.errors import ConfigError
from holdfast.core.events import Event
from holdfast.stores.base import Store
from holdfast.stores.transportable import TransportableStore
from holdfast.transports.contract import Transport, TransportKeys
from holdfast.transports.session import DeliveryLedger
from holdfast.transports.transport_store import TransportStore

__all__ = ["DeliveryLedger", "TransportConfig", "with_transport"]


class TransportConfig(NamedTuple):
    """Which transport, its server, and the names of its keys."""

    kind: str
    """``redis_list`` or ``redis_stream``."""
    url: str
    key: str
    dead_key: str


def with_transport(
    store: Store, config: TransportConfig, *, lease: timedelta, in_flight: DeliveryLedger, emit: Callable[[Event], None]
) -> Store:
    """``store``, whose ready jobs' ids that transport carries. It must be a TransportableStore.

    ``lease``: how long a consumer with deliveries may be silent. ``in_flight`` is shared by the stores of an
    application. ``emit`` receives an event when the transport leaves and when it is back.
    """
    try:
        from holdfast.transports.redis import RedisList, RedisStream, server_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"transport: Redis needs {error.name}; pip install 'holdfast[redis]'") from None
    names = TransportKeys(config.key, config.dead_key)
    server = server_of(config.url, names)

    def make_transport() -> Transport:
        if config.kind == "redis_list":
            return RedisList(server, names, in_flight.consumer)
        return RedisStream(server, names, in_flight.consumer, silence=lease)

    return TransportStore(cast(TransportableStore, store), make_transport, in_flight, emit)
