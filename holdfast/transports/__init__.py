"""Transports: Redis tells workers of ready jobs, while PostgreSQL holds the jobs.

carried.py      a store whose ready jobs' ids a transport carries: it announces them, and claims what arrives
claiming.py     one claim of what arrived
carrier.py      what one event loop has in hand of its transport, and whether the transport is there
reminding.py    the sweep: what the transport has lost is announced again
base.py         what both transports have in common
names.py        what its keys are called
redis_list.py   a list of ids for each queue
redis_stream.py a stream of ids for each queue, read by a consumer group
scripts/        Lua: what each kind of transport does (kinds.lua), and the steps made of it (deliveries.lua)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, cast

from holdfast.core.errors import ConfigError
from holdfast.core.events import Event
from holdfast.stores.base import Store, TransportableStore
from holdfast.transports.contract import Transport
from holdfast.transports.keys import TransportKeys
from holdfast.transports.session import DeliveryLedger
from holdfast.transports.transport_store import TransportStore

__all__ = ["DeliveryLedger", "TransportConfig", "with_transport"]


class TransportConfig(NamedTuple):
    """Which transport, where it is, and what its keys are called."""

    kind: str
    """``redis_list`` or ``redis_stream``."""
    url: str
    key: str
    dead_key: str


def with_transport(
    store: Store, way: TransportConfig, *, lease: timedelta, in_hand: DeliveryLedger, emit: Callable[[Event], None]
) -> Store:
    """``store``, whose ready jobs' ids that transport carries. It must be an TransportableStore.

    ``lease``: for how long who has a delivery may be silent. ``in_hand`` is shared by the stores of an application.
    ``emit`` receives an event when the transport leaves and when it is back.
    """
    try:
        from holdfast.transports.base import server_of
        from holdfast.transports.redis_list import RedisList
        from holdfast.transports.redis_stream import RedisStream
    except ModuleNotFoundError as error:
        raise ConfigError(f"transport: Redis needs {error.name}; pip install 'holdfast[redis]'") from None
    names = TransportKeys(way.key, way.dead_key)
    server = server_of(way.url, names)

    def make_transport() -> Transport:
        if way.kind == "redis_list":
            return RedisList(server, names, in_hand.consumer)
        return RedisStream(server, names, in_hand.consumer, silence=lease)

    return TransportStore(cast(TransportableStore, store), make_transport, in_hand, emit)
