"""A store whose calls are timed, if there is a subscriber when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import Events
from holdfast.core.metric_events import StoreAnswered
from holdfast.stores.base import Store
from holdfast.stores.forwarding import ForwardingStore, Interceptor

T = TypeVar("T")

_UNTIMED = frozenset({"open", "close", "migrate", "backup", "wait", "doctor", "repair"})
"""What is no question, or takes as long as it is to take."""


def time_calls(store: Store, events: Events) -> Store:
    """``store``, each of whose calls tells how long it took; itself where nobody wants to know."""
    return ForwardingStore(store, _timer(events)) if events.has_subscriber(StoreAnswered) else store


def _timer(events: Events) -> Interceptor:
    async def timed(verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
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

    return timed
