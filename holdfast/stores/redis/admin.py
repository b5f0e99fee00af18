"""Family ``admin`` of Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.core.errors import Unavailable
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import BulkResult, JobFilter, JobState, ReplayRate, States
from holdfast.core.workers import WorkerCommand
from holdfast.stores.base import AT_ONCE
from holdfast.stores.common.requests import Chosen, SelectionAdmin
from holdfast.stores.connections.redis import Script, split_parts
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT
from holdfast.stores.redis.encoding import encode_changes, span_us, state_of
from holdfast.stores.redis.limits import CONFLICT, TRIES, PartitionAssigner
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.query import RedisReader


class RedisAdmin(SelectionAdmin):
    """Family ``admin`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        read: RedisReader,
        assigner: PartitionAssigner,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._read = read
        self._assigner = assigner

    async def _cancel(self, chosen: Chosen) -> BulkResult:
        operated = await self._each("cancel", chosen)
        ended = [job_id for job_id, state in operated.changed if state is JobState.CANCELLED]
        # Whose worker runs the others the script knows; those here look.
        self._notifications.wake_local_waiters({"worker:*"} if len(ended) < len(operated.changed) else (), ended)
        return operated

    async def _replay(
        self, chosen: Chosen, *, force: bool, payload: str | None, from_step: int | None, pace: ReplayRate
    ) -> BulkResult:
        operated = await self._each("replay", chosen, force=force, payload=payload, from_step=from_step, pace=pace)
        self._notifications.wake_local_waiters({"queue:*"} if operated.changed else ())
        return operated

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        one_piece = "w" if self._pool.address.in_one_piece else ""
        given, edit = encode_changes(changes), self._scripts["edit"]

        async def send() -> Any:
            if changes.payload is None and changes.queue is None:
                return await self._pool.run_keyed(edit, job_id, one_piece, "", "", *given)
            version, partitions = await self._assigner.find_partitions(
                [job_id], queue=changes.queue, payload=changes.payload
            )
            fingerprint, partition = partitions[job_id]
            return await self._pool.run_keyed(
                edit, job_id, one_piece, version, fingerprint, *given, "partition", partition
            )

        state, done = await _until_current(send)
        found = None if state is None else state_of(state)
        self._notifications.wake_local_waiters({"queue:*"} if done else ())
        if done and found is not None:
            return BulkResult([(job_id, found)], [])
        return BulkResult([], [(job_id, found)])

    async def _delete(self, chosen: Chosen, states: States) -> BulkResult:
        return await self._each("delete", chosen, states=states)

    async def _each(
        self,
        verb: str,
        chosen: Chosen,
        *,
        force: bool = False,
        payload: str | None = None,
        from_step: int | None = None,
        pace: ReplayRate = AT_ONCE,
        states: States = None,
    ) -> BulkResult:
        """The answer, in the order of the question. Selected jobs that match no more are left out."""
        recorded = chosen.guard or {}
        flags = ("f" if force else "") + ("w" if self._pool.address.in_one_piece else "")
        flags += "" if from_step is None else str(from_step)
        text = "" if payload is None else "=" + payload
        common = verb, flags, text if states is None else f"in {' '.join(states)}"
        changed: list[tuple[str, JobState]] = []
        refused: list[tuple[str, JobState | None]] = []
        every = span_us(pace.every)
        for number, ids in enumerate(split_parts(chosen.ids, MAX_PER_SCRIPT)):
            after = span_us(pace.after) + number * MAX_PER_SCRIPT * every
            guards = {job_id: recorded.get(job_id, "") for job_id in ids}
            reply = await _until_current(partial(self._operate, common, guards, (after, every), payload))
            for job_id, (state, done) in zip(ids, reply, strict=True):
                if done == 1:
                    changed.append((job_id, state_of(state) or JobState.DEAD))  # else a deleted one in no state
                elif done == 0:
                    refused.append((job_id, None if state is None else state_of(state)))
        return BulkResult(changed=changed, refused=refused, more=chosen.more)

    async def _operate(
        self, common: tuple[str, str, str], guards: Mapping[str, str], times: tuple[int, int], payload: str | None
    ) -> Any:
        version, partitions = b"", dict[Argument, tuple[bytes, str]]()
        if common[0] == "replay":
            version, partitions = await self._assigner.find_partitions(list(guards), payload=payload)
        jobs: list[Argument] = []
        for job_id, guard in guards.items():
            jobs += (job_id, guard, *partitions.get(job_id, (b"", "")))
        return await self._pool.run_keyed(self._scripts["operate"], *common, *times, version, *jobs)

    async def _choose_matching(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> Chosen:
        jobs = await self._read.find_oldest(where, legal, limit + 1, uncancelled=uncancelled)
        guards = {job.id: f"{job.state.value} {job.claims}" for job in jobs[:limit]}
        return Chosen(list(guards), len(jobs) > limit, guards)

    async def pause(self, queue: str) -> None:
        await self._pool.run(self._scripts["pause"], 1, queue)

    async def resume(self, queue: str) -> None:
        await self._pool.run(self._scripts["pause"], 0, queue)
        self._notifications.wake_local_waiters({f"queue:{queue}"})

    async def send_command(self, command: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        names = ("all",) if workers is None else ("named", *workers)
        reply = await self._pool.run(self._scripts["send_command"], command.value, *names)
        sent = [worker.decode() for worker in reply]
        self._notifications.wake_local_waiters({f"worker:{worker}" for worker in sent})
        return sent


async def _until_current(send: Callable[[], Awaitable[Any]]) -> Any:
    """Answer of a script that writes partitions; sent again with new ones while jobs or limits change."""
    for _ in range(TRIES):
        reply = await send()
        if reply != CONFLICT:
            return reply
    raise Unavailable("other programs change these jobs and their limits at this moment; try again")
