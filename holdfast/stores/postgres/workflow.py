"""Family ``workflow`` of PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.core import waits
from holdfast.core.batches import BatchProgress
from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.errors import Conflict
from holdfast.core.models import MICROSECOND, JobState, Lease, NewJob, Step
from holdfast.core.steps import NewStep
from holdfast.core.waits import (
    ChildStatus,
    JobWaits,
    KeptSignal,
    ReceiverInfo,
    SentSignal,
    Signal,
    SignalReceipt,
    SignalWait,
)
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.common.requests import find_extra_time
from holdfast.stores.postgres.cursors import QueuePosition
from holdfast.stores.postgres.dependencies import NOTHING_RESOLVED, Resolution
from holdfast.stores.postgres.encoding import NumberedStatement, from_text, is_id, span_us, text_or_none, to_text
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool, Rows
from holdfast.stores.postgres.submission import first_positions, insert_related


class PostgresWorkflow:
    """Family ``workflow`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str, QueuePosition], None],
        limit_cache: LimitCache,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self._ready = ready
        self._limit_cache = limit_cache

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        places = [n for n, step in enumerate(steps) if is_id(step.lease.job_id)]
        places.sort(key=lambda n: steps[n].lease.job_id)  # the order in which several rows are locked
        known = [steps[n] for n in places]
        if len(known) == 1:
            is_saved = await self._save_one(known[0])
            return [is_saved and n == places[0] for n in range(len(steps))]
        rows = await self._pool.fetch(
            self._sql["save_steps"],
            extra_time=find_extra_time(len(known), sum(len(step.result or "") for step in known)),
            ids=[step.lease.job_id for step in known],
            claims=[step.lease.claims for step in known],
            workers=[step.worker for step in known],
            numbers=[step.number for step in known],
            are_ordered=[step.is_ordered for step in known],
            names=[to_text(step.name) for step in known],
            results=[text_or_none(step.result) for step in known],
        )
        saved = {places[ordinal - 1] for (ordinal,) in rows}
        return [n in saved for n in range(len(steps))]

    async def _save_one(self, step: NewStep) -> bool:
        rows = await self._pool.fetch(
            self._sql["save_step"],
            extra_time=find_extra_time(1, len(step.result or "")),
            id=step.lease.job_id,
            claims=step.lease.claims,
            worker=step.worker,
            number=step.number,
            is_ordered=step.is_ordered,
            name=to_text(step.name),
            result=text_or_none(step.result),
        )
        return bool(rows)

    async def read_steps(self, job_id: str) -> list[Step]:
        rows = await self._pool.fetch(self._sql["steps"], id=job_id) if is_id(job_id) else []
        return [
            Step(from_text(name), number, is_ordered, claims, ended_at, None if result is None else from_text(result))
            for name, number, is_ordered, claims, ended_at, result in rows
        ]

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        step = wait.step
        if not is_id(step.lease.job_id):
            return SignalReceipt(has_lease=False)
        ((has_lease, result, left),) = await self._pool.fetch(
            self._sql["receive_signal"],
            at=self._pool.instant,
            id=step.lease.job_id,
            claims=step.lease.claims,
            worker=step.worker,
            step=to_text(step.name),
            number=step.number,
            is_ordered=step.is_ordered,
            topic=to_text(wait.topic),
            timeout=span_us(wait.timeout),
        )
        return SignalReceipt(
            has_lease, None if result is None else from_text(result), None if left is None else left * MICROSECOND
        )

    async def send_signal(self, signal: Signal) -> SentSignal:
        uncertain: list[bool] = []  # a try that was cut off may have sent it: then "known" means "new"
        ((is_new, job_id, queue, is_full),) = await self._pool.fetch(
            self._sql["send_signal"],
            on_uncertain=lambda: uncertain.append(True),
            extra_time=find_extra_time(1, len(signal.value)),
            at=self._pool.instant,
            signal=to_text(signal.id),
            topic=to_text(signal.topic),
            value=to_text(signal.value),
            max_signals=waits.MAX_SIGNALS,
        )
        if is_full:
            raise Conflict(waits.describe_full_topic(signal.topic))
        if queue is not None:
            Resolution({queue}, []).notify_committed(self._notifications)
        return SentSignal(is_new or bool(uncertain), job_id)

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        if topic is None:
            rows = await self._pool.fetch(self._sql["all_signals"], limit=limit)
        else:
            rows = await self._pool.fetch(self._sql["signals"], topic=to_text(topic), limit=limit)
        return [KeptSignal(from_text(name), from_text(of), from_text(value), at) for name, of, value, at in rows]

    # ── children and dependencies ─────────────────────────────────────────────────────────────────────────────
    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        if not is_id(lease.job_id):
            return None
        bound = await self._limit_cache.bind(children) if children else ()

        async def run_in_transaction(
            fetch: Fetch,
        ) -> tuple[list[ChildStatus] | None, dict[str, QueuePosition], Resolution]:
            asked = [child.id for child in bound]
            await fetch(self._sql["lock_children"], ids=asked)
            if not await fetch(self._sql["lock_leased_job"], id=lease.job_id, claims=lease.claims, worker=worker):
                return None, {}, NOTHING_RESOLVED
            jobs = dict(await fetch(self._sql["known_children"], id=lease.job_id, ids=asked))
            left = [child for child in bound if child.id not in jobs]
            # Batches are locked after the parent, which may be a member: its end locks it first too.
            answers, resolution = await insert_related(self._sql, left, fetch, self._pool.instant)
            jobs |= {child.id: answer.job_id for child, answer in zip(left, answers, strict=True)}
            others = {each: job for each, job in jobs.items() if job != lease.job_id}  # a child may have the job's key
            rows = await fetch(self._sql["await_children"], id=lease.job_id, ids=[*others], jobs=[*others.values()])
            states = {lease.job_id: JobState.RUNNING} | {job_id: STATES[code] for job_id, code in rows}
            statuses = [ChildStatus(jobs[each], states.get(jobs[each])) for each in asked]
            return statuses, first_positions(left, answers), resolution

        extra_time = find_extra_time(len(children), sum(len(child.payload) for child in children))
        statuses, firsts, resolution = await self._pool.transaction(run_in_transaction, extra_time=extra_time)
        for queue, first in firsts.items():
            self._ready(queue, first)
        resolution.notify_committed(self._notifications, {f"queue:{queue}" for queue in firsts})
        return statuses

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        rows = await self._pool.fetch(self._sql["batch"], id=job_id) if is_id(job_id) else ()
        return BatchProgress(*rows[0]) if rows else None

    async def read_waits(self, job_id: str) -> JobWaits:
        if not is_id(job_id):
            return JobWaits(None, [], [])
        received = await self._pool.fetch(self._sql["receiver"], id=job_id)
        dependencies = await self._pool.fetch(self._sql["dependencies_of"], id=job_id, limit=waits.MAX_SHOWN)
        dependents = await self._pool.fetch(self._sql["dependents_of"], id=job_id, limit=waits.MAX_SHOWN)
        receivers = [
            ReceiverInfo(from_text(topic), from_text(step), since, until) for topic, step, since, until in received
        ]
        return JobWaits(receivers[0] if receivers else None, _infos(dependencies), _infos(dependents))


def _infos(rows: Rows) -> list[DependencyInfo]:
    return [
        DependencyInfo(job_id, Condition(condition), DependencyState(state), is_child)
        for job_id, condition, state, is_child in rows
    ]
