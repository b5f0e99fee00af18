"""Settlement of attempts. One statement for a batch's successes, another for failures that change a
priority, one for everything else, and one for jobs on which others depend: it resolves their dependencies too.

A settlement waits for no other transaction: the statements give up a locked row within moments, and then the rest of
the batch goes on without it. A settlement that was applied, and whose answer was lost, is recognized when it is sent
again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from holdfast.core.errors import HoldfastError
from holdfast.core.limits import split_bucket, split_partition
from holdfast.core.models import TERMINAL, JobState, Settled, Settlement
from holdfast.stores.base import EVERY_QUEUE
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.common.requests import find_extra_time
from holdfast.stores.common.unconfirmed import RecordedOutcome, UnconfirmedSettlements, accepted_as
from holdfast.stores.postgres.cursors import END, START, QueuePosition
from holdfast.stores.postgres.dependencies import NOTHING_RESOLVED, Resolution, read_resolution
from holdfast.stores.postgres.encoding import NumberedStatement, from_text, settlement_columns, text_or_none
from holdfast.stores.postgres.pool import PostgresPool, RowLocked, Rows

_REMEMBERED = 10_000  # jobs that were locked; their settlers retry within a second
_job_id = attrgetter("job_id")


class Settling:
    """The verb ``settle``. ``notify`` receives queues with ready jobs, and jobs that ended."""

    def __init__(
        self,
        pool: PostgresPool,
        statements: Mapping[str, NumberedStatement],
        notify: Callable[..., None],
        limit_cache: LimitCache,
    ) -> None:
        self._limit_cache = limit_cache
        self.has_limited = False
        """True once this process has claimed jobs under limits."""
        self._pool = pool
        self._sql = statements
        self._notify = notify
        self._unconfirmed = UnconfirmedSettlements()
        self._locked: set[str] = set()  # jobs that other transactions had locked when they were to be settled

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Apply settlements whose lease and state still match; refused ones get the job's state."""
        ids = [each.job_id for each in settlements]
        if len(set(ids)) < len(ids):
            return await self._settle_in_rounds(settlements)
        answers: dict[str, Settled] = {}
        ordered = sorted(settlements, key=_job_id)  # the order in which every statement locks rows
        try:
            locked = await self._settle_unlocked(ordered, answers)
            if len(answers) < len(ordered):
                locked |= await self._settle_with_dependents(
                    [each for each in ordered if each.job_id not in answers and each.job_id not in locked], answers
                )
            if len(answers) < len(ordered):
                await self._answer_refused([each for each in ordered if each.job_id not in answers], locked, answers)
        except HoldfastError:
            self._unconfirmed.add(
                [each for each in ordered if each.job_id in answers]
            )  # their answers are not returned
            raise
        self._unconfirmed.mark_answered(ordered)
        return [answers[job_id] for job_id in ids]

    async def _settle_in_rounds(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Several for one job, as after a crash: each job once a round."""
        answers: dict[int, Settled] = {}
        left = dict(enumerate(settlements))
        while left:
            index_by_id = {each.job_id: index for index, each in reversed(left.items())}  # the first of each job
            indexes = sorted(index_by_id.values())
            settled = await self.settle([left.pop(index) for index in indexes])
            answers.update(zip(indexes, settled, strict=True))
        return [answers[index] for index in range(len(settlements))]

    async def _settle_unlocked(self, ordered: Sequence[Settlement], answers: dict[str, Settled]) -> set[str]:
        """Settles all but those that other transactions have locked; returns the ids of these."""
        locked: set[str] = set()
        if self._locked:  # does not wait again for rows that were locked before
            locked = await self._still_locked([each.job_id for each in ordered if each.job_id in self._locked])
        try:
            await self._settle_independent([each for each in ordered if each.job_id not in locked], answers)
        except RowLocked:
            locked = await self._still_locked([each.job_id for each in ordered if each.job_id not in answers])
            free = [each for each in ordered if each.job_id not in answers and each.job_id not in locked]
            await self._settle_independent(free, answers)
        return locked

    async def _still_locked(self, job_ids: Sequence[str]) -> set[str]:
        """Returns the jobs that are locked by other transactions, or gone."""
        rows = await self._pool.fetch(self._sql["unlocked"], ids=job_ids) if job_ids else []
        locked = set(job_ids).difference(job_id for (job_id,) in rows)
        if len(self._locked) > _REMEMBERED:
            self._locked.clear()
        self._locked.difference_update(job_ids)
        self._locked |= locked
        return locked

    async def _settle_independent(self, batch: Sequence[Settlement], answers: dict[str, Settled]) -> None:
        simple: defaultdict[str | None, list[Settlement]] = defaultdict(list)  # by worker: mostly one
        rest, prioritized = [], []
        for each in batch:
            if each.state is JobState.SUCCEEDED and not each.lease_expired:
                simple[each.worker].append(each)
            elif each.priority is not None:
                prioritized.append(each)
            else:
                rest.append(each)
        for worker, of_worker in simple.items():
            await self._settle_simple(worker, of_worker, answers)
        if prioritized:
            await self._settle_reprioritized(prioritized, answers)
        if rest:
            await self._record_rows(rest, await self._fetch_settled("settle_rest", rest), NOTHING_RESOLVED, answers)

    async def _settle_simple(self, worker: str | None, batch: list[Settlement], answers: dict[str, Settled]) -> None:
        results = [text_or_none(each.result) for each in batch]
        with_queues = self.has_limited  # a claim may change it meanwhile
        rows = await self._pool.fetch(
            self._sql["settle_limited_succeeded" if with_queues else "settle_succeeded"],
            on_uncertain=lambda: self._unconfirmed.add(batch),
            extra_time=find_extra_time(len(batch), sum(len(each.result or "") for each in batch)),
            ids=[each.job_id for each in batch],
            claims=[each.claims for each in batch],
            worker=worker,
            results=results if any(results) else None,  # an array of nulls costs as much as one of texts
        )
        if len(rows) < len(batch):
            taken = {row[0] for row in rows}
            batch = [each for each in batch if each.job_id in taken]
        for each in batch:
            answers[each.job_id] = Settled(each.job_id, each.claims, True, JobState.SUCCEEDED)
        freed_queues = await self._queues_with_room([row[1:] for row in rows]) if with_queues else set()
        self._notify({}, [each.job_id for each in batch], freed_queues=freed_queues)

    async def _settle_reprioritized(self, batch: list[Settlement], answers: dict[str, Settled]) -> None:
        ranks = [-each.priority for each in batch if each.priority is not None]
        rows = await self._fetch_settled("settle_reprioritized", batch, ranks=ranks)
        await self._record_rows(batch, rows, NOTHING_RESOLVED, answers)

    async def _settle_with_dependents(self, batch: list[Settlement], answers: dict[str, Settled]) -> set[str]:
        """Settles those of the rest that others depend on. Returns those that a locked row prevents."""
        locked: set[str] = set()
        try:
            await self._settle_and_resolve(batch, answers)
        except RowLocked:
            locked = await self._still_locked([each.job_id for each in batch])
            try:
                await self._settle_and_resolve([each for each in batch if each.job_id not in locked], answers)
            except RowLocked:  # a dependent of a dependent
                locked = {each.job_id for each in batch}
        return locked

    async def _settle_and_resolve(self, batch: list[Settlement], answers: dict[str, Settled]) -> None:
        if not batch:
            return
        rows = await self._fetch_settled("settle_with_dependents", batch)
        resolution = read_resolution((row[3], row[5]) for row in rows if row[0] is None)
        await self._record_rows(batch, [row[:5] for row in rows if row[0] is not None], resolution, answers)

    async def _fetch_settled(self, name: str, batch: list[Settlement], **columns: list[int]) -> Rows:
        return await self._pool.fetch(
            self._sql[name],
            on_uncertain=lambda: self._unconfirmed.add(batch),
            extra_time=find_extra_time(len(batch), sum(len(each.result or "") for each in batch)),
            **settlement_columns(batch) | columns,
        )

    async def _record_rows(
        self, batch: Sequence[Settlement], rows: Rows, resolution: Resolution, answers: dict[str, Settled]
    ) -> None:
        ended: list[str] = [*resolution.ended]
        earliest: dict[str, QueuePosition] = {}
        for ordinal, code, run_at, queue, _ in rows:
            each, state = batch[ordinal - 1], STATES[code]
            answers[each.job_id] = Settled(each.job_id, each.claims, True, state, run_at)
            if state in TERMINAL:
                ended.append(each.job_id)
            elif state is JobState.QUEUED:
                earliest[queue] = START  # given back, to any place
            else:
                earliest.setdefault(queue, END)  # not ready yet; workers that sleep until the next due job must know
        freed_queues = resolution.queues | await self._queues_with_room([row[3:] for row in rows])
        self._notify(earliest, ended, freed_queues=freed_queues)

    async def _queues_with_room(self, partitions: Sequence[Sequence[str | None]]) -> set[str]:
        """Queues in which ended jobs made room, by queues and partitions. A limit of a task holds in every queue."""
        freed = {(queue, partition) for queue, partition in partitions if queue and partition}
        if not freed:
            return set()
        try:
            table = await self._limit_cache.current_limits()
        except HoldfastError:  # the jobs have ended all the same
            return {EVERY_QUEUE}
        if not table.has_tasks:
            return {queue for queue, _ in freed}
        queues = set()
        for queue, partition in freed:
            found = [table.limits.get(split_bucket(bucket)[0]) for bucket in split_partition(from_text(partition))]
            has_task = any(limit is not None and limit.task is not None for limit in found)
            queues.add(EVERY_QUEUE if has_task else queue)
        return queues

    # ── what was not applied ──────────────────────────────────────────────────────────────────────────────────
    async def _answer_refused(
        self, refused: Sequence[Settlement], locked: Collection[str], answers: dict[str, Settled]
    ) -> None:
        """Answers refused settlements. Some were applied by an earlier call whose answer was lost."""
        rows = await self._pool.fetch(
            self._sql["recorded_outcomes"],
            ids=[each.job_id for each in refused],
            claims=[each.claims for each in refused],
        )
        ended = []
        for ordinal, *row in rows:
            each, recorded = refused[ordinal - 1], _recorded_outcome(*row)
            state = accepted_as(each, recorded) if each in self._unconfirmed else None
            if state is None:
                is_locked = each.job_id in locked and recorded.is_running(each.claims)
                answers[each.job_id] = Settled(each.job_id, each.claims, False, recorded.state, locked=is_locked)
                continue
            run_at = recorded.run_at if state is JobState.FAILED and recorded.claims == each.claims else None
            answers[each.job_id] = Settled(each.job_id, each.claims, True, state, run_at)
            if state in TERMINAL:
                ended.append(each.job_id)
        self._notify({}, ended)


def _recorded_outcome(
    state: int | None, claims: int | None, run_at: int | None, attempt_state: int | None, *texts: str | None
) -> RecordedOutcome:
    reason, error = texts
    return RecordedOutcome(
        None if state is None else STATES[state],
        claims,
        run_at,
        None if attempt_state is None else STATES[attempt_state],
        reason,
        None if error is None else from_text(error),
    )
