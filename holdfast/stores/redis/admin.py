"""Operating on jobs, queues and workers, bounded; and the upkeep anyone may do at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from holdfast.core.errors import Unavailable
from holdfast.core.models import BulkResult, Job, JobFilter, JobState, ReplayRate, WorkerCommand
from holdfast.stores.base import AT_ONCE
from holdfast.stores.common.requests import FORGOTTEN_AFTER, Chosen
from holdfast.stores.common.unconfirmed import perhaps_done
from holdfast.stores.connections.redis import Script, in_pieces
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.encoding import Kinds, shown_jobs, span_us, state_of
from holdfast.stores.redis.eviction import EvictionWatch
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.query import Read
from holdfast.stores.redis.queueing import PIECE


class RedisAdmin:
    """The verbs, over the store's scripts."""

    def __init__(
        self,
        links: NamespacePool,
        news: RedisNotifications,
        scripts: Mapping[str, Script],
        read: Read,
        kinds: Kinds,
        eviction: EvictionWatch,
    ) -> None:
        self._links = links
        self._news = news
        self._scripts = scripts
        self._read = read
        self._kinds = kinds
        self._eviction = eviction

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    async def cancel(self, chosen: Chosen) -> BulkResult:
        """End what waits; flag what runs and tell its worker."""
        operated = await self._each("cancel", chosen)
        ended = [job_id for job_id, state in operated.changed if state is JobState.CANCELLED]
        # Whose worker runs the others the script knows; those here look.
        self._news.notify_done({"worker:*"} if len(ended) < len(operated.changed) else (), ended)
        return operated

    async def replay(self, chosen: Chosen, *, force: bool, payload: str | None, pace: ReplayRate) -> BulkResult:
        """Back to queued with a new budget, or to scheduled where its turn comes later."""
        operated = await self._each("replay", chosen, force=force, payload=payload, pace=pace)
        self._news.notify_done({"queue:*"} if operated.changed else ())
        return operated

    async def delete(self, chosen: Chosen) -> BulkResult:
        """Remove jobs with their keys and history."""
        return await self._each("delete", chosen)

    async def _each(
        self, verb: str, chosen: Chosen, *, force: bool = False, payload: str | None = None, pace: ReplayRate = AT_ONCE
    ) -> BulkResult:
        """The answer, in the order of the question. Selected jobs that match no more are left out."""
        standing = chosen.guard or {}
        flags = ("f" if force else "") + ("w" if self._links.address.whole else "")
        changed: list[tuple[str, JobState]] = []
        refused: list[tuple[str, JobState | None]] = []
        said = "" if payload is None else "=" + payload
        every = span_us(pace.every)
        for number, ids in enumerate(in_pieces(chosen.ids, PIECE)):
            after = span_us(pace.after) + number * PIECE * every
            guarded = [argument for job_id in ids for argument in (job_id, standing.get(job_id, ""))]
            reply = await self._once(verb, flags, said, uuid4().hex, after, every, *guarded)
            for job_id, (state, done) in zip(ids, reply, strict=True):
                if done == 1:
                    changed.append((job_id, state_of(state) or JobState.DEAD))  # else a deleted one in no state
                elif done == 0:
                    refused.append((job_id, None if state is None else state_of(state)))
        return BulkResult(changed=changed, refused=refused, more=chosen.more)

    async def _once(self, *arguments: Argument) -> Any:
        """Returns the answer of the script. It may be sent more than once, but does nothing twice."""
        doubts: list[bool] = []
        try:
            return await self._links.run(
                self._scripts["operate"], *arguments, doubt=lambda: doubts.append(True), synced=True
            )
        except Unavailable as error:
            if not doubts:
                raise
            raise perhaps_done(error) from error

    async def select_jobs(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        """Selects the jobs that a filter matches, oldest first. Only ever states the operation accepts; ``unasked``
        leaves out running jobs that were asked to stop already, so that a series of calls ends.
        """
        jobs = await self._read.find_oldest(where, legal, limit + 1, unasked=unasked)
        standing = {job.id: f"{job.state.value} {job.claims}" for job in jobs[:limit]}
        return Chosen(list(standing), len(jobs) > limit, standing)

    async def pause(self, queue: str, *, paused: bool) -> None:
        """Close or open a queue for claims."""
        await self._links.run(self._scripts["pause"], int(paused), queue)
        if not paused:
            self._news.notify_done({f"queue:{queue}"})

    async def send_command(self, order: WorkerCommand, workers: Sequence[str] | None) -> list[str]:
        """Write down what living workers are to do, and wake them."""
        names = ("all",) if workers is None else ("named", *workers)
        told = [worker.decode() for worker in await self._links.run(self._scripts["order"], order.value, *names)]
        self._news.notify_done({f"worker:{worker}" for worker in told})
        return told

    async def deregister(self, worker: str) -> None:
        """Forget a worker that has stopped."""
        await self._links.run(self._scripts["leave"], worker)


class RedisMaintenance:
    """Family ``maintenance`` of the store."""

    def __init__(
        self,
        links: NamespacePool,
        news: RedisNotifications,
        scripts: Mapping[str, Script],
        kinds: Kinds,
        eviction: EvictionWatch,
    ) -> None:
        self._links = links
        self._news = news
        self._scripts = scripts
        self._kinds = kinds
        self._eviction = eviction

    async def promote_due(self, *, limit: int) -> int:
        """Make due jobs of every queue ready."""
        promoted = 0
        while promoted < limit:
            piece = min(PIECE, limit - promoted)
            number = int(await self._links.run(self._scripts["promote"], piece))
            promoted += number
            if number < piece:
                break
        self._news.notify_done({"queue:*"} if promoted else ())
        return promoted

    async def find_expired(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out. Workers that submit nothing notice here that the server evicts."""
        await self._eviction.read_policy(self._links)
        found: list[Job] = []
        while len(found) < limit:
            piece = min(PIECE, limit - len(found))
            jobs, looked = await self._links.run(self._scripts["expired"], len(found), piece)
            found += [job for _, job in shown_jobs(jobs, self._kinds)]
            if looked < piece:
                break
        return found

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        pruned = 0
        ended = {JobState.SUCCEEDED.value, JobState.DEAD.value, JobState.CANCELLED.value}
        for state, span in ended_for.items():
            while state in ended and pruned < limit:
                piece = min(PIECE, limit - pruned)
                number, looked = await self._links.run(self._scripts["prune"], state, span_us(span), piece)
                pruned += number
                if not looked:
                    break
        await self._links.run(self._scripts["prune_rest"], min(limit, PIECE), span_us(FORGOTTEN_AFTER))
        return pruned
