"""Broadcast of events: one reader of the store for all subscribers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.models import JobEvent, JobEvents
from holdfast.web.keys import Principal
from holdfast.web.messages import Refusal

_WITHIN = timedelta(hours=1)  # for how long who was away can go on where they were; no mark leads back further
_OPEN = timedelta(days=1)  # for how long a transaction may be open, and its endings still be sent to subscribers
_PIECE = 500  # endings of one look
_LOOK = 1.0  # seconds between looks where nothing is heard: what a lost wake-up, or a failed attempt, costs at most
_BREATH, _BUSY = 0.05, 0.5  # seconds at least between two looks; and where a look found more than _MANY
_MANY = 200
_AGAIN = 1.0  # seconds until a store that is away is asked again
_BEHIND_MOST = 40  # pieces a stream may be behind
_SENT_MOST = 2000  # events remembered as sent


class SeenEvents:
    """The events sent last: a repeated one is not sent again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, int, str], None] = OrderedDict()

    def filter_new(self, endings: Iterable[JobEvent]) -> list[JobEvent]:
        """Returns the events that were not seen yet."""
        found = []
        for each in endings:
            key = each.job_id, each.claims, each.state
            if key not in self._keys:
                self._keys[key] = None
                found.append(each)
        while len(self._keys) > _SENT_MOST:
            self._keys.popitem(last=False)
        return found


class Subscriber:
    """A stream's place at the feed."""

    def __init__(self) -> None:
        self._pieces: deque[JobEvents] = deque()
        self._notifications = asyncio.Event()
        self.late = False
        """It took so long that something was thrown away: it has to begin again where it was."""

    def put(self, piece: JobEvents) -> None:
        """There is more for it."""
        if len(self._pieces) >= _BEHIND_MOST:
            self.late = True
            self._pieces.clear()
        if not self.late:
            self._pieces.append(piece)
        self._notifications.set()

    async def next(self, seconds: float) -> JobEvents | None:
        """The next piece; None where there is none within so long, or it is late."""
        try:
            async with asyncio.timeout(seconds):
                await self._notifications.wait()
        except TimeoutError:
            return None
        piece = self._pieces.popleft() if self._pieces else None
        if not self._pieces:
            self._notifications.clear()
        return piece


class EventBroadcaster:
    """The followers in one event loop."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._followers: set[Subscriber] = set()
        self._beginning = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._sent = SeenEvents()
        self._mark = ""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.public_cursor = ""
        """Position up to which every subscriber has all events."""

    @asynccontextmanager
    async def subscribe_from(self) -> AsyncIterator[Subscriber]:
        """Subscribes while entered: events from now on reach the subscriber."""
        follower = Subscriber()
        self._followers.add(follower)
        try:
            async with self._beginning:
                if self._looking is None or self._looking.done():
                    await self._begin()
            yield follower
        finally:
            self._followers.discard(follower)

    async def read_missed(self, name: str, mark: str | None) -> JobEvents:
        """Returns the events after any client's mark. Each caller, by name, has one look at a time, and the store then
        rests for as long as that took: the streams of one key, that want nothing of an hour's endings, cannot keep
        the store from its work.
        """
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            begun = self._app.clock.monotonic()
            store = await self._app.open_store()
            piece = await store.query.events(mark, limit=_PIECE, within=_WITHIN)
            if piece.more:
                await asyncio.sleep(self._app.clock.monotonic() - begun)
        return piece

    async def _begin(self) -> None:
        """At a mark of our own: a follower's may be made up, and pass by what the others wait for."""
        store = await self._app.open_store()
        begin = await store.query.events(None, limit=_PIECE, within=_WITHIN)
        self._mark, self.public_cursor, self._sent = begin.mark, begin.public_cursor, SeenEvents()
        self._looking = asyncio.create_task(self._look_on(), name="holdfast-feed")

    async def _look_on(self) -> None:
        while self._followers:
            try:
                await self._look()
            except HoldfastError:  # the streams stay, and go on when it is back
                await asyncio.sleep(_AGAIN)

    async def _look(self) -> None:
        store = await self._app.open_store()
        piece = await store.query.events(self._mark, limit=_PIECE, within=_OPEN)
        self._mark, self.public_cursor = piece.mark, piece.public_cursor
        fresh = msgspec.structs.replace(piece, endings=self._sent.filter_new(piece.endings))
        if fresh.endings or fresh.gap:
            for follower in self._followers:
                follower.put(fresh)
        if not piece.more:
            await store.queueing.wait(["job:*"], timeout=_LOOK)
            await asyncio.sleep(_BUSY if len(piece.endings) > _MANY else _BREATH)


class EventBroadcasters:
    """Broadcasters, one for each event loop of requests, and the number of subscribers."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, EventBroadcaster] = WeakKeyDictionary()
        self._streams: Counter[str] = Counter()
        self._counting = threading.Lock()  # the event loops may be several threads'

    def for_running_loop(self) -> EventBroadcaster:
        """Returns the broadcaster of the running event loop."""
        loop = asyncio.get_running_loop()
        feed = self._feeds.get(loop)
        if feed is None:
            feed = self._feeds[loop] = EventBroadcaster(self._app)
        return feed

    def add_stream(self, caller: Principal) -> str:
        """Count one more stream of this caller; Refusal where there are too many. Its name is for ``leave``."""
        name = caller.key or caller.address
        with self._counting:
            there = {"event_streams": self._streams.total(), "event_streams_per_key": self._streams[name]}
            for limit, number in there.items():
                if number >= (most := getattr(self._app.settings, limit)):
                    header = (b"retry-after", b"10")
                    detail = f"there are {most} event streams already, as many as the setting {limit} allows"
                    raise Refusal(429, "too_many_streams", detail, "close one first", header)
            self._streams[name] += 1
        return name

    def remove_stream(self, name: str) -> None:
        """Count one less."""
        with self._counting:
            self._streams[name] -= 1
            if not self._streams[name]:
                del self._streams[name]
