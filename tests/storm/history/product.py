"""The product's own worker as an actor: its calls are recorded on their way to the store."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from datetime import timedelta

from holdfast import Holdfast, Retry, Snooze
from holdfast.core.errors import Unavailable
from holdfast.core.models import Claim, Lease, Settled, Settlement
from holdfast.core.workers import HeartbeatReply, WorkerHeartbeat
from holdfast.stores.base import ClaimRequest, Queueing, Store
from holdfast.stores.forwarding import ForwardingQueueing, ForwardingStore
from tests.storm.history.items import (
    describe_claim,
    describe_heartbeat,
    describe_leases,
    describe_settled,
    describe_settlements,
)
from tests.storm.history.records import Recorder


class RecordedQueueing(ForwardingQueueing):
    """Records claims, settlements and heartbeats."""

    def __init__(self, inner: Queueing, recorder: Recorder) -> None:
        super().__init__(inner)
        self._observe = recorder.observe

    async def claim(self, request: ClaimRequest) -> Claim:
        claiming = self._inner.claim(request)
        return await self._observe("claim", [], claiming, lambda claim: describe_claim(claim, request.lease_for))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        given = describe_settlements(settlements)
        return await self._observe("settle", given, self._inner.settle(settlements), describe_settled)

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        beating = self._inner.heartbeat(heartbeat, leases, lease_for=lease_for)
        given = describe_leases(leases, lease_for)
        return await self._observe("heartbeat", given, beating, lambda reply: describe_heartbeat(leases, reply))


class RecordedStore(ForwardingStore):
    """A store whose queueing is recorded."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    @property
    def queueing(self) -> Queueing:
        return RecordedQueueing(self._inner.queueing, self._recorder)


class RecordedApp(Holdfast):
    """An application that records the calls of its worker. A server has its own clock, a file that of the host."""

    def __init__(self, url: str, recorder: Recorder) -> None:
        super().__init__(url, now=recorder.store_clock_us if url.startswith("sqlite") else None)
        self.recorder = recorder

    def new_store(self, call_deadline: float | None = None) -> Store:
        return RecordedStore(self.plain_store(call_deadline), self.recorder)

    def plain_store(self, call_deadline: float | None = None) -> Store:
        """Returns a store of which no call is recorded."""
        return super().new_store(call_deadline)


async def work(app: RecordedApp, name: str, seed: int, until: float) -> None:
    """Runs a worker until that instant. Its handlers take their time, fail or snooze."""
    rng = random.Random(seed)
    numbers = itertools.count()

    @app.task("history", retry=Retry.fixed(0.1))
    async def history() -> str:
        mark = f"{name}-{next(numbers)}"
        await asyncio.sleep(rng.choice((0, 0.02, 0.2, 1.5)))
        match rng.randrange(8):
            case 0 | 1:
                raise ValueError(mark)
            case 2:
                raise Snooze(0.2)
        return mark

    while time.monotonic() < until:
        try:
            async with app, app.worker(queues="mail,reports", concurrency=4):
                await asyncio.sleep(max(0.0, until - time.monotonic()))
        except Unavailable:  # as it started
            await asyncio.sleep(0.2)
