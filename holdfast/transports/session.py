"""Session of one event loop: deliveries in flight, and the transport's availability."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from uuid import uuid4

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import Event, MalformedMessage, TransportAway, TransportBack
from holdfast.core.ids import parse_id
from holdfast.core.metric_events import MalformedReceived
from holdfast.core.models import Finding, JobState, Lease, QueueInfo
from holdfast.stores.base import EVERY_QUEUE
from holdfast.transports.contract import Delivery, Transport

T = TypeVar("T")

_RETRY, _MAX_RETRY = 0.1, 5.0  # seconds between probes of a transport that is away, before jitter
_CLOSE_TIMEOUT = 1.0  # seconds to return deliveries at the end
_MAX_REPORTS, _REPORT_SPAN = 10, 60.0  # reports of malformed messages within so many seconds
_MAX_TEXT = 80  # characters of a malformed message that are reported
_MAX_ID = 64  # characters; no spelling of an id is longer


class Away(Unavailable):
    """The transport cannot be used now. Never leaves this package."""


class DeliveryLedger:
    """Deliveries by lease of this process's jobs. Its event loops share it: one settles, another sends heartbeats."""

    def __init__(self) -> None:
        self._by_lease: dict[Lease, tuple[str, Delivery]] = {}
        self._missing: dict[str, set[Lease]] = {}  # by worker
        self._consumer = ""
        self._process = 0

    @property
    def consumer(self) -> str:
        """Returns the name of this process as a consumer: another one after a fork."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._consumer = f"{socket.gethostname()[:40]}-{self._process}-{uuid4().hex[:8]}"
        return self._consumer

    def take(self, worker: str, lease: Lease, delivery: Delivery) -> None:
        """Records the delivery of a claimed job, if it must be acknowledged."""
        if delivery.receipt:
            self._by_lease[lease] = (worker, delivery)

    def remove_leases(self, leases: Sequence[Lease]) -> list[Delivery]:
        """Removes the deliveries of these leases and returns them."""
        found = (self._by_lease.pop(lease, None) for lease in leases)
        return [each[1] for each in found if each is not None]

    def unacked(self, worker: str, leases: Sequence[Lease]) -> list[Delivery]:
        """Returns the deliveries of ``leases``, all leases in a worker's heartbeat. Removes a delivery whose lease is
        missing in two heartbeats in a row: the worker has dropped its job, and another consumer reclaims it."""
        if leases:
            missing = {lease for lease, (holder, _) in self._by_lease.items() if holder == worker} - set(leases)
            self.remove_leases(list(missing & self._missing.pop(worker, set())))
            if missing:
                self._missing[worker] = missing
        found = (self._by_lease.get(lease) for lease in leases)
        return [each[1] for each in found if each is not None]

    def forget_worker(self, worker: str) -> None:
        """Removes the deliveries of a stopped worker: other consumers reclaim those it has not settled."""
        self._missing.pop(worker, None)
        self.remove_leases([lease for lease, (holder, _) in self._by_lease.items() if holder == worker])


class TransportSession:
    """Made in its event loop. While the transport is away, calls fail at once until a probe succeeds."""

    def __init__(self, transport: Transport, emit: Callable[[Event], None]) -> None:
        self.transport = transport
        self.back = asyncio.Event()
        self.back.set()
        self.buffered: list[Delivery] = []
        """Deliveries that arrived during a wait, for the next claim."""
        self.has_unseen_delivery = False
        """True if a delivery arrived after the last wait ended."""
        self.capacity: Mapping[str, int] = {}
        """Of the latest claim."""
        self.paused: frozenset[str] = frozenset()
        """Queues from which the latest claim could claim nothing."""
        self._emit = emit
        self._reported: deque[float] = deque(maxlen=_MAX_REPORTS)  # instants of the latest reports
        self._unreported = 0
        self._away_since = 0.0
        self._probing: asyncio.Task[None] | None = None
        self._listening: dict[asyncio.Task[None], asyncio.Event] = {}
        self._watching = asyncio.create_task(self._close_with_loop(), name="holdfast-transport")

    # ── availability ───────────────────────────────────────────────────────────────────────────────────
    @property
    def away(self) -> bool:
        """Returns True if the transport cannot be used now."""
        return not self.back.is_set()

    async def call_transport(self, call: Coroutine[Any, Any, T]) -> T:
        """Returns the transport's answer; raises Away if it is unreachable."""
        if self.away:
            call.close()
            raise Away(f"{self.transport.place} is away")
        try:
            return await call
        except HoldfastError as error:
            self._mark_away(error)
            raise Away(str(error)) from error

    async def try_call(self, call: Coroutine[Any, Any, object]) -> bool:
        """Returns True if the call of the transport was answered."""
        try:
            await self.call_transport(call)
        except Away:
            return False
        return True

    def _mark_away(self, error: HoldfastError) -> None:
        if self.away or self._watching.cancelling() or self._watching.done():  # or closed by ourselves
            return
        self.back.clear()
        self._away_since = time.monotonic()
        self._emit(TransportAway(place=self.transport.place, error=str(error)))
        self._probing = asyncio.create_task(self._probe_until_back(), name="holdfast-transport-back")

    async def _probe_until_back(self) -> None:
        """Probes the transport with a growing backoff until it is back."""
        pause = _RETRY
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _MAX_RETRY)
            with suppress(HoldfastError):
                await self.transport.probe()
                break
        self.back.set()
        self._emit(TransportBack(place=self.transport.place, seconds=round(time.monotonic() - self._away_since, 3)))

    # ── deliveries during a wait ─────────────────────────────────────────────────────────────────────
    def queues_with_room(self, queues: Sequence[str]) -> list[str]:
        """Returns the queues that may take more deliveries."""
        others = self.capacity.get(EVERY_QUEUE)
        return [queue for queue in queues if self.capacity.get(queue, 1 if others is None else others) > 0]

    async def listen(self, queues: Sequence[str], timeout: float) -> None:
        """Waits for a delivery, at most ``timeout`` seconds. It may also arrive later, until ``stop_listening``."""
        stop = asyncio.Event()
        listening = asyncio.create_task(self._listen(queues, timeout, stop), name="holdfast-transport-listener")
        self._listening[listening] = stop
        listening.add_done_callback(lambda ended: self._listening.pop(ended, None))
        try:
            await asyncio.wait([listening])
        finally:
            stop.set()

    async def _listen(self, queues: Sequence[str], timeout: float, stop: asyncio.Event) -> None:
        with suppress(Away):
            arriving = self.transport.listen(queues, paused=self.paused, timeout=timeout, stop=stop)
            arrived = await self.without_malformed(await self.call_transport(arriving))
            self.buffered += arrived
            self.has_unseen_delivery = self.has_unseen_delivery or bool(arrived)

    async def stop_listening(self) -> None:
        """Stops listening and waits until all deliveries are buffered."""
        for stop in self._listening.values():
            stop.set()
        if self._listening:
            await asyncio.wait(list(self._listening))

    def take_deliveries(self, capacity: Mapping[str, int], limit: int) -> tuple[list[Delivery], list[Delivery]]:
        """Takes all buffered deliveries: those to claim, and those to give back."""
        buffered, self.buffered, self.has_unseen_delivery = self.buffered, [], False
        remaining, slots = limit, dict(capacity)
        to_claim: list[Delivery] = []
        rest: list[Delivery] = []
        for each in buffered:
            name = each.queue if each.queue in capacity else EVERY_QUEUE
            if remaining > 0 and slots.get(name, 0) > 0 and each.queue not in self.paused:
                remaining, slots[name] = remaining - 1, slots[name] - 1
                to_claim.append(each)
            else:
                rest.append(each)
        return to_claim, rest

    async def return_deliveries(self) -> None:
        """Gives back the buffered deliveries."""
        await self.stop_listening()
        buffered, self.buffered = self.buffered, []
        if buffered:
            await self.try_call(self.transport.nack(buffered))

    # ── malformed messages ────────────────────────────────────────────────────────────────────────────────────────
    async def without_malformed(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Returns the deliveries that hold a job id; sets messages without one aside."""
        await self.set_aside([each for each in deliveries if canonical_id(each) is None])
        return [each for each in deliveries if canonical_id(each) is not None]

    async def set_aside(self, malformed: Sequence[Delivery]) -> None:
        """Removes messages that hold no job id, counts them and reports them."""
        if not malformed:
            return
        kept_in = ""
        with suppress(Away):  # a stream delivers them again
            kept_in = await self.call_transport(self.transport.set_aside(malformed))
        self._emit(MalformedReceived(count=len(malformed)))
        for each in malformed:
            self._report(each, kept_in)

    def _report(self, delivery: Delivery, kept_in: str) -> None:
        now = time.monotonic()
        if len(self._reported) == _MAX_REPORTS and now - self._reported[0] < _REPORT_SPAN:
            self._unreported += 1
            return
        self._reported.append(now)
        event = MalformedMessage(
            place=self.transport.place,
            queue=delivery.queue,
            size=len(delivery.job_id),
            text=_excerpt(delivery.job_id),
            entry=delivery.receipt,
            kept_in=kept_in,
            unreported=self._unreported,
        )
        self._unreported = 0
        self._emit(event)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────
    async def close(self) -> None:
        """Gives buffered deliveries back and closes the transport."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _close_with_loop(self) -> None:
        """``asyncio.run`` cancels what is left before it ends: last chance to close connections cleanly."""
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self.return_deliveries()
            left = [*self._listening, *([self._probing] if self._probing is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self.transport.close()


def canonical_id(delivery: Delivery) -> str | None:
    """The job id that a delivery holds, in its canonical form; None if it holds none."""
    return parse_id(delivery.job_id) if len(delivery.job_id) <= _MAX_ID else None


def _excerpt(text: str) -> str:
    """The beginning of a text, with unprintable characters escaped."""
    start = text[:_MAX_TEXT]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in start)
    return shown if len(text) <= _MAX_TEXT else shown + "…"


_REMEDY = "until it is back, workers poll the store; check transport_url and that server"


async def run_checks(transport: Transport, queues: Sequence[QueueInfo]) -> list[Finding]:
    """Checks that the transport is usable, and compares its ids with the ready jobs."""
    names = [queue.name for queue in queues]
    try:
        await transport.probe()
        backlog = await transport.queue_backlogs(names)
    except HoldfastError as error:
        return [Finding("transport", "error", str(error), _REMEDY)]
    ready = sum(queue.states.get("queued", 0) for queue in queues)
    more = "at least " if any(JobState.QUEUED in queue.at_least for queue in queues) else ""
    text = f"{transport.place} holds {sum(backlog.values()):,} ids for {more}{ready:,} ready jobs"
    return [Finding("transport", "ok", text)]
