"""Detects when nothing can happen before time moves.

Time may move only while everything is idle, or jobs would seem to take as long as the jump. Idle means that no store
call is under way, and that event loops have run all callbacks. Notifications through a server would arrive too late:
the stores of a harness notify each other directly.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.models import Claim
from holdfast.stores.base import Queueing, Store
from holdfast.stores.forwarding import ForwardingQueueing, ForwardingStore, Interceptor
from holdfast.stores.sqlite.store import SQLiteStore

T = TypeVar("T")

WaitLimit = Callable[[], float | None]
"""Callback: the real seconds for which a wait may last now; None: without a limit, since the test moves time."""

_LOOP_ITERATIONS = 40  # at most, of an event loop: more than the longest chain from a wake-up to the next wait
_IDLE_ITERATIONS = 3  # in a row without a callback: sockets are polled between them
_NOTIFIES: Mapping[str, frozenset[str]] = {
    "submit": frozenset({"queue"}),
    "claim": frozenset({"queue"}),  # it may have made more jobs ready than it took
    "promote_due": frozenset({"queue"}),
    "expire_unstarted": frozenset({"queue"}),
    "edit": frozenset({"queue"}),
    "delete": frozenset({"queue"}),
    "send_signal": frozenset({"queue"}),
    "write_limit": frozenset({"queue"}),
    "reannounce": frozenset({"queue"}),
    "replay": frozenset({"queue"}),
    "resume": frozenset({"queue"}),
    "write_schedule": frozenset({"queue"}),
    "settle": frozenset({"queue", "job"}),
    "cancel": frozenset({"queue", "worker", "job"}),
    "send_command": frozenset({"worker"}),
}
"""Kinds of topics that each verb of a store notifies, of all that can make jobs ready or stop them."""
_CALL_END = frozenset({"call end"})
_MAY_CHANGE_NOTHING = frozenset({"reannounce", "expire_unstarted"})
"""Verbs of every sweep; an empty answer says that they changed nothing."""


class Activity:
    """The store calls of one harness, from any thread, and the event loops they came from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.home: asyncio.AbstractEventLoop | None = None  # of the test, once it runs
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._under_way = 0
        self.notifications = ObservedNotifications()
        self.movers = 0
        """Number of calls that move time or start workers."""
        self.count = 0
        """Grows at the start and at the end of each store call."""

    def call_started(self) -> None:
        """Counts the start of a call."""
        with self._lock:
            self._under_way += 1
            self.count += 1

    def call_ended(self) -> None:
        """Counts the end of a call."""
        with self._lock:
            self._under_way -= 1
            self.count += 1
        self.notifications.notify_kinds(_CALL_END)

    def add_loop(self) -> None:
        """Registers the running event loop, if any."""
        try:
            self._loops.add(asyncio.get_running_loop())
        except RuntimeError:
            return

    @contextmanager
    def moving_time(self) -> Iterator[None]:
        """Marks that the test moves time."""
        self.movers += 1
        try:
            yield
        finally:
            self.movers -= 1

    async def wait_idle(self) -> None:
        """Returns once no store call is under way and no loop has callbacks to run."""
        while True:
            before = self.count
            await self._drain_loops()
            ended = self.notifications.notified_count(_CALL_END)
            while self._under_way:
                await self.notifications.wait_notified(ended, _CALL_END)
                ended = self.notifications.notified_count(_CALL_END)
            if self.count == before:
                return

    async def _drain_loops(self) -> None:
        await _drain_running_loop()
        for loop in list(self._loops - {self.home}):
            if loop.is_closed() or not loop.is_running():
                self._loops.discard(loop)
                continue
            drained: Future[None] = Future()
            with suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(_drain_callbacks, loop, drained)
                waiter, polls = asyncio.wrap_future(drained), 100
                while polls and loop.is_running() and not waiter.done():  # it may end before its turn
                    await asyncio.wait([waiter], timeout=0.01)
                    polls -= 1
        await _drain_running_loop()


async def _drain_running_loop() -> None:
    """Returns once the running loop has no callbacks left."""
    loop = asyncio.get_running_loop()
    drained = loop.create_future()
    _drain_callbacks(loop, drained)
    await drained


def _drain_callbacks(
    loop: asyncio.AbstractEventLoop, drained: Future[None] | asyncio.Future[None], iterations: int = 0, idle: int = 0
) -> None:
    """Sets ``drained`` once the loop has no callbacks left; loops other than asyncio's do not say when. It goes on by
    callbacks: a loop that ends meanwhile would leave a coroutine that was never awaited."""
    idle = idle + 1 if iterations and getattr(loop, "_ready", [loop]) == deque() else 0
    if drained.done():  # its waiter was cancelled
        return
    if idle == _IDLE_ITERATIONS or iterations == _LOOP_ITERATIONS:
        drained.set_result(None)
    else:
        loop.call_soon(_drain_callbacks, loop, drained, iterations + 1, idle)


class CallBarrier:
    """Barrier that holds up or refuses the store calls of one worker."""

    def __init__(self) -> None:
        self.frozen = False
        self.refused: Callable[[str], bool] = _none
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def pass_through(self, verb: str) -> None:
        """Returns when the barrier is open; Unavailable if the verb is refused."""
        if self.refused(verb):
            raise Unavailable(f"the test has cut this worker off: {verb}")
        while self.frozen:
            loop = asyncio.get_running_loop()
            opened = loop.create_future()
            self._held.append((loop, opened))
            await opened

    def open(self) -> None:
        """Releases all held calls."""
        self.frozen, self.refused = False, _none
        held, self._held = self._held, []
        for loop, opened in held:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, opened)


def _none(_: str) -> bool:
    return False


def _resolve(opened: asyncio.Future[None]) -> None:
    if not opened.done():
        opened.set_result(None)


class ObservedNotifications:
    """Notifications between the stores of a harness, across threads and event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notified: Counter[str] = Counter()
        self._pending: list[tuple[frozenset[str], asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def notify_kinds(self, kinds: frozenset[str]) -> None:
        """Notifies waiters about topics of these kinds."""
        with self._lock:
            self._notified.update(kinds)
            matching = [each for each in self._pending if kinds & each[0]]
            self._pending = [each for each in self._pending if not kinds & each[0] and not each[2].done()]
        for _, loop, notifications in matching:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, notifications)

    def notified_count(self, kinds: frozenset[str]) -> int:
        """Returns the number of notifications about topics of these kinds."""
        with self._lock:
            return sum(self._notified[kind] for kind in kinds)

    async def wait_notified(self, count: int, kinds: frozenset[str]) -> None:
        """Returns after the next notification beyond ``count``."""
        loop = asyncio.get_running_loop()
        notifications = loop.create_future()
        with self._lock:
            if sum(self._notified[kind] for kind in kinds) != count:
                return
            self._pending.append((kinds, loop, notifications))
        await notifications


class WatchedStore(ForwardingStore):
    """A store whose calls are counted, and can be held up."""

    def __init__(self, store: Store, activity: Activity, barrier: CallBarrier, wait_limit: WaitLimit | None) -> None:
        super().__init__(store, self._watch)
        self._wait_limit = wait_limit
        self._activity = activity
        self._barrier = barrier
        self._heard: dict[frozenset[str], int] = {}
        activity.add_loop()

    @property
    def queueing(self) -> Queueing:
        """Queueing whose ``wait`` also ends by notifications of this harness."""
        return WatchedQueueing(self._inner.queueing, self._watch, self._wait_for_notification)

    async def _watch(self, verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._activity.add_loop()
        if verb not in ("open", "close"):
            await self._barrier.pass_through(verb)
        self._activity.call_started()
        try:
            answer = await call()
            changed = not isinstance(answer, Claim) or bool(answer.jobs)
            if verb in _NOTIFIES and changed and not (verb in _MAY_CHANGE_NOTHING and not answer):
                self._activity.notifications.notify_kinds(_NOTIFIES[verb])
            return answer
        finally:
            self._activity.call_ended()

    async def _wait_for_notification(self, topics: Sequence[str], timeout: float) -> None:
        wait = self._inner.queueing.wait if isinstance(self._inner, SQLiteStore) else self._wait
        if self._wait_limit is None:
            await wait(topics, timeout=timeout)
        else:
            await self._wait_in_test(wait, topics, timeout)

    async def _wait_in_test(
        self, wait: Callable[..., Coroutine[Any, Any, None]], topics: Sequence[str], timeout: float
    ) -> None:
        """Waits on behalf of the test; HoldfastError if only moving time would end the wait."""
        limit = self._limit_seconds()
        if limit is None:
            await wait(topics, timeout=timeout)
            return
        loop, count = asyncio.get_running_loop(), self._activity.count
        give_up = loop.time() + limit
        await wait(topics, timeout=limit)
        await self._activity.wait_idle()
        if self._limit_seconds() is not None and self._activity.count == count and loop.time() >= give_up:
            raise HoldfastError(
                "time stands still in a harness, so nothing ends this wait: await harness.run_until_idle() or "
                "harness.advance(...) first"
            )

    def _limit_seconds(self) -> float | None:
        return None if self._wait_limit is None else self._wait_limit()

    async def _wait(self, topics: Sequence[str], *, timeout: float) -> None:
        """Waits for a notification of this store or of another store of the harness, maybe about another topic."""
        kinds = frozenset(topic.partition(":")[0] for topic in topics)
        notifications = self._activity.notifications
        brought = asyncio.ensure_future(notifications.wait_notified(self._heard.get(kinds, 0), kinds))
        own = asyncio.ensure_future(self._inner.queueing.wait(topics, timeout=timeout))
        try:
            done, _ = await asyncio.wait((brought, own), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            self._heard[kinds] = notifications.notified_count(kinds)
            brought.cancel()
            own.cancel()


class WatchedQueueing(ForwardingQueueing):
    """Queueing whose ``wait`` is the harness's."""

    def __init__(
        self,
        inner: Queueing,
        intercept: Interceptor,
        wait_for_notification: Callable[[Sequence[str], float], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(inner, intercept)
        self._wait_for_notification = wait_for_notification

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        """Waits for a notification of this harness."""
        await self._wait_for_notification(topics, timeout)
