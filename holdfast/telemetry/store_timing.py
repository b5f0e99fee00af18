"""A store whose calls are timed, if there is a subscriber when it is made."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import Events
from holdfast.core.metric_events import StoreAnswered
from holdfast.stores.base import ForwardingMaintenance, ForwardingQuery, Maintenance, Query, Store

T = TypeVar("T")

_UNTIMED = frozenset({"open", "close", "missing", "migrate", "backup", "wait", "doctor", "repair"})
"""What is no question, or takes as long as it is to take."""


def time_calls(store: Store, events: Events) -> Store:
    """``store``, each of whose calls tells how long it took; itself where nobody wants to know."""
    return cast(Store, TimedStore(store, events)) if events.has_subscriber(StoreAnswered) else store


class TimedStore:
    """Passes everything on. A verb is wrapped when it is first asked for, and kept."""

    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._events = events

    @property
    def maintenance(self) -> Maintenance:
        """Maintenance, timed."""
        return ForwardingMaintenance(self._store.maintenance, self._timed)

    @property
    def query(self) -> Query:
        """Reads, timed."""
        return ForwardingQuery(self._store.query, self._timed)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._store, name)
        if name in _UNTIMED or not inspect.iscoroutinefunction(member):
            return member

        def verb(*arguments: Any, **named: Any) -> Any:
            return self._timed(name, lambda: member(*arguments, **named))

        self.__dict__[name] = verb
        return verb

    async def _timed(self, verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        started, failed = time.perf_counter(), True
        try:
            answer = await call()
            failed = False
            return answer
        except HoldfastError as error:
            failed = isinstance(error, Unavailable)
            raise
        finally:
            self._events.emit(StoreAnswered(verb=verb, seconds=time.perf_counter() - started, failed=failed))
