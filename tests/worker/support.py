"""What tests of the worker say often."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import Holdfast, JobHandle
from holdfast.core.events import KINDS, Event
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.testing import Harness, TemporaryStore

PATIENCE = 0.02
"""Real seconds for handlers that wait for no clock: these tests have many that wait for ever, and few that work."""
START = datetime(2031, 1, 1, tzinfo=UTC)
"""When manual time begins in these tests: at a full minute, months from any change of the clocks."""


def harness(app: Holdfast, **settings: Any) -> Harness:
    """A harness on the application's own store, which the test has for itself."""
    kept = {"url": kept_store(app.settings.url), "transport": app.settings.transport}
    return Harness(app, **{**kept, "patience": PATIENCE, "start": START, **settings})


def kept_store(url: str) -> TemporaryStore:
    """A store that a harness uses and leaves as it is."""
    return TemporaryStore(url, lambda: None)


class Recorder:
    """Every event of an application, and when."""

    def __init__(self, app: Holdfast) -> None:
        self.events: list[Event] = []
        app.events.subscribe(self.events.append, *KINDS)

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    def names(self, job_id: str) -> list[str]:
        """What happened to one job, in order."""
        return [event.name for event in self.events if getattr(event, "job_id", None) == job_id]


def gaps(instants: Sequence[datetime]) -> list[float]:
    """Seconds between neighbours."""
    return [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(instants)]


async def lose(app: Holdfast, handle: JobHandle[Any], clock: Any) -> None:
    """Have a worker that dies at once take the job, and a sweep find it: without any worker of the harness."""
    store = await app.open_store()
    claim = await store.queueing.claim(
        ClaimRequest(
            "doomed", {"*": 1}, limit=1, lease_for=timedelta(seconds=1), max_must_start=1, ids=[handle.id], promote=True
        )
    )
    if not claim.jobs:
        claim = await store.queueing.claim(
            ClaimRequest("doomed", {"*": 1}, limit=1, lease_for=timedelta(seconds=1), max_must_start=1, isolated=True)
        )
    assert [job.id for job in claim.jobs] == [handle.id]
    clock.advance(2)
    (expired,) = await store.maintenance.find_expired_leases(limit=10)
    (answer,) = await store.queueing.settle([decide(expired, Lost(), Retry(), random.Random(0))])
    assert answer.accepted


async def forever() -> None:
    await asyncio.Event().wait()
