"""Shared advisory locks of the processes that want notifications. Where no process holds one, none is sent.

A notification costs its transaction a lock that all notifying transactions share, and wakes every process that
listens. Processes that claim jobs all the time need none. So a process that listens for ends of jobs holds the lock of
that channel, and a process that listens for ready jobs holds its lock while it waits for some. Senders test the lock,
and hold it no longer than that takes.

A process takes the lock before the claim that precedes its wait, so what is committed later notifies. That leaves one
lost wake-up, of a submission that tests the lock inside its transaction:

    submission                        waiting process
    tests the lock: it is free
                                      takes the lock, claims: nothing is there yet
    commits, sends no notification
                                      claims again, up to ``RECHECK_SECONDS`` after it took the lock: finds the job

A submission that takes longer than that notifies after its commit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.pool import Connection

CLAIM_INTERVAL = 0.001  # seconds between claims of a process without the lock: it is busy, or is taking it
_RECHECKS = (0.0, 0.004, 0.02, 0.084)  # seconds after it took the lock, at which a process claims again
RECHECK_SECONDS = _RECHECKS[-1]
"""For so long after it took the lock a process claims again: it finds jobs whose submission did not notify."""
_DECAY_SECONDS = 0.05  # in which the count of recent claims that found jobs falls to a third
_POLL_FROM, _LISTEN_BELOW = 10, 5  # recent claims that found jobs: with so many a process polls, with fewer it listens
_RELEASE_AFTER = 0.1  # seconds without a wait, after which the lock is released
_UNCONNECTED_INTERVAL = 0.05  # seconds between claims of a process whose connection to listen on is not made yet
_TIMEOUT = 5.0  # seconds to take or release it


class ListenerLock:
    """The lock of one channel, held by the connection that listens to it."""

    def __init__(self, statements: Mapping[str, NumberedStatement], kind: str) -> None:
        self._acquire = statements[f"acquire_{kind}_lock"]
        self._release = statements[f"release_{kind}_lock"]
        self._connection: Connection | None = None
        self.is_held = False
        """Notifications of the channel reach this process."""
        self._is_wanted = kind == "ended"  # the lock of ready jobs only once a wait wants it
        self.changed = asyncio.Event()
        """Set when ``adjust_lock`` is to be called."""
        self._rechecks: list[float] = []
        self._recent_finds, self._counted_at = 0.0, 0.0  # claims that found jobs, lately
        self._was_polling = False
        self._open_waits = 0
        self._waited_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ── the connection ──────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def attach_to(self, connection: Connection) -> Iterator[None]:
        """The connection holds the lock while entered, from the next ``adjust_lock`` on."""
        self._connection = connection
        try:
            yield
        finally:
            self._connection, self.is_held = None, False

    async def adjust_lock(self) -> None:
        """Takes or releases the lock, as it is wanted."""
        self.changed.clear()
        if self._connection is None or self._is_wanted == self.is_held:
            return
        if self._is_wanted:
            await self._connection.execute(self._acquire.sql, timeout=_TIMEOUT)
            self._rechecks = [time.monotonic() + seconds for seconds in _RECHECKS]
            self.is_held = True
        else:
            self.is_held = False  # at once: a wait that begins now is to claim again once the lock is retaken
            await self._connection.execute(self._release.sql, timeout=_TIMEOUT)

    def _want(self, *, wanted: bool) -> None:
        if wanted != self._is_wanted:
            self._is_wanted = wanted
            self.changed.set()

    # ── waiting for ready jobs ──────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def register_wait(self) -> Iterator[float]:
        """Yields the seconds after which a process without the lock has to claim again; a notification may not come."""
        self._open_waits += 1
        try:
            yield self._longest_wait()
        finally:
            self._open_waits -= 1
            self._waited_at = time.monotonic()
            if not self._open_waits and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_RELEASE_AFTER, self._release_unused)

    def _longest_wait(self) -> float:
        if self.is_polling:
            return CLAIM_INTERVAL
        self._want(wanted=True)
        if not self.is_held:
            return _UNCONNECTED_INTERVAL if self._connection is None else CLAIM_INTERVAL
        while self._rechecks and self._rechecks[0] <= self._waited_at:  # claimed since
            self._rechecks.pop(0)
        return max(0.0, self._rechecks[0] - time.monotonic()) if self._rechecks else math.inf

    def count_claim(self, *, found: bool) -> None:
        """Notes that a claim of this process found jobs, or did not."""
        self._recent_finds, self._counted_at = self._decayed_finds() + found, time.monotonic()
        if self.is_polling:
            self._want(wanted=False)

    def _decayed_finds(self) -> float:
        return self._recent_finds * math.exp((self._counted_at - time.monotonic()) / _DECAY_SECONDS)

    @property
    def is_polling(self) -> bool:
        """Returns True while this process finds jobs so often that it polls for them."""
        self._was_polling = self._decayed_finds() >= (_LISTEN_BELOW if self._was_polling else _POLL_FROM)
        return self._was_polling

    def _release_unused(self) -> None:
        self._timer = None
        if self._open_waits:
            return
        unused = time.monotonic() - self._waited_at
        if unused >= _RELEASE_AFTER:
            self._want(wanted=False)
        else:
            self._timer = asyncio.get_running_loop().call_later(_RELEASE_AFTER - unused, self._release_unused)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
