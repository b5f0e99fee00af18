"""The sweep of a transport: lost ids are announced again, its lists of dead letters are made true, and deliveries
that dead consumers had in hand go to other consumers.

Each queue's ready jobs are counted and compared with the ids in the transport. Where it holds fewer, the oldest
ready jobs that do not stand in it are announced: never more than are missing, so nothing piles up. Its content
is known only where all of it can be looked at. Ids that are just on their way are spared by looking twice.

Of a deeper queue the jobs are announced that were ready well before those that come next: these have passed them by.
Each is announced once until the next ids are younger than that, too: the announced ones have arrived by then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from holdfast.core.models import JobState
from holdfast.stores.base import TransportQueries
from holdfast.transports.session import Away, TransportSession

ROUND = 10_000
"""Ids of one queue that one sweep announces at most, and that may wait in the transport for it to look at the queue."""
MIRRORED = 1000
"""Dead letters of one queue that its list in the transport holds: those that ended last."""
_MIRRORED_AT_ONCE = 10  # lists of dead letters that a sweep looks at
_AGED = timedelta(seconds=1)  # what became ready later is surely on its way
_AGAIN = 0.1  # seconds between the two looks
_FRONT = 10  # ids at the head to compare with; an old one among them hides lost jobs that are younger until it is taken
_MARGIN = timedelta(seconds=10)  # between becoming ready and being announced there may be so much
_PASSED_AT_ONCE = 1000  # jobs of a deep queue that a sweep announces, and more where many have gone since the last


class Reconciler:
    """The sweeps of one event loop."""

    def __init__(self, queries: TransportQueries, session: TransportSession) -> None:
        self._queries = queries
        self._session = session
        self._mirrored = ""  # the queue whose dead letters were looked at last

    async def sweep(self) -> int:
        """Runs one round; returns the number of jobs announced again."""
        if self._session.away:
            return 0
        try:
            await self._recover()
            reannounced = await self._reannounce()
            await self.mirror_next()
        except Away:  # the next sweep after its return finds what is to be done
            return 0
        return reannounced

    async def reannounce_queue(self, queue: str) -> None:
        """Announce the ids of one queue that the transport has lost."""
        backlog = await self._session.call_transport(self._session.transport.queue_backlogs([queue]))
        await self._announce_lost(await self._missing(backlog))

    async def sync_dead_letters(self, queues: Collection[str]) -> None:
        """Make the lists of these queues' dead letters hold the newest ones there are."""
        session = self._session
        for queue in queues:
            dead = await self._queries.newest_dead(queue, limit=MIRRORED)
            await session.call_transport(session.transport.sync_dead_letters(queue, dead))

    async def mirror_next(self) -> None:
        """Make so many lists true, in turn."""
        session = self._session
        queues = sorted(
            {*await self._queries.dead_queues(), *await session.call_transport(session.transport.dead_letter_queues())}
        )
        first = bisect_right(queues, self._mirrored)
        for queue in [*queues[first:], *queues[:first]][:_MIRRORED_AT_ONCE]:
            await self.sync_dead_letters([queue])
            self._mirrored = queue

    async def _recover(self) -> None:
        """Announces unclaimed deliveries of dead consumers again."""
        session = self._session
        deliveries = await session.without_malformed(await session.call_transport(session.transport.reclaim()))
        if not deliveries:
            return
        places = await self._queries.locate_jobs([each.job_id for each in deliveries])
        ready: dict[str, list[str]] = {}
        for each in deliveries:
            queue, state = places.get(each.job_id, ("", None))
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
        deep = [queue for queue, waiting in backlog.items() if waiting > ROUND]
        if not missing and not deep:
            return 0
        session = self._session
        if not await session.call_transport(session.transport.begin_sweep()):
            return 0
        try:
            return await self._announce_lost(missing) + await self._announce_passed(deep)
        finally:
            await session.try_call(session.transport.end_sweep())

    async def _missing(self, backlog: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of ready jobs missing in the transport, of each queue that is not too deep."""
        shallow = {queue: waiting for queue, waiting in backlog.items() if waiting <= ROUND}
        depths = await self._queries.count_ready({queue: waiting + ROUND for queue, waiting in shallow.items()})
        missing = {queue: min(ROUND, depths[queue] - waiting) for queue, waiting in shallow.items()}
        return {queue: number for queue, number in missing.items() if number > 0}

    async def _announce_lost(self, missing: Mapping[str, int]) -> int:
        """Announce the oldest jobs that were not in the transport at two looks, a moment apart."""
        lost: dict[str, list[str]] = {}
        for queue, number in missing.items():
            held = await self._held(queue)
            if held is not None:
                oldest = await self._queries.oldest_ready(queue, limit=number + len(held), aged=_AGED)
                lost[queue] = [job_id for job_id in oldest if job_id not in held][:number]
        lost = {queue: ids for queue, ids in lost.items() if ids}
        if not lost:
            return 0
        await asyncio.sleep(_AGAIN)
        for queue, ids in lost.items():
            held = await self._held(queue)
            missing_still = [] if held is None else [job_id for job_id in ids if job_id not in held]
            places = await self._queries.locate_jobs(missing_still)
            lost[queue] = [job_id for job_id in missing_still if places.get(job_id) == (queue, JobState.QUEUED)]
        await self._session.call_transport(
            self._session.transport.publish({queue: ids for queue, ids in lost.items() if ids})
        )
        return sum(map(len, lost.values()))

    async def _announce_passed(self, queues: Sequence[str]) -> int:
        """Announce overtaken jobs of queues that are too deep to be looked at."""
        transport, announced = self._session.transport, 0
        for queue in queues:
            front, waiting = await self._session.call_transport(transport.peek(queue, most=_FRONT))
            limit = min(ROUND, _PASSED_AT_ONCE + waiting)
            passed = await self._queries.find_overtaken(queue, front, margin=_MARGIN, limit=limit)
            if passed.ids:
                announced += await self._session.call_transport(transport.republish(queue, passed))
        return announced

    async def _held(self, queue: str) -> set[str] | None:
        return await self._session.call_transport(self._session.transport.ids(queue, most=ROUND))
