"""The measured application: tasks that do nothing or tell when they started, on a store whose calls are timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

from holdfast import Holdfast
from holdfast.stores.base import Store
from holdfast.stores.forwarding import ForwardingStore

T = TypeVar("T")

STARTS: list[tuple[int, float, float]] = []
"""Of each ``stamp`` job in this process: its number, and the monotonic and the wall clock when its handler started."""


_accepted = attrgetter("accepted")


class Meter:
    """What one process asked of its store, and when its last settlement was safe."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.claims: list[float] = []  # seconds of each claim that took jobs
        self.settled = 0
        self.settled_at = 0.0  # on the monotonic clock, which all processes share
        self.cpu_then = 0.0  # CPU seconds of this process at that moment

    def note(self, verb: str, started: float, answer: Any) -> None:
        """A call has been answered."""
        if verb == "claim" and answer.jobs:
            self.claims.append(time.monotonic() - started)
        elif verb == "settle":
            self.settled += sum(map(_accepted, answer))
            self.settled_at = time.monotonic()
            self.cpu_then = time.process_time()


def metered(store: Store, meter: Meter) -> Store:
    """A store whose calls are counted. Costs a microsecond a call, nothing a job."""

    async def count(verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if verb in ("open", "close"):
            return await call()
        meter.calls[verb] += 1
        started = time.monotonic()
        answer = await call()
        meter.note(verb, started, answer)
        return answer

    return ForwardingStore(store, count)


class Application(Holdfast):
    """A Holdfast with these tasks on a SQLite file or the store of a URL.

    With a ``meter`` it counts what is asked of every store it opens.
    """

    def __init__(self, store: Path | str, *, meter: Meter | None = None, **settings: Any) -> None:
        super().__init__(store if isinstance(store, str) else f"sqlite:///{store}", **settings)
        self.meter = meter
        self.noop = self.task("noop")(noop)
        self.stamp = self.task("stamp")(stamp)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    def new_store(self, patience: float | None = None) -> Any:
        """Another store at the same place."""
        store = super().new_store(patience)
        return store if self.meter is None else metered(store, self.meter)


async def noop(n: int) -> None:
    """Nothing at all."""


async def stamp(n: int) -> None:
    """Tell when job ``n`` started."""
    STARTS.append((n, time.monotonic(), time.time()))


async def fill(store: Path | str, jobs: int, **options: Any) -> None:
    """A new store with this many ``noop`` jobs waiting. ``options``: of each job."""
    async with Application(store) as app:
        task = app.noop.options(**options)
        await app.enqueue_many(task.new_job(n=index) for index in range(jobs))


def milliseconds(seconds: Iterable[float]) -> list[float]:
    """The same times in milliseconds."""
    return [each * 1000 for each in seconds]
