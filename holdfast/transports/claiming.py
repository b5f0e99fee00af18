"""Claim of delivered jobs: receives ids and claims their jobs until the request is filled or no ids are left."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from holdfast.core.errors import HoldfastError
from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ClaimByIds, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.requests import remaining_slots
from holdfast.stores.transportable import TransportQueries
from holdfast.transports.contract import Delivery
from holdfast.transports.session import Away, DeliveryLedger, TransportSession, canonical_id

_ROUNDS = 20  # of receiving ids, in one claim
_RECEIVE_BATCH = 500  # ids received at once if most of the last ones could not be claimed
_LOCKED_PAUSE = timedelta(seconds=0.2)  # until the next look at due jobs that other transactions have locked
_MAX_PROMOTED = 1000  # due jobs made ready by one claim; more are made ready by the next


class Claiming:
    """A claim in progress. Returns the jobs claimed so far if the transport fails meanwhile."""

    def __init__(
        self, queries: TransportQueries, session: TransportSession, in_flight: DeliveryLedger, request: ClaimRequest
    ) -> None:
        self._queries = queries
        self._session = session
        self._in_flight = in_flight
        self._request = request
        self._jobs: list[Job] = []
        self._capacity = dict(request.capacity)
        """Free slots by queue."""
        self._returned: list[Delivery] = []
        self._unusable: list[Delivery] = []  # their jobs cannot be claimed
        self._malformed: list[Delivery] = []  # they hold no job id
        self._promoted: int | None = None
        self._last: Claim = Claim(jobs=[])
        self._lease_until_us: int | None = None  # of the jobs taken first
        self._has_quarantined = False
        self._stopped_at_last_attempt = False
        self._expired: tuple[ExpiredJob, ...] = ()

    async def run(self) -> Claim:
        """Claims jobs. Raises Away if the transport is away and no job was claimed."""
        try:
            await self._rounds()
        except HoldfastError:
            if not self._jobs:  # else the leases of the claimed jobs would be lost
                raise
        finally:
            await self._return_unused()
        due = self._last.next_due
        return msgspec.structs.replace(
            self._last,
            next_due=due if due is None or due > timedelta(0) or self._promoted != 0 else _LOCKED_PAUSE,
            jobs=self._jobs,
            refused=len(self._unusable),
            promoted=self._promoted or 0,
            has_quarantined=self._has_quarantined,
            lease_until_us=self._lease_until_us,
            stopped_at_last_attempt=self._stopped_at_last_attempt,
            expired=self._expired,
        )

    async def _rounds(self) -> None:
        mostly_stale = promoted = False
        for number in range(_ROUNDS):
            deliveries = await self._receive(mostly_stale=mostly_stale, first=number == 0)
            if number and not deliveries and not promoted:
                return
            discarded, paused = self._discarded, self._session.paused
            await self._claim(deliveries)
            mostly_stale = self._discarded - discarded > len(deliveries) // 2
            promoted = await self._promote()
            more = deliveries or not paused <= self._session.paused
            if self._stopped_at_last_attempt:
                if promoted:
                    await self._claim([])  # reads when the next job is due; ids that arrive now must not overtake
                return
            if not promoted and (self._room <= 0 or not more):
                return

    @property
    def _discarded(self) -> int:
        return len(self._unusable) + len(self._malformed)

    @property
    def _room(self) -> int:
        return self._request.limit - len(self._jobs)

    async def _receive(self, *, mostly_stale: bool, first: bool) -> list[Delivery]:
        capacity, session = self._capacity, self._session
        deliveries: list[Delivery] = []
        if first:
            deliveries, rest = session.take_deliveries(capacity, self._room)
            self._returned += rest
        limit = _RECEIVE_BATCH if mostly_stale else self._room
        if mostly_stale:
            capacity = {queue: _RECEIVE_BATCH for queue, slots in capacity.items() if slots > 0}
        if self._room > len(deliveries) and any(capacity.values()):
            arrived = session.transport.receive(capacity, limit=limit - len(deliveries), paused=session.paused)
            try:
                deliveries += await session.call_transport(arrived)
            except Away:
                self._returned += deliveries
                raise
        return deliveries

    async def _claim(self, deliveries: list[Delivery]) -> None:
        """Claims the jobs of these deliveries, each id once, and records the outcome of each delivery."""
        by_id: dict[str, Delivery] = {}
        for each in deliveries:
            canonical = canonical_id(each)
            if canonical is None:
                self._malformed.append(each)
            elif canonical in by_id:
                self._unusable.append(each)
            else:
                by_id[canonical] = each
        request = self._request
        max_must_start = request.max_must_start - sum(map(must_start_now, self._jobs))
        try:
            delivered = await self._queries.claim_ids(
                msgspec.structs.replace(
                    request,
                    capacity=self._capacity,
                    limit=self._room,
                    max_must_start=max(0, max_must_start),
                    ids=list(by_id),
                    promote=False,
                )
            )
        except BaseException:
            self._returned += by_id.values()
            raise
        self._record_claim(delivered, by_id)

    def _record_claim(self, delivered: ClaimByIds, by_id: dict[str, Delivery]) -> None:
        self._last = delivered.claim
        self._has_quarantined = self._has_quarantined or delivered.claim.has_quarantined
        if self._lease_until_us is None:
            self._lease_until_us = delivered.claim.lease_until_us
        self._stopped_at_last_attempt = self._stopped_at_last_attempt or delivered.claim.stopped_at_last_attempt
        self._session.paused = delivered.paused
        self._jobs += delivered.claim.jobs
        self._capacity = remaining_slots(self._capacity, (job.queue for job in delivered.claim.jobs))
        for job in delivered.claim.jobs:
            self._in_flight.take(self._request.worker, job.lease, by_id.pop(job.id))
        self._expired += delivered.claim.expired
        for job_id, queue in delivered.unclaimed.items():
            delivery = by_id.pop(job_id)
            # A job moved to another queue was published there: given back here, it would return for ever.
            (self._returned if delivery.queue == queue else self._unusable).append(delivery)
        self._unusable += by_id.values()

    async def _promote(self) -> bool:
        """Promotes due jobs and publishes them, once per claim; returns True if there were any."""
        due = self._last.next_due
        if not self._request.promote or self._promoted is not None or due is None or due > timedelta(0):
            return False
        capacity = self._request.capacity
        queues = None if EVERY_QUEUE in capacity else [queue for queue, slots in capacity.items() if slots > 0]
        ready = await self._queries.make_ready(queues, limit=_MAX_PROMOTED)
        self._promoted = sum(map(len, ready.values()))
        if ready:
            await self._session.call_transport(self._session.transport.publish(ready))
        return bool(ready)

    async def _return_unused(self) -> None:
        """Gives back deliveries that other workers can claim, in order, and acknowledges the rest."""
        session = self._session
        await session.try_call(session.transport.nack(self._returned))
        await session.try_call(session.transport.ack(self._unusable))
        await session.set_aside(self._malformed)
