"""Family ``admin`` of PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from holdfast.core.job_changes import JobChanges
from holdfast.core.models import BulkResult, JobFilter, JobState, ReplayRate, States
from holdfast.core.workers import WorkerCommand
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import CHOICE_SECONDS, SWEEP_TIME, Chosen, SelectionAdmin
from holdfast.stores.common.searches import UNSUCCESSFUL
from holdfast.stores.postgres.dependencies import Resolution, read_resolution
from holdfast.stores.postgres.encoding import (
    NumberedStatement,
    edit_parameters,
    encode_unique,
    filter_parameters,
    is_id,
    span_us,
    stored_unique,
    text_or_none,
)
from holdfast.stores.postgres.limits import update_partitions
from holdfast.stores.postgres.maintenance import notify_ready
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool, SearchKind

T = TypeVar("T")


class PostgresAdmin(SelectionAdmin):
    """Family ``admin`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self._ready = ready

    async def _cancel(self, chosen: Chosen) -> BulkResult:
        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, list[str], set[str], Resolution]:
            ids = await self._still_matching(fetch, chosen)
            rows = await fetch(self._sql["cancel_unstarted"], ids=ids)
            unstarted = [job_id for job_id, _ in rows]
            resolution = await self._resolve(fetch, [job_id for job_id, has_dependents in rows if has_dependents])
            running = await fetch(self._sql["cancel_running"], ids=ids)
            changed = dict.fromkeys(unstarted, JobState.CANCELLED)
            changed |= {job_id: JobState.RUNNING for job_id, _ in running}
            topics = {f"worker:{worker}" for _, worker in running}
            return await self._operated(fetch, ids, changed, chosen), unstarted, topics, resolution

        operated, ended, topics, resolution = await self._changed(run_in_transaction)
        resolution.notify_committed(self._notifications, topics, ended)
        return operated

    async def _resolve(self, fetch: Fetch, ended: Sequence[str], *, deleted: bool = False) -> Resolution:
        """Resolves the dependencies on jobs that have ended, or are about to be deleted."""
        return read_resolution(await fetch(self._sql["resolve_ended"], ids=ended, deleted=deleted) if ended else ())

    async def _replay(
        self, chosen: Chosen, *, force: bool, payload: str | None, from_step: int | None, pace: ReplayRate
    ) -> BulkResult:
        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, set[str]]:
            ids = await self._still_matching(fetch, chosen)
            order_of = {job_id: index for index, job_id in enumerate(chosen.ids)}
            ordered = sorted(ids, key=order_of.__getitem__)
            free = await self._with_unique_keys(fetch, ordered, force=force)
            laters = [span_us(pace.after + order_of[job_id] * pace.every) for job_id in free]
            text = text_or_none(payload)
            rows = await fetch(self._sql["replay"], ids=free, laters=laters, force=force, payload=text)
            changed = {job_id: STATES[code] for job_id, _, code, _ in rows}
            if from_step is not None and changed:
                await fetch(self._sql["delete_steps"], ids=list(changed), from_step=from_step)
            again = await self._reopen(fetch, [job_id for job_id, _, _, has_dependencies in rows if has_dependencies])
            changed |= {job_id: JobState.WAITING for job_id in again if job_id in changed}
            if changed:
                await update_partitions(fetch, self._sql, list({**changed, **dict.fromkeys(again)}))
            return await self._operated(fetch, ids, changed, chosen), {row[1] for row in rows}

        operated, queues = await self._changed(run_in_transaction)
        notify_ready(self._notifications, self._ready, queues)
        return operated

    async def _reopen(self, fetch: Fetch, replayed: Sequence[str]) -> list[str]:
        """Opens dependencies of and on replayed jobs again; returns the jobs that wait again."""
        rows = await fetch(self._sql["renew_waits"], ids=replayed) if replayed else ()
        return [job_id for (job_id,) in rows]

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        chosen = Chosen([job_id], False, None)
        if not is_id(job_id):
            return BulkResult([], [(job_id, None)])

        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, set[str]]:
            given = edit_parameters(job_id, changes)
            rows = await fetch(self._sql["rewrite_unstarted"], **given)
            if rows and changes.options is not None:
                await fetch(self._sql["drop_tags"], id=job_id, tags=given["tags"])
                await fetch(self._sql["add_tags"], id=job_id, tags=given["tags"])
            if rows and changes.has_expiry:
                instant, span = changes.expires_at_us or None, span_us(changes.expires_in)
                await fetch(self._sql["set_expiry"], id=job_id, expires_at=instant, expires_in=span)
            if rows and (changes.queue is not None or changes.payload is not None):
                await update_partitions(fetch, self._sql, [job_id])
            changed = {each: STATES[code] for each, code, _ in rows}
            return await self._operated(fetch, [job_id], changed, chosen), {queue for _, _, queue in rows}

        operated, queues = await self._changed(run_in_transaction)
        notify_ready(self._notifications, self._ready, queues)
        return operated

    async def _with_unique_keys(self, fetch: Fetch, ids: Sequence[str], *, force: bool) -> list[str]:
        """Takes the unique keys of jobs to be replayed; returns the jobs without those whose key another job holds."""
        rows = await fetch(self._sql["unique_keys_of"], ids=ids, force=force)
        keys = {job_id: unique for job_id, text in rows if (unique := stored_unique(text)) is not None}
        if not keys:
            return list(ids)
        firsts = list({keys[job_id].key: job_id for job_id in reversed(ids) if job_id in keys}.values())
        # no replay changes the holder: none needs a lock on it
        unique_keys = [encode_unique(replace(keys[job_id], on_conflict="keep")) for job_id in firsts]
        holders = dict(await fetch(self._sql["take_unique_keys"], ids=firsts, unique_keys=unique_keys))
        return [job_id for job_id in ids if job_id not in keys or holders.get(job_id) == job_id]

    async def _delete(self, chosen: Chosen, states: States) -> BulkResult:
        codes = None if states is None else [CODES[state] for state in states]

        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, Resolution]:
            ids = await self._still_matching(fetch, chosen)
            rows = await fetch(self._sql["deletable"], ids=ids, states=codes)
            gone = {job_id: STATES[code] for job_id, code, _ in rows}
            depended_on = [job_id for job_id, _, has_dependents in rows if has_dependents]
            resolution = await self._resolve(fetch, depended_on, deleted=True)
            await fetch(self._sql["delete_keys_of"], ids=list(gone), ignore_lifetime=True)
            await fetch(self._sql["delete_jobs"], ids=list(gone))
            return await self._operated(fetch, ids, gone, chosen), resolution

        operated, resolution = await self._changed(run_in_transaction)
        resolution.notify_committed(self._notifications)
        return operated

    async def _changed(self, work: Callable[[Fetch], Awaitable[T]]) -> T:
        """Runs ``work`` in one long transaction: each job may have thousands of log lines and attempts."""
        await self._pool.check_alive()
        return await self._pool.transaction(work, extra_time=SWEEP_TIME)

    async def _choose_matching(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> Chosen:
        asked = frozenset(where.states) & legal if where.states else legal
        values = filter_parameters(where) | {
            "states": sorted(CODES[state] for state in asked),
            "uncancelled": uncancelled,
        }
        given = values | {"limit": limit + 1}
        if asked <= UNSUCCESSFUL:
            rows = []
            for state in asked:
                rows += await self._pool.search(
                    self._sql["choose_ended"], SearchKind.CHANGE, seconds=CHOICE_SECONDS, state=CODES[state], **given
                )
            rows.sort(key=lambda row: str(row[0]))
        else:
            rows = await self._pool.search(self._sql["choose"], SearchKind.CHANGE, seconds=CHOICE_SECONDS, **given)
        return Chosen([job_id for (job_id,) in rows[:limit]], len(rows) > limit, values)

    async def _still_matching(self, fetch: Fetch, chosen: Chosen) -> list[str]:
        """Locks and returns the ids to try: those that still match, if a filter chose them."""
        ids = sorted(filter(is_id, chosen.ids))
        if chosen.guard is None:
            return [job_id for (job_id,) in await fetch(self._sql["lock_jobs"], ids=ids)]
        return [job_id for (job_id,) in await fetch(self._sql["choose_again"], ids=ids, **chosen.guard)]

    async def _operated(
        self, fetch: Fetch, ids: Sequence[str], changed: Mapping[str, JobState], chosen: Chosen
    ) -> BulkResult:
        """The answer, in the order of the question. Selected jobs that match no more are left out."""
        asked = chosen.ids
        if chosen.guard is not None:
            matching = set(ids)
            asked = [job_id for job_id in chosen.ids if job_id in matching]
        left = [job_id for job_id in asked if job_id not in changed]
        rows = await fetch(self._sql["states_of"], ids=list(filter(is_id, left))) if left else []
        states = {job_id: STATES[code] for job_id, code, _ in rows}
        return BulkResult(
            changed=[(job_id, changed[job_id]) for job_id in asked if job_id in changed],
            refused=[(job_id, states.get(job_id)) for job_id in left],
            more=chosen.more,
        )

    async def pause(self, queue: str) -> None:
        await self._pool.fetch(self._sql["set_paused"], queue=queue, paused=True)

    async def resume(self, queue: str) -> None:
        await self._pool.fetch(self._sql["set_paused"], queue=queue, paused=False)
        notify_ready(self._notifications, self._ready, {queue})

    async def send_command(self, command: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        names = None if workers is None else list(workers)
        rows = await self._pool.fetch(self._sql["set_command"], command=command.value, workers=names)
        self._notifications.notify_committed({f"worker:{worker}" for (worker,) in rows})
        return [worker for (worker,) in rows]
