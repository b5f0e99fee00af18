"""The sweep of a transport: publishes lost ids again, syncs the lists of dead letters, and reclaims deliveries of dead
consumers.

It compares the number of ready jobs in the store with the number of ids in the transport, queue by queue. If ids are
missing, it publishes the oldest ready jobs without an id, at most as many as are missing. For that it reads all ids of
the queue, twice with a pause, so ids that are just being published do not count as lost.

A queue with more than ``MAX_COMPARED`` ids is not read in full. There it looks at the next ids: a job that was ready
well before the jobs of those ids has been overtaken, so its id is lost, and is published again. The transport notes
each such id, and publishes it only once until the next ids are younger still: by then the first copy has been received.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from holdfast.core.models import JobState
from holdfast.stores.transportable import TransportQueries
from holdfast.transports.session import Away, TransportSession

MAX_COMPARED = 10_000
"""Most ids that a sweep publishes for one queue, and the depth up to which it reads all ids of a queue."""
MAX_DEAD_LETTERS = 1000
"""Dead letters in the list of one queue: the latest ones."""
_LISTS_PER_SWEEP = 10  # lists of dead letters that one sweep syncs
_MIN_AGE = timedelta(seconds=1)  # a job ready for less may just be being published
_CHECK_PAUSE = 0.1  # seconds between the two reads
_PEEKED = 10  # next ids to compare with; an old one among them hides younger lost jobs until it is received
_MARGIN = timedelta(seconds=10)  # the most time between becoming ready and being published
_MIN_REPUBLISHED = 1000  # jobs of a deep queue per sweep, plus those received since the last


class Reconciler:
    """The sweeps of one event loop."""

    def __init__(self, queries: TransportQueries, session: TransportSession) -> None:
        self._queries = queries
        self._session = session
        self._last_synced = ""  # the queue whose dead letters were looked at last

    async def sweep(self) -> int:
        """Runs one round; returns the number of jobs announced again."""
        if self._session.away:
            return 0
        try:
            await self._reclaim()
            reannounced = await self._reannounce()
            await self.sync_next_lists()
        except Away:  # the next sweep after its return does the work
            return 0
        return reannounced

    async def reannounce_queue(self, queue: str) -> None:
        """Publishes the ids of one queue that the transport has lost."""
        backlog = await self._session.call_transport(self._session.transport.queue_backlogs([queue]))
        await self._publish_lost(await self._missing(backlog))

    async def sync_dead_letters(self, queues: Collection[str]) -> None:
        """Makes the dead-letter lists of these queues hold the newest dead letters."""
        session = self._session
        for queue in queues:
            dead = await self._queries.newest_dead(queue, limit=MAX_DEAD_LETTERS)
            await session.call_transport(session.transport.sync_dead_letters(queue, dead))

    async def sync_next_lists(self) -> None:
        """Syncs the next dead-letter lists, round robin."""
        session = self._session
        queues = sorted(
            {*await self._queries.dead_queues(), *await session.call_transport(session.transport.dead_letter_queues())}
        )
        first = bisect_right(queues, self._last_synced)
        for queue in [*queues[first:], *queues[:first]][:_LISTS_PER_SWEEP]:
            await self.sync_dead_letters([queue])
            self._last_synced = queue

    async def _reclaim(self) -> None:
        """Publishes unclaimed deliveries of dead consumers again."""
        session = self._session
        deliveries = await session.without_malformed(await session.call_transport(session.transport.reclaim()))
        if not deliveries:
            return
        located = await self._queries.locate_jobs([each.job_id for each in deliveries])
        ready: dict[str, list[str]] = {}
        for each in deliveries:
            queue, state = located.get(each.job_id, ("", None))
            if state is JobState.QUEUED:
                ready.setdefault(queue, []).append(each.job_id)
        await session.call_transport(session.transport.publish(ready))
        await session.call_transport(session.transport.ack(deliveries))

    async def _reannounce(self) -> int:
        queues = await self._queries.ready_queues()
        if not queues:
            return 0
        backlog = await self._session.call_transport(self._session.transport.queue_backlogs(queues))
        missing = await self._missing(backlog)
        deep = [queue for queue, in_transport in backlog.items() if in_transport > MAX_COMPARED]
        if not missing and not deep:
            return 0
        session = self._session
        if not await session.call_transport(session.transport.begin_sweep()):
            return 0
        try:
            return await self._publish_lost(missing) + await self._republish_overtaken(deep)
        finally:
            await session.try_call(session.transport.end_sweep())

    async def _missing(self, backlog: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of ready jobs missing in the transport, of each queue that is not too deep."""
        shallow = {queue: in_transport for queue, in_transport in backlog.items() if in_transport <= MAX_COMPARED}
        depths = await self._queries.count_ready(
            {queue: in_transport + MAX_COMPARED for queue, in_transport in shallow.items()}
        )
        missing = {queue: min(MAX_COMPARED, depths[queue] - in_transport) for queue, in_transport in shallow.items()}
        return {queue: number for queue, number in missing.items() if number > 0}

    async def _publish_lost(self, missing: Mapping[str, int]) -> int:
        """Publishes the oldest jobs whose ids were missing in two reads, a moment apart."""
        lost: dict[str, list[str]] = {}
        for queue, number in missing.items():
            present = await self._ids(queue)
            if present is not None:
                oldest = await self._queries.oldest_ready(queue, limit=number + len(present), aged=_MIN_AGE)
                lost[queue] = [job_id for job_id in oldest if job_id not in present][:number]
        lost = {queue: ids for queue, ids in lost.items() if ids}
        if not lost:
            return 0
        await asyncio.sleep(_CHECK_PAUSE)
        for queue, ids in lost.items():
            present = await self._ids(queue)
            missing_still = [] if present is None else [job_id for job_id in ids if job_id not in present]
            located = await self._queries.locate_jobs(missing_still)
            lost[queue] = [job_id for job_id in missing_still if located.get(job_id) == (queue, JobState.QUEUED)]
        await self._session.call_transport(
            self._session.transport.publish({queue: ids for queue, ids in lost.items() if ids})
        )
        return sum(map(len, lost.values()))

    async def _republish_overtaken(self, queues: Sequence[str]) -> int:
        """Publishes overtaken jobs of queues that are too deep to be compared."""
        transport, announced = self._session.transport, 0
        for queue in queues:
            next_ids, in_transport = await self._session.call_transport(transport.peek(queue, limit=_PEEKED))
            limit = min(MAX_COMPARED, _MIN_REPUBLISHED + in_transport)
            overtaken = await self._queries.find_overtaken(queue, next_ids, margin=_MARGIN, limit=limit)
            if overtaken.ids:
                announced += await self._session.call_transport(transport.republish(queue, overtaken))
        return announced

    async def _ids(self, queue: str) -> set[str] | None:
        return await self._session.call_transport(self._session.transport.ids(queue, limit=MAX_COMPARED))
