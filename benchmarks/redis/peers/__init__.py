"""The peers, a module each, set up as their documentation says for speed, where it loses nothing at a kill.

Each module has a class that derives from ``Peer``. A module is imported where its peer is used, and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, ClassVar

from redis import Redis as Client

STARTS: list[tuple[int, float, float]] = []
"""Of each ``stamp`` job in this process: its number, and the monotonic and the wall clock when its handler started."""
Submit = Callable[[str, int], Awaitable[object]]
"""Store a job of this task, ``noop`` or ``stamp``, and this number."""

_FILLERS = 20  # callers that submit at once where a queue is filled


class Peer(ABC):
    """One queue on the server of a URL."""

    jobs: ClassVar[int]
    """How many it runs in some seconds."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def submitting(self) -> Any:
        """A context with a ``Submit``."""

    @abstractmethod
    async def work(self) -> None:
        """Run jobs until cancelled."""

    @abstractmethod
    def left(self, client: Client) -> int:
        """How many jobs are stored and not acknowledged."""

    async def fill(self, jobs: int) -> None:
        """So many ``noop`` jobs."""
        numbers = iter(range(jobs))
        async with self.submitting() as submit:

            async def some() -> None:
                for number in numbers:
                    await submit("noop", number)

            await asyncio.gather(*[some() for _ in range(_FILLERS)])


_PEERS = {
    "dramatiq": "dramatiq:Dramatiq",
    "taskiq-stream": "taskiq:Stream",
    "taskiq-list": "taskiq:List",
    "saq": "saq:Saq",
    "arq": "arq:Arq",
    "celery": "celery:Celery",
}
KNOWN = tuple(name for name in _PEERS if name != "arq" or find_spec("arq"))
"""The installed peers. arq may be missing: it needs a redis-py that no other peer works with."""
LOSING = ("taskiq-list",)
"""Those that lose what runs when their process is killed."""


def peer(name: str, url: str) -> Peer:
    """The peer of this name, imported now."""
    module, _, kind = _PEERS[name].partition(":")
    made: Peer = getattr(importlib.import_module(f"benchmarks.redis.peers.{module}"), kind)(url)
    return made


def noop(n: int) -> None:
    """Nothing at all."""


def stamp(n: int) -> None:
    """Tell when job ``n`` started."""
    STARTS.append((n, time.monotonic(), time.time()))


async def async_noop(n: int) -> None:
    """Nothing at all, for those that run coroutines."""


async def async_stamp(n: int) -> None:
    """Tell when job ``n`` started, for those that run coroutines."""
    stamp(n)


@asynccontextmanager
async def ready(submit: Submit) -> AsyncIterator[Submit]:
    """One that needs no opening and no closing."""
    yield submit
