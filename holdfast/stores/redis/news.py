"""Who waits for news, and how it reaches them.

In this process waiters are called directly. The scripts publish what they did, one message a call, to the others: on
one channel what workers wait for, on the other the endings of jobs, heard only where they are awaited. Beside that, a
process that waits for a queue blocks on its ready list with BLMOVE from the list's head to its head, which changes
nothing: so it hears of an id that somebody pushed by hand, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from redis import exceptions as driver

from holdfast.errors import HoldfastError
from holdfast.links.wire import Wire
from holdfast.store import EVERY_QUEUE
from holdfast.stores.redis.links import Links
from holdfast.stores.waiters import Waiter, Waiters

_LOOK = 1.0  # seconds between looks at an awaited job, whatever is heard
_PROOF = 15.0  # seconds between proofs that a listening connection lives
_PROVEN_IN = 5.0  # seconds it has for one
_RETRY, _RETRY_MOST = 0.1, 5.0  # seconds between tries to listen again
_WATCHED_MOST = 8  # ready lists a process blocks on; of other queues it hears by the channel alone
_PAUSE, _PAUSE_MOST = 0.05, 2.0  # seconds between looks at a list that nobody empties

_TROUBLE = (OSError, TimeoutError, EOFError, driver.RedisError, HoldfastError)

T = TypeVar("T")
Settled = Callable[[], Awaitable[bool]]


class News:
    """The waiters of one event loop and its ears."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._waiters = Waiters()
        self._ears: dict[str, asyncio.Task[None]] = {}
        self._hearing: dict[str, asyncio.Event] = {}
        self._watches: dict[str, _Watch] = {}

    def tell(self, topics: Iterable[str], ended: Iterable[str] = ()) -> None:
        """We have done what these topics stand for, and these jobs have ended."""
        self._waiters.tell({*topics, *(f"job:{job_id}" for job_id in ended)})

    async def close(self) -> None:
        """Hear no more."""
        left = {*self._ears.values(), *(watch.task for watch in self._watches.values())}
        while left:  # the driver may lose a cancellation that comes together with an answer
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_RETRY)
        self._ears.clear()
        self._watches.clear()

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], timeout: float, settled: Settled) -> None:
        """Return at news of a topic, when ``settled`` says so, or after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        news = loop.create_future()
        awaits_jobs = any(topic.startswith("job:") for topic in topics)
        waiter = Waiter(frozenset(topics), lambda: _resolve(news))
        watches = self._watching(topics)
        with self._waiters.listed(waiter):
            await self._listening(waiter, deadline)
            for watch in watches:
                watch.begin()
            try:
                while not news.done():
                    if awaits_jobs and await settled():
                        return
                    left = deadline - loop.time()
                    if left <= 0:
                        return
                    await asyncio.wait([news], timeout=min(left, _LOOK) if awaits_jobs else left)
            finally:
                for watch in watches:
                    watch.end()

    def _watching(self, topics: Sequence[str]) -> list[_Watch]:
        """Of the queues waited for, the first few: their watches."""
        queues = [topic.removeprefix("queue:") for topic in topics if topic.startswith("queue:")]
        found = []
        for queue in queues:
            name = "default" if queue == EVERY_QUEUE else queue
            if name not in self._watches and len(self._watches) < _WATCHED_MOST:
                self._watches[name] = _Watch(self._links, name, self._waiters)
            if name in self._watches:
                found.append(self._watches[name])
        return found

    async def _listening(self, waiter: Waiter, deadline: float) -> None:
        """Begin to hear what this waiter waits for; not for long, where there is nothing to hear with."""
        for kind in {"ended" if topic.startswith("job:") else "news" for topic in waiter.topics}:
            if kind not in self._ears:
                self._hearing[kind] = asyncio.Event()
                self._ears[kind] = asyncio.create_task(self._hear(kind), name=f"holdfast-listener-{kind}")
            if not self._hearing[kind].is_set():
                left = deadline - asyncio.get_running_loop().time()
                hearing = asyncio.ensure_future(self._hearing[kind].wait())
                await asyncio.wait([hearing], timeout=max(0.0, min(_LOOK, left)))
                hearing.cancel()

    async def _hear(self, kind: str) -> None:
        """Listen on a channel for ever: a connection that fails, or proves dead, is replaced."""
        pause = _RETRY
        while True:
            try:
                link = await self._links.connect(lambda message: self._heard(kind, message[2].decode()), protocol=2)
                try:
                    await _within(_PROVEN_IN, link.ask("SUBSCRIBE", self._links.address.prefix + kind))
                    self._hearing[kind].set()
                    self._waiters.tell(("queue:*", "worker:*", "job:*"))  # whatever came while nobody listened
                    pause = _RETRY
                    await self._listen(link)
                finally:
                    link.close()
            except _TROUBLE:
                # Not told: the polls go on, and the store's own calls say what is wrong with the server.
                self._hearing[kind].clear()
                self._links.forget()
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _RETRY_MOST)

    async def _listen(self, link: Wire) -> None:
        """Return never; fail when the connection does."""
        while True:
            with suppress(TimeoutError):
                await _within(_PROOF, link.ended.wait())
            await _within(_PROVEN_IN, link.ask("PING"))

    def _heard(self, kind: str, text: str) -> None:
        sender, *told = text.split("\n")
        if sender != self._links.name:
            self._waiters.tell(told if kind == "news" else [f"job:{job_id}" for job_id in told])


class _Watch:
    """Blocks on one queue's ready list while somebody waits for the queue."""

    def __init__(self, links: Links, queue: str, waiters: Waiters) -> None:
        self._links = links
        self._topic = f"queue:{queue}"
        ready = links.address.keys[2]
        self._list = ready if queue == "default" else f"{ready}:{queue}"
        self._waiters = waiters
        self._waiting = 0
        self._wanted = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"holdfast-watch-{queue}")

    def begin(self) -> None:
        """Somebody waits for the queue."""
        self._waiting += 1
        self._wanted.set()

    def end(self) -> None:
        """They wait no more."""
        self._waiting -= 1
        if not self._waiting:
            self._wanted.clear()

    async def _run(self) -> None:
        pause = _RETRY
        while True:
            await self._wanted.wait()
            try:
                link = await self._links.connect(protocol=2)
                try:
                    await self._block(link)
                finally:
                    link.close()
            except _TROUBLE:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _RETRY_MOST)

    async def _block(self, link: Wire) -> None:
        """Return never; fail when the connection does."""
        pause, known = _PAUSE, b""
        while True:
            await self._wanted.wait()
            head = await _within(_PROVEN_IN, link.ask("LINDEX", self._list, 0))
            if head is None:
                blocked = link.ask("BLMOVE", self._list, self._list, "LEFT", "LEFT", str(_PROOF))
                head = await _within(_PROOF + _PROVEN_IN, blocked)
                if head is None:
                    continue
            elif head == known or not known:
                # It was there before, and nobody takes it: the queue is paused, or its workers are busy.
                known = head
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MOST)
                continue
            pause, known = _PAUSE, head
            self._waiters.tell((self._topic,))


async def _within(seconds: float, awaited: Awaitable[T]) -> T:
    """TimeoutError where it takes longer."""
    async with asyncio.timeout(seconds):  # wait_for() of Python 3.11 can lose a cancellation
        return await awaited


def _resolve(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
