"""Operating on jobs, queues and workers, bounded; and the upkeep anyone may do at any time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from holdfast.core.models import BulkResult, Job, JobFilter, JobState, ReplayRate, WorkerCommand
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import CHOOSE, FORGOTTEN_AFTER, UNSUCCESSFUL, UPKEEP, Chosen
from holdfast.stores.postgres.encoding import filter_parameters, is_id, shown_job, span_us, text_or_none
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool, Rows, Turn
from holdfast.stores.postgres.statements import NumberedStatement

T = TypeVar("T")

Fetch = Callable[..., Awaitable[Rows]]


class PostgresAdmin:
    """The verbs, over the store's named statements."""

    def __init__(
        self,
        links: PostgresPool,
        news: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str], None],
    ) -> None:
        self._links = links
        self._news = news
        self._sql = statements
        self._ready = ready

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    async def cancel(self, chosen: Chosen) -> BulkResult:
        """End what waits; flag what runs and tell its worker."""

        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, list[str], set[str]]:
            ids = await self._standing(fetch, chosen)
            unstarted = [row[0] for row in await fetch(self._sql["cancel_unstarted"], ids=ids)]
            running = await fetch(self._sql["cancel_running"], ids=ids)
            changed = dict.fromkeys(unstarted, JobState.CANCELLED)
            changed |= {job_id: JobState.RUNNING for job_id, _ in running}
            topics = {f"worker:{worker}" for _, worker in running}
            return await self._operated(fetch, ids, changed, chosen), unstarted, topics

        operated, ended, topics = await self._changed(run_in_transaction)
        self._news.notify_committed(topics, ended)
        return operated

    async def replay(self, chosen: Chosen, *, force: bool, payload: str | None, pace: ReplayRate) -> BulkResult:
        """Back to queued with a new budget, or to scheduled where its turn comes later."""

        async def run_in_transaction(fetch: Fetch) -> tuple[BulkResult, set[str]]:
            ids = await self._standing(fetch, chosen)
            turns = {job_id: turn for turn, job_id in enumerate(chosen.ids)}
            laters = [span_us(pace.after + turns[job_id] * pace.every) for job_id in ids]
            text = text_or_none(payload)
            rows = await fetch(self._sql["replay"], ids=ids, laters=laters, force=force, payload=text)
            changed = {job_id: STATES[code] for job_id, _, code in rows}
            return await self._operated(fetch, ids, changed, chosen), {queue for _, queue, _ in rows}

        operated, queues = await self._changed(run_in_transaction)
        _tell_ready(self._news, self._ready, queues)
        return operated

    async def delete(self, chosen: Chosen) -> BulkResult:
        """Remove jobs with their keys, tags and history."""

        async def run_in_transaction(fetch: Fetch) -> BulkResult:
            ids = await self._standing(fetch, chosen)
            gone = {job_id: STATES[code] for job_id, code in await fetch(self._sql["deletable"], ids=ids)}
            await fetch(self._sql["delete_keys_of"], ids=list(gone), whatever=True)
            await fetch(self._sql["delete_jobs"], ids=list(gone))
            return await self._operated(fetch, ids, gone, chosen)

        return await self._changed(run_in_transaction)

    async def _changed(self, work: Callable[[Fetch], Awaitable[T]]) -> T:
        """Returns the result of ``work``, done in one transaction that may take long: thousands of log lines and
        attempts may belong to each job.
        """
        await self._links.check_alive()
        return await self._links.transaction(work, extra=UPKEEP)

    async def select_jobs(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        """Selects the jobs that a filter matches, read outside of any transaction: that may take long, and nobody waits
        for it.

        Only ever states the operation accepts; ``unasked`` leaves out running jobs that were asked to stop already, so
        that a series of calls ends.
        """
        asked = frozenset(where.states) & legal if where.states else legal
        if not asked:
            return Chosen([], False, None)
        values = filter_parameters(where) | {"states": sorted(CODES[state] for state in asked), "unasked": unasked}
        said = values | {"limit": limit + 1}
        if asked <= UNSUCCESSFUL:
            rows = []
            for state in asked:
                rows += await self._links.search(
                    self._sql["choose_ended"], Turn.CHANGE, seconds=CHOOSE, state=CODES[state], **said
                )
            rows.sort(key=lambda row: str(row[0]))
        else:
            rows = await self._links.search(self._sql["choose"], Turn.CHANGE, seconds=CHOOSE, **said)
        return Chosen([job_id for (job_id,) in rows[:limit]], len(rows) > limit, values)

    async def _standing(self, fetch: Fetch, chosen: Chosen) -> list[str]:
        """The ids to try, their rows locked. Of those a filter chose, the ones it still matches: others have written
        since."""
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

    async def pause(self, queue: str, *, paused: bool) -> None:
        """Close or open a queue for claims."""
        await self._links.fetch(self._sql["set_paused"], queue=queue, paused=paused)
        if not paused:
            _tell_ready(self._news, self._ready, {queue})

    async def send_command(self, order: WorkerCommand, workers: Sequence[str] | None) -> list[str]:
        """Write down what living workers are to do, and wake them."""
        names = None if workers is None else list(workers)
        rows = await self._links.fetch(self._sql["order_workers"], order=order.value, workers=names)
        self._news.notify_committed({f"worker:{worker}" for (worker,) in rows})
        return [worker for (worker,) in rows]

    async def deregister(self, worker: str) -> None:
        """Forget a worker that has stopped."""
        await self._links.fetch(self._sql["delete_worker"], worker=worker)


class PostgresMaintenance:
    """Family ``maintenance`` of the store."""

    def __init__(
        self,
        links: PostgresPool,
        news: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str], None],
    ) -> None:
        self._links = links
        self._news = news
        self._sql = statements
        self._ready = ready

    async def promote_due(self, *, limit: int) -> int:
        """Make due jobs of every queue ready."""
        return sum(map(len, (await self.make_ready(None, limit=limit)).values()))

    async def make_ready(self, queues: Sequence[str] | None, *, limit: int) -> dict[str, list[str]]:
        """The same for these queues, or every one; their ids by queue, in the order of claims."""
        if queues is None:
            rows = await self._links.fetch(self._sql["promote_anywhere"], limit=limit, extra=UPKEEP)
        else:
            rows = await self._links.fetch(self._sql["promote_queues"], queues=list(queues), limit=limit, extra=UPKEEP)
        ready: dict[str, list[str]] = {}
        for queue, _, _, job_id in sorted(rows, key=lambda row: row[1:]):
            ready.setdefault(queue, []).append(job_id)
        _tell_ready(self._news, self._ready, set(ready))
        return ready

    async def find_expired(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out."""
        return [shown_job(row) for row in await self._links.fetch(self._sql["expired"], limit=limit, extra=UPKEEP)]

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        pruned = 0
        for state, span in ended_for.items():
            pruned += await self._prune_state(JobState(state), span, limit - pruned)
        await self._links.fetch(self._sql["outlived_keys"], limit=limit, extra=UPKEEP)
        await self._links.fetch(self._sql["prune_keys"], limit=limit, extra=UPKEEP)
        await self._links.fetch(self._sql["prune_workers"], span=span_us(FORGOTTEN_AFTER), extra=UPKEEP)
        return pruned

    async def _prune_state(self, state: JobState, span: timedelta, limit: int) -> int:
        async def run_in_transaction(fetch: Fetch) -> int:
            rows = await fetch(self._sql["prune_jobs"], state=CODES[state], span=span_us(span), limit=limit)
            keyed = [job_id for job_id, has_key in rows if has_key]
            if keyed:
                await fetch(self._sql["delete_keys_of"], ids=keyed, whatever=False)
            if rows:
                await fetch(self._sql["delete_jobs"], ids=[row[0] for row in rows])
            return len(rows)

        return await self._links.transaction(run_in_transaction, extra=UPKEEP)


def _tell_ready(news: PostgresNotifications, ready: Callable[[str], None], queues: set[str]) -> None:
    for queue in queues:
        ready(queue)
    news.notify_committed({f"queue:{queue}" for queue in queues})
