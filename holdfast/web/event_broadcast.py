"""Broadcast of events: one task reads the store for all subscribers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import Context
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.models import JobEvent, JobEvents
from holdfast.web.keys import Principal
from holdfast.web.messages import Refusal

_REPLAY_WINDOW = timedelta(hours=1)  # how far back a disconnected client can resume
_TX_WINDOW = timedelta(days=1)  # how long a transaction may be open for its events to be sent
_PAGE_SIZE = 500  # events of one read
_POLL_INTERVAL = 1.0  # seconds between reads without notifications: the most that a lost one delays
_MIN_PAUSE, _BUSY_PAUSE = 0.05, 0.5  # seconds between two reads; after more than _BUSY_SIZE events
_BUSY_SIZE = 200
_RETRY_PAUSE = 1.0  # seconds until the next read of a store that is away
_MAX_QUEUED = 40  # pages a stream may be behind
_MAX_REMEMBERED = 2000  # events remembered as sent


class SeenEvents:
    """The last events sent, to drop repeated ones."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, int, str], None] = OrderedDict()

    def filter_new(self, events: Iterable[JobEvent]) -> list[JobEvent]:
        """Returns the events that were not seen yet."""
        found = []
        for each in events:
            key = each.job_id, each.claims, each.state
            if key not in self._keys:
                self._keys[key] = None
                found.append(each)
        while len(self._keys) > _MAX_REMEMBERED:
            self._keys.popitem(last=False)
        return found


class Subscriber:
    """The queue of one stream."""

    def __init__(self) -> None:
        self._pages: deque[JobEvents] = deque()
        self._notifications = asyncio.Event()
        self.is_late = False
        """True if the stream is too slow and pages were dropped: it must resume from its position."""

    def put(self, page: JobEvents) -> None:
        """Adds a page."""
        if len(self._pages) >= _MAX_QUEUED:
            self.is_late = True
            self._pages.clear()
        if not self.is_late:
            self._pages.append(page)
        self._notifications.set()

    async def next(self, seconds: float) -> JobEvents | None:
        """Returns the next page; None if there is none max_age ``seconds``, or the stream is late."""
        try:
            async with asyncio.timeout(seconds):
                await self._notifications.wait()
        except TimeoutError:
            return None
        page = self._pages.popleft() if self._pages else None
        if not self._pages:
            self._notifications.clear()
        return page


class EventBroadcaster:
    """The subscribers in one event loop."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._subscribers: set[Subscriber] = set()
        self._start_lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._sent = SeenEvents()
        self._cursor = ""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.public_cursor = ""
        """Position up to which every subscriber has all events."""

    @asynccontextmanager
    async def subscribe_from(self) -> AsyncIterator[Subscriber]:
        """Subscribes while entered: events from now on reach the subscriber."""
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        try:
            async with self._start_lock:
                if self._reading is None or self._reading.done():
                    await self._start_reading()
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    async def read_missed(self, name: str, cursor: str | None) -> JobEvents:
        """Returns the events after a client's cursor. Each caller, by name, has one read at a time. If there is more, a
        pause as long as the read follows: a key whose streams match few events cannot overload the store."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            begun = self._app.clock.monotonic()
            store = await self._app.open_store()
            page = await store.query.events(cursor, limit=_PAGE_SIZE, max_age=_REPLAY_WINDOW)
            if page.more:
                await asyncio.sleep(self._app.clock.monotonic() - begun)
        return page

    async def _start_reading(self) -> None:
        """Starts at a cursor of the store: a client's cursor may be forged, and skip events of other subscribers."""
        store = await self._app.open_store()
        begin = await store.query.events(None, limit=_PAGE_SIZE, max_age=_REPLAY_WINDOW)
        self._cursor, self.public_cursor, self._sent = begin.cursor, begin.public_cursor, SeenEvents()
        self._reading = asyncio.create_task(self._read_while_subscribed(), name="holdfast-feed", context=Context())

    async def _read_while_subscribed(self) -> None:
        while self._subscribers:
            try:
                await self._read_page()
            except HoldfastError:  # streams stay open, and go on when the store is back
                await asyncio.sleep(_RETRY_PAUSE)

    async def _read_page(self) -> None:
        store = await self._app.open_store()
        page = await store.query.events(self._cursor, limit=_PAGE_SIZE, max_age=_TX_WINDOW)
        self._cursor, self.public_cursor = page.cursor, page.public_cursor
        fresh = msgspec.structs.replace(page, events=self._sent.filter_new(page.events))
        if fresh.events or fresh.gap:
            for subscriber in self._subscribers:
                subscriber.put(fresh)
        if not page.more:
            await store.queueing.wait(["job:*"], timeout=_POLL_INTERVAL)
            await asyncio.sleep(_BUSY_PAUSE if len(page.events) > _BUSY_SIZE else _MIN_PAUSE)


class EventBroadcasters:
    """Broadcasters, one for each event loop of requests, and the number of subscribers."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._broadcasters: WeakKeyDictionary[asyncio.AbstractEventLoop, EventBroadcaster] = WeakKeyDictionary()
        self._streams: Counter[str] = Counter()
        self._counting = threading.Lock()  # event loops may run in several threads

    def for_running_loop(self) -> EventBroadcaster:
        """Returns the broadcaster of the running event loop."""
        loop = asyncio.get_running_loop()
        broadcaster = self._broadcasters.get(loop)
        if broadcaster is None:
            broadcaster = self._broadcasters[loop] = EventBroadcaster(self._app)
        return broadcaster

    def add_stream(self, caller: Principal) -> str:
        """Counts a caller's stream; raises Refusal if there are too many. Returns the name for ``remove_stream``."""
        name = caller.key or caller.address
        with self._counting:
            counts = {"event_streams": self._streams.total(), "event_streams_per_key": self._streams[name]}
            for limit, number in counts.items():
                if number >= (allowed := getattr(self._app.settings, limit)):
                    header = (b"retry-after", b"10")
                    detail = f"there are {allowed} event streams already, as many as the setting {limit} allows"
                    raise Refusal(429, "too_many_streams", detail, "close one first", header)
            self._streams[name] += 1
        return name

    def remove_stream(self, name: str) -> None:
        """Stops counting a stream."""
        with self._counting:
            self._streams[name] -= 1
            if not self._streams[name]:
                del self._streams[name]
