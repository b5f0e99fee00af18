"""Timing of store calls, if there is a subscriber when the store is made, and of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import Events
from holdfast.core.metric_events import LoopHeard, StoreAnswered
from holdfast.stores.base import Store
from holdfast.stores.forwarding import ForwardingStore, Interceptor

T = TypeVar("T")

_UNTIMED = frozenset({"open", "close", "migrate", "backup", "wait", "doctor", "repair"})
"""What is no question, or takes as long as it is to take."""


def time_calls(store: Store, events: Events) -> Store:
    """``store``, each of whose calls tells how long it took; itself where there is no subscriber."""
    return ForwardingStore(store, _timer(events)) if events.has_subscriber(StoreAnswered) else store


def _timer(events: Events) -> Interceptor:
    async def time_call(verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if verb in _UNTIMED:
            return await call()
        started, failed = time.perf_counter(), True
        try:
            answer = await call()
            failed = False
            return answer
        except HoldfastError as error:
            failed = isinstance(error, Unavailable)
            raise
        finally:
            events.emit(StoreAnswered(verb=verb, seconds=time.perf_counter() - started, failed=failed))

    return time_call


_LOOK = 1.0  # seconds between looks


@asynccontextmanager
async def watched_loop(events: Events) -> AsyncIterator[None]:
    """While entered, report once a second how late the running loop wakes a sleeper."""
    watching = asyncio.create_task(_watch(events), name="holdfast-lag")
    try:
        yield
    finally:
        watching.cancel()


async def _watch(events: Events) -> None:
    while True:
        due = time.monotonic() + _LOOK
        await asyncio.sleep(_LOOK)
        if events.has_subscriber(LoopHeard):
            events.emit(LoopHeard(seconds=max(0.0, time.monotonic() - due)))
