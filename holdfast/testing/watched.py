"""When nothing can happen before time moves.

Time may only be moved while everything stands still, or jobs would seem to take as long as the jump. A store call under
way stands not still; event loops are let run until what a call or a wake-up has set off has come to rest.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

from holdfast.errors import Unavailable
from holdfast.store import Store

_TURNS = 40  # of an event loop: more than the longest way from a wake-up to the next wait


class Activity:
    """The store calls of one harness, from any thread, and the event loops they came from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._home = asyncio.get_running_loop()
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._none_left = asyncio.Event()
        self._under_way = 0
        self.count = 0
        """Grows with each store call, at its begin and at its end."""

    def began(self) -> None:
        """A call sets out."""
        with self._lock:
            self._under_way += 1
            self.count += 1

    def ended(self) -> None:
        """A call has come back."""
        with self._lock:
            self._under_way -= 1
            self.count += 1
        self._home.call_soon_threadsafe(self._none_left.set)

    def know(self) -> None:
        """The running loop, if one runs here, is one to look at."""
        try:
            self._loops.add(asyncio.get_running_loop())
        except RuntimeError:
            return

    async def rest(self) -> None:
        """Return once no store call is under way and no loop has anything to do."""
        while True:
            before = self.count
            await self._turn_all()
            while self._under_way:
                self._none_left.clear()
                if self._under_way:
                    await self._none_left.wait()
            if self.count == before:
                return

    async def _turn_all(self) -> None:
        await _turns()
        for loop in list(self._loops - {self._home}):
            if loop.is_closed() or not loop.is_running():
                self._loops.discard(loop)
                continue
            turning = asyncio.run_coroutine_threadsafe(_turns(), loop)
            await asyncio.wait([asyncio.wrap_future(turning)], timeout=1)
        await _turns()


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class Gate:
    """Where the store calls of one worker may be held up, or refused."""

    def __init__(self) -> None:
        self.frozen = False
        self.refused: Callable[[str], bool] = _none
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def pass_through(self, verb: str) -> None:
        """Return at once, or when the gate is opened again; Unavailable where the verb is refused."""
        if self.refused(verb):
            raise Unavailable(f"the test has cut this worker off: {verb}")
        while self.frozen:
            loop = asyncio.get_running_loop()
            opened = loop.create_future()
            self._held.append((loop, opened))
            await opened

    def open(self) -> None:
        """Let everybody go on."""
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


class WatchedStore:
    """A store whose calls are counted and can be held up."""

    def __init__(self, store: Store, activity: Activity, gate: Gate) -> None:
        self._store = store
        self._activity = activity
        self._gate = gate
        activity.know()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._store, name)
        if name == "wait" or not inspect.iscoroutinefunction(member):
            return member
        return functools.partial(self._watched, member, name)

    async def _watched(self, call: Callable[..., Awaitable[Any]], name: str, *args: Any, **kwargs: Any) -> Any:
        self._activity.know()
        if name not in ("open", "close"):
            await self._gate.pass_through(name)
        self._activity.began()
        try:
            return await call(*args, **kwargs)
        finally:
            self._activity.ended()


def watched(store: Store, activity: Activity, gate: Gate) -> Store:
    """``store``, counted and behind a gate."""
    return cast(Store, WatchedStore(store, activity, gate))
