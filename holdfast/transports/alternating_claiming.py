"""Claims of delivered jobs and of jobs under limits, which come from the store; claims alternate between both kinds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.core.errors import HoldfastError
from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, Job
from holdfast.stores.base import ClaimRequest
from holdfast.stores.common.requests import remaining_slots
from holdfast.stores.transportable import TransportQueries
from holdfast.transports.claiming import Claiming
from holdfast.transports.session import DeliveryLedger, TransportSession


class TransportAlternation:
    """Alternation of claims between jobs under limits and jobs under no limit."""

    limited_first = True
    """The next claim begins with jobs under limits, since the last one began with a job under no limit."""


class AlternatingClaiming:
    """Claims both kinds of jobs."""

    def __init__(
        self,
        queries: TransportQueries,
        session: TransportSession,
        in_flight: DeliveryLedger,
        alternation: TransportAlternation,
    ) -> None:
        self._queries = queries
        self._session = session
        self._in_flight = in_flight
        self._alternation = alternation

    async def run(self, request: ClaimRequest) -> Claim:
        """Claims jobs. Raises Away if the transport is away and no job was claimed."""
        limited_first = self._alternation.limited_first
        limited = await self._queries.claim_limited(request) if limited_first else None
        if limited is not None and limited.jobs:
            self._alternation.limited_first = False
            if len(limited.jobs) >= request.limit:
                return limited
        rest = request if limited is None else reduce_request(request, limited.jobs, are_limited=True)
        try:
            delivered = await Claiming(self._queries, self._session, self._in_flight, rest).run()
        except HoldfastError:
            if limited is None or not limited.jobs:  # else the leases of the claimed jobs would be lost
                raise
            return limited
        if delivered.jobs and self._alternation.limited_first == limited_first:
            self._alternation.limited_first = True
        if limited is None and len(delivered.jobs) < request.limit:
            try:
                limited = await self._queries.claim_limited(reduce_request(request, delivered.jobs, are_limited=False))
            except HoldfastError:
                if not delivered.jobs:
                    raise
        return delivered if limited is None else merge_claims(delivered, limited)


def reduce_request(request: ClaimRequest, jobs: Sequence[Job], *, are_limited: bool) -> ClaimRequest:
    """Returns the request reduced by the claimed jobs."""
    started = len(jobs) if are_limited else sum(map(must_start_now, jobs))
    return msgspec.structs.replace(
        request,
        capacity=remaining_slots(request.capacity, (job.queue for job in jobs)),
        limit=request.limit - len(jobs),
        max_must_start=max(0, request.max_must_start - started),
        free_runners=request.free_runners - len(jobs) if are_limited else request.free_runners,
    )


def merge_claims(first: Claim, second: Claim) -> Claim:
    """Merges two claims."""
    return Claim(
        jobs=[*first.jobs, *second.jobs],
        promoted=first.promoted + second.promoted,
        refused=first.refused + second.refused,
        next_due=min((due for due in (first.next_due, second.next_due) if due is not None), default=None),
        has_quarantined=first.has_quarantined or second.has_quarantined,
        expired=(*first.expired, *second.expired),
        stopped_at_last_attempt=first.stopped_at_last_attempt or second.stopped_at_last_attempt,
        lease_until_us=min(
            (until for until in (first.lease_until_us, second.lease_until_us) if until is not None), default=None
        ),
    )
