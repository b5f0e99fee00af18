"""Lag of an event loop, measured where no heartbeat thread asks it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.core.events import Events
from holdfast.core.metric_events import LoopHeard

_LOOK = 1.0  # seconds between looks


@asynccontextmanager
async def watched_loop(events: Events) -> AsyncIterator[None]:
    """While entered, tell once a second how late the running loop wakes who has slept."""
    watching = asyncio.create_task(_watch(events), name="holdfast-lag")
    try:
        yield
    finally:
        watching.cancel()


async def _watch(events: Events) -> None:
    while True:
        due = time.monotonic() + _LOOK
        await asyncio.sleep(_LOOK)
        if events.has_subscriber(LoopHeard):
            events.emit(LoopHeard(seconds=max(0.0, time.monotonic() - due)))
