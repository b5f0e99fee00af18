"""Requests that wait, for jobs or for the end of one: so many at once. Each has a connection to itself, and whoever
asks and goes is to find one, too."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.settings.settings import Settings
from holdfast.web.client_address import address_network
from holdfast.web.principal import Principal
from holdfast.web.responses import Refusal

_RETRY_AFTER = b"5"  # seconds: places become free as jobs come and end


class WaitLimiter:
    """Limiter of waiting requests, one for each ``Api``."""

    def __init__(self, settings: Settings) -> None:
        self._most = max(1, settings.connections * 3 // 4)
        self._most_of_key = settings.waiting_per_key
        self._there: Counter[str] = Counter()
        self._counting = threading.Lock()  # the event loops may be several threads'

    @contextmanager
    def limit_wait(self, caller: Principal) -> Iterator[None]:
        """Around the wait of one request; Refusal where too many wait."""
        name = caller.key or address_network(caller.address)
        with self._counting:
            self._enter(name)
        try:
            yield
        finally:
            with self._counting:
                self._there[name] -= 1
                if not self._there[name]:
                    del self._there[name]

    def _enter(self, name: str) -> None:
        if self._there[name] >= self._most_of_key:
            raise _refusal(
                f"{self._most_of_key:,} of your requests wait, as many as the setting waiting_per_key allows"
            )
        if self._there.total() >= self._most:
            raise _refusal(f"{self._most:,} requests wait, as many as three quarters of the connections")
        self._there[name] += 1


def _refusal(detail: str) -> Refusal:
    retry = (b"retry-after", _RETRY_AFTER)
    return Refusal(429, "too_many_waiting", detail, "let some of them end first, or ask without wait", retry)
