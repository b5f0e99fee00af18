"""Family ``queueing`` of PostgreSQL. Most calls are one statement. Due jobs, limits, several queues, dependencies and
failures take more."""

from __future__ import annotations

import asyncio
import functools
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import msgspec

from holdfast.core.errors import HoldfastError
from holdfast.core.job_logs import LogBatch
from holdfast.core.models import (
    Claim,
    ClaimByIds,
    ExpiredJob,
    JobState,
    Lease,
    NewJob,
    Reason,
    Settled,
    Settlement,
    Submitted,
)
from holdfast.core.workers import HeartbeatReply, LeaseStatus, WorkerCommand, WorkerHeartbeat
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.requests import HEARTBEAT_RETRY_SHARE, MIN_CLAIM_RATE
from holdfast.stores.common.server_store import wait_for_topics
from holdfast.stores.common.unconfirmed import UnconfirmedClaims
from holdfast.stores.postgres.claiming import ClaimAlternation, LockedDueBackoff, PostgresClaimBuilder, decode_or_end
from holdfast.stores.postgres.cursors import START, Cursors, QueuePosition, split_scan
from holdfast.stores.postgres.encoding import NumberedStatement, is_id, record_columns, span_us
from holdfast.stores.postgres.limits import LimitedClaims
from holdfast.stores.postgres.maintenance import end_expired
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool
from holdfast.stores.postgres.query import PostgresQuery
from holdfast.stores.postgres.settlement import Settling
from holdfast.stores.postgres.submission import first_positions, insert_batch, insert_dependent

MAX_PROMOTED = 1000
"""Due jobs made ready by one claim; more are made ready by the next."""
_MAX_QUEUES = 32  # queues of one statement
_NAMED, _BY_WILDCARD = True, False  # whether a claim names the queue: keys of the queues served last
_TRIES, _MOMENT = 5, 0.005  # how often, and after how many seconds, a claim scans again for what others promote
_LIMITED_CHECK_SECONDS = 0.05  # seconds for which claims reuse the result of a check for jobs under limits
_REFRESH = 1.0  # seconds the names of the queues with ready jobs are believed,
_UNNOTIFIED_REFRESH, _REFRESH_SHARE = 0.1, 0.05  # or, without notifications, so long; reading them takes this share
_CLAIMED_COLUMNS = 13  # columns of a claimed job, its place in the order included
_QUEUE = 2  # the column of its queue
NO_JOB = "00000000-0000-0000-0000-000000000000"
"""The id of no job, in place of an empty list, for which a planner may choose any partial index."""


class PostgresQueueing:
    """Family ``queueing`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        query: PostgresQuery,
        limit_cache: LimitCache,
    ) -> None:
        self._limit_cache = limit_cache
        self._limited = LimitedClaims(pool, statements)
        self._alternation = ClaimAlternation()
        self._locked_due = LockedDueBackoff()
        self._limited_checked_at = -_LIMITED_CHECK_SECONDS
        self._limited_check: tuple[set[str], bool] = (set(), False)  # queues, and whether they had jobs under limits
        self._pool, self._notifications = pool, notifications
        self._lock = notifications.ready_lock
        self._sql = statements
        self._query = query
        self._decode_or_end = functools.partial(decode_or_end, pool, notifications, statements)
        self._cursors = Cursors()
        self._ready_queues: list[str] = []  # queues that may have ready jobs, in their order
        self._ready_queues_read_at, self._refresh_seconds = -_REFRESH, 0.0
        self._last_queue = {_NAMED: "", _BY_WILDCARD: ""}  # that gave a job under no limit
        self._last_limited_queue = {_NAMED: "", _BY_WILDCARD: ""}  # the same for jobs under limits
        self._unconfirmed_claims = UnconfirmedClaims()
        self._settling = Settling(pool, statements, self._notify, limit_cache)
        notifications.on_queue = self._on_notification

    def note_ready(self, queue: str, first: QueuePosition = START) -> None:
        """This process made jobs of the queue ready, none in front of ``first``."""
        self._cursors.note_own_ready_jobs(queue, first)
        self._cache_queue(queue)

    def _on_notification(self, queue: str) -> None:
        """Notes that other processes made something ready in this queue ("*": in some queue)."""
        if queue == EVERY_QUEUE:
            self._ready_queues_read_at = -_REFRESH
            self._cursors.note_ready_jobs_elsewhere(None)
        else:
            self._cursors.note_ready_jobs_elsewhere(queue)
            self._cache_queue(queue)

    def _cache_queue(self, queue: str) -> None:
        position = bisect_right(self._ready_queues, queue)
        if not position or self._ready_queues[position - 1] != queue:
            self._ready_queues.insert(position, queue)

    def _notify(
        self,
        earliest: Mapping[str, QueuePosition],
        ended: Sequence[str] = (),
        *,
        needs_notify: bool = True,
        freed_queues: Collection[str] = (),
    ) -> None:
        for queue, first in earliest.items():
            self.note_ready(queue, first)
        topics = {f"queue:{queue}" for queue in (*earliest, *freed_queues)} | {f"due:{queue}" for queue in freed_queues}
        if needs_notify:
            self._notifications.notify_committed(topics, ended)
        else:
            self._notifications.waiters.wake_topics(topics)

    # ── submit ────────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        if not jobs:
            return []
        bound = await self._limit_cache.bind(jobs)
        extras = [job for job in bound if job.has_extras]
        if any(job.has_relations for job in extras):
            answers, resolution = await insert_dependent(self._sql, self._pool, bound)
            resolution.notify_committed(self._notifications)
            needs_notify = True
        else:
            answers, needs_notify = await insert_batch(self._sql, self._notifications, self._pool, bound, extras)
        self._notify(first_positions(jobs, answers), needs_notify=needs_notify)
        return answers

    # ── claim ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def claim(self, request: ClaimRequest) -> Claim:
        """Promotes due jobs, claims ready ones, and returns when the next job is due."""
        capacity = {queue: slots for queue, slots in request.capacity.items() if slots > 0}
        if request.ids is not None:
            return await self._claim_by_ids(request)
        if request.isolated:
            return await self._claim_quarantined(request, capacity)
        builder = PostgresClaimBuilder(request, capacity)
        builder.limited_first = self._alternation.limited_first
        receives_notifications = self._lock.is_held
        try:
            await self._claim_wanted(builder)
        except HoldfastError:
            if not builder.jobs:  # else their leases would be unknown until they expire; the next claim meets the error
                raise
            builder.has_jobs_left = True
        if builder.skips_locked_due:
            builder.note_next_due(self._locked_due.retry_in_us(builder.promotion_scope(builder.capacity)))
        self._alternation.note_claim(builder)
        self._lock.count_claim(found=bool(builder.jobs))
        return builder.to_claim(receives_notifications=receives_notifications)

    async def _claim_wanted(self, builder: PostgresClaimBuilder) -> None:
        await self._claim_from(builder, self._order(builder))
        if EVERY_QUEUE not in builder.capacity:
            return
        await self._claim_untried(builder)  # queues with jobs that this claim has promoted
        # An empty claim ends only after the cached list of queues was read anew; a busy process asks again at once.
        if self._stale or not (builder.jobs or (self._ready_queues and self._lock.is_polling)):
            await self._refresh()
            await self._claim_untried(builder)

    async def _claim_untried(self, builder: PostgresClaimBuilder) -> None:
        untried = [queue for queue in self._order(builder) if queue not in builder.tried]
        if untried:
            await self._claim_from(builder, untried)

    def _order(self, builder: PostgresClaimBuilder) -> list[str]:
        """Returns the queues to try, round robin: those named, and after them all others for the wildcard."""
        named = sorted(queue for queue in builder.capacity if queue != EVERY_QUEUE)
        ready = self._ready_queues if EVERY_QUEUE in builder.capacity else []
        others = [queue for queue in ready if queue not in builder.request.capacity]
        after = bisect_right(named, self._last_queue[_NAMED])
        after_others = bisect_right(others, self._last_queue[_BY_WILDCARD])
        return named[after:] + named[:after] + others[after_others:] + others[:after_others]

    async def _claim_from(self, builder: PostgresClaimBuilder, queues: list[str]) -> None:
        """Take from these queues until the claim is full. Without any, still scan for what falls due."""
        for batch in builder.split_queues(queues, _MAX_QUEUES):
            if not builder.wanted_jobs(batch) or (not batch and builder.has_scanned):
                continue
            await self._claim_promoted(builder, batch)

    async def _claim_promoted(self, builder: PostgresClaimBuilder, queues: list[str]) -> None:
        """Claims from these queues, after what is due in them was made ready. What is locked is passed over."""
        names = builder.promotion_scope(builder.capacity)
        if builder.promote:
            builder.skip_due_until = self._locked_due.skip_due_until(names)
        tries = 0
        while await self._claim_batch(builder, queues):
            promoted = await self._promote(builder)
            builder.promoted += promoted
            builder.due_in = None
            tries += 1
            if promoted:
                builder.promote = False
            elif tries == _TRIES or self._locked_due.are_known(names):
                builder.promote = False
                self._locked_due.note_locked(names, builder.claimed_at)
                builder.skip_due_until = self._locked_due.skip_due_until(names)
            else:  # another process is making them ready; taken in between, later jobs would go before them
                await asyncio.sleep(_MOMENT)
        if builder.promote and not builder.skips_locked_due:
            self._locked_due.note_none_due(builder.promotion_scope(queues))

    async def _claim_batch(self, builder: PostgresClaimBuilder, queues: list[str]) -> bool:
        """Claims from these queues; returns True if due jobs must be promoted first."""
        if builder.limited_first:
            if await self._claim_limited(builder, queues):
                return True
            if not builder.wanted_jobs(queues):
                return False
        builder.has_limited_jobs = False
        if await self._claim_unlimited(builder, queues):
            return True
        if builder.has_limited_jobs and not builder.limited_first and builder.wanted_jobs(queues):
            return await self._claim_limited(builder, queues)
        return False

    async def claim_limited(self, request: ClaimRequest) -> Claim | None:
        """Claims jobs under limits alone, for a transport; None if the latest claim saw none, or jobs are due."""
        builder = PostgresClaimBuilder(request, {name: slots for name, slots in request.capacity.items() if slots > 0})
        answered = self._alternation.has_seen_limits and await self._claim_all_limited(builder)
        return builder.to_claim() if answered else None

    async def _claim_all_limited(self, builder: PostgresClaimBuilder, tried: Sequence[str] | None = None) -> bool:
        queues = [queue for queue in self._order(builder) if queue not in (tried or ())]
        try:
            for batch in builder.split_queues(queues, _MAX_QUEUES):
                if batch and builder.wanted_jobs(batch) and await self._claim_limited(builder, batch):
                    return bool(builder.jobs)
            if tried is None and EVERY_QUEUE in builder.capacity and (not builder.jobs or self._stale):
                await self._refresh()  # before an empty answer
                return await self._claim_all_limited(builder, queues)
        except HoldfastError:
            if not builder.jobs:  # else their leases would be unknown until they expire
                raise
        return True

    async def _claim_limited(self, builder: PostgresClaimBuilder, queues: list[str]) -> bool:
        """Claims jobs under limits, for free runners alone; returns True if due jobs must be promoted first."""
        request, served = builder.request, self._last_limited_queue
        named = builder.capacity.keys()
        queues = sorted(queues, key=lambda queue: (queue not in named, queue <= served[queue in named], queue))
        max_jobs = min(builder.wanted_jobs(queues), builder.free_runners, builder.max_must_start)
        rows = await self._limited.claim(
            request,
            dict(zip(queues, builder.free_slots(queues), strict=True)),
            max(0, max_jobs),
            promote=builder.promote,
            skip_due_until=builder.skip_due_until,
            any_queue=EVERY_QUEUE in builder.capacity,
            on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
        )
        claimed_at, due, due_in, _, quarantined = rows[0][_CLAIMED_COLUMNS:]
        builder.claimed_at = claimed_at
        builder.has_quarantined = builder.has_quarantined or quarantined
        builder.note_next_due(due_in)
        taken = [] if rows[0][0] is None else rows
        jobs = await self._decode_or_end(taken, request.worker)
        builder.take_limited(jobs, claimed_at + (span_us(request.lease_for) or 0))
        self._settling.has_limited = self._settling.has_limited or bool(jobs)
        await self._release_unconfirmed(request, claimed_at)
        for row in taken:
            served[row[_QUEUE] in named] = row[_QUEUE]
        return bool(due)

    async def _claim_unlimited(self, builder: PostgresClaimBuilder, queues: list[str]) -> bool:
        """Runs one statement; returns True if due jobs must be promoted first."""
        request = builder.request
        slots = builder.free_slots(queues)
        positions = [self._cursors.start_position(queue) for queue in queues]
        max_jobs = builder.wanted_jobs(queues)
        at = time.monotonic()
        fetch = functools.partial(
            self._pool.fetch,
            on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
            extra_time=max_jobs / MIN_CLAIM_RATE,
            queues=queues,
            slots=slots,
            ranks=[position.rank for position in positions],
            run_ats=[position.run_at for position in positions],
            seqs=[position.seq for position in positions],
            any_queue=EVERY_QUEUE in builder.capacity,
            promote=builder.promote,
            skip_due_until=builder.skip_due_until,
            max_must_start=max(0, min(max_jobs, builder.max_must_start)),
            limit=max_jobs,
            worker=request.worker,
            lease_for=span_us(request.lease_for),
        )
        rows = await fetch(self._sql["claim"])
        if has_suspects := rows[0][-1]:
            rows = await fetch(self._sql["claim_with_suspects"])
        seconds = time.monotonic() - at
        due, due_in, until, quarantined, stopped_at_last_attempt, expired_now, _ = rows[0][_CLAIMED_COLUMNS:]
        builder.mark_scanned(queues)
        builder.claimed_at = until - (span_us(request.lease_for) or 0)
        builder.has_quarantined = builder.has_quarantined or quarantined
        builder.stopped_at_last_attempt = builder.stopped_at_last_attempt or stopped_at_last_attempt is not None
        builder.note_lease(until)
        builder.note_next_due(due_in)
        taken = rows[1:]
        builder.take(await self._decode_or_end(taken, request.worker))
        await self._check_limited(builder, queues, at_once=not taken and not self._lock.is_polling)
        expired, has_made_due = await self._end_expired() if expired_now else ((), False)
        builder.expired += expired
        await self._release_unconfirmed(request, builder.claimed_at)
        if due or (has_made_due and builder.promote and builder.wanted_jobs(queues)):
            return True
        for queue, scan in split_scan(queues, slots, positions, taken, max_jobs, at, seconds):
            self._cursors.note_scan(queue, scan)
            builder.note_jobs_left(some=scan.full or scan.start != START)
        builder.note_jobs_left(some=has_suspects or len(taken) >= max_jobs)  # suspects for which no runner was free
        self._note_served(builder, queues, {row[_QUEUE] for row in taken} | ({stopped_at_last_attempt} - {None}))
        if not taken and any(position != START for position in positions):
            return await self._claim_unlimited(builder, queues)  # behind the cursors there is nothing: from the start
        return False

    def _note_served(self, builder: PostgresClaimBuilder, queues: list[str], served: Collection[str]) -> None:
        for queue in sorted(served, key=queues.index):
            self._last_queue[queue in builder.capacity] = queue

    async def _check_limited(self, builder: PostgresClaimBuilder, queues: list[str], *, at_once: bool) -> None:
        """Notes whether there are jobs under limits. The answer is cached for a moment, unless it was no and the
        claim found nothing else: a question with each claim would cost some per cent."""
        now, asked, (seen_in, was_seen) = time.monotonic(), set(queues), self._limited_check
        if (at_once and not was_seen) or now - self._limited_checked_at > _LIMITED_CHECK_SECONDS or seen_in != asked:
            ((seen,),) = await self._pool.fetch(self._sql["any_limited"], queues=queues)
            self._limited_checked_at, self._limited_check = now, (asked, seen)
        builder.has_limited_jobs = builder.has_limited_jobs or self._limited_check[1]
        builder.has_seen_limits = builder.has_seen_limits or builder.has_limited_jobs

    async def _release_unconfirmed(self, request: ClaimRequest, claimed_at: int) -> None:
        """Releases jobs of claims whose response was lost: those that this worker claimed after the last answered claim
        and before this one. None of them has started."""
        worker = request.worker
        if request.shared_worker_id:
            return
        since = self._unconfirmed_claims.unconfirmed_since(worker)
        self._unconfirmed_claims.mark_answered(worker, claimed_at)
        if since is None:
            return
        try:
            rows = await self._pool.fetch(self._sql["claimed_between"], worker=worker, since=since, before=claimed_at)
            released = [
                Settlement(job_id=job_id, claims=claims, state=JobState.QUEUED, reason=Reason.RELEASED, refund=True)
                for job_id, claims in rows
            ]
            if released:
                await self.settle(released)
        except HoldfastError:  # their leases expire anyway; the jobs of this claim must not be lost
            return

    async def _end_expired(self) -> tuple[tuple[ExpiredJob, ...], bool]:
        """Expires jobs that a claim skipped. Returns them, and True if that made jobs due that waited for them."""
        try:
            expired_now = await end_expired(self._pool, self._notifications, self._sql, limit=MAX_PROMOTED)
        except HoldfastError:  # a sweep expires them; the jobs of this claim must not be lost
            return (), False
        return tuple(expired_now.ended), expired_now.has_made_due

    async def _promote(self, builder: PostgresClaimBuilder) -> int:
        if EVERY_QUEUE in builder.capacity:
            rows = await self._pool.fetch(self._sql["promote_any_queue"], limit=MAX_PROMOTED)
        else:
            rows = await self._pool.fetch(
                self._sql["promote_queues"], queues=list(builder.capacity), limit=MAX_PROMOTED
            )
        for queue, rank, run_at, _ in rows:
            self.note_ready(queue, QueuePosition(rank, run_at, 0))
        return len(rows)

    @property
    def _stale(self) -> bool:
        seconds = _REFRESH
        if not self._lock.is_held:
            seconds = min(_REFRESH, max(_UNNOTIFIED_REFRESH, self._refresh_seconds / _REFRESH_SHARE))
        return time.monotonic() - self._ready_queues_read_at > seconds

    async def _refresh(self) -> None:
        started = time.monotonic()
        rows = await self._pool.fetch(self._sql["ready_queues"])
        self._ready_queues = [queue for (queue,) in rows]
        self._ready_queues_read_at = time.monotonic()
        self._refresh_seconds = self._ready_queues_read_at - started

    async def _claim_quarantined(self, request: ClaimRequest, capacity: Mapping[str, int]) -> Claim:
        queues = [queue for queue in capacity if queue != EVERY_QUEUE]
        if EVERY_QUEUE in capacity:
            await self._refresh()
            queues += [queue for queue in self._ready_queues if queue not in request.capacity]
        rows = await self._pool.fetch(
            self._sql["claim_quarantined"],
            on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
            queues=queues,
            worker=request.worker,
            lease_for=span_us(request.lease_for),
        )
        if not rows:
            builder = PostgresClaimBuilder(msgspec.structs.replace(request, limit=1, promote=False), capacity)
            await self._claim_limited(builder, queues)
            return builder.to_claim()
        await self._release_unconfirmed(request, rows[0][_CLAIMED_COLUMNS] - (span_us(request.lease_for) or 0))
        return Claim(jobs=await self._decode_or_end(rows, request.worker), lease_until_us=rows[0][_CLAIMED_COLUMNS])

    async def claim_ids(self, request: ClaimRequest) -> ClaimByIds:
        capacity = {queue: slots for queue, slots in request.capacity.items() if queue != EVERY_QUEUE}
        ids = list(request.ids or ())
        rows = await self._pool.fetch(
            self._sql["claim_ids"],
            on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
            extra_time=request.limit / MIN_CLAIM_RATE,
            ids=ids or [NO_JOB],
            queues=list(capacity),
            slots=list(capacity.values()),
            others=request.capacity.get(EVERY_QUEUE, 0),
            any_queue=EVERY_QUEUE in request.capacity,
            max_tier=2 if request.isolated else 1,
            max_must_start=1 << 30 if request.isolated else request.max_must_start,
            limit=1 if request.isolated else request.limit,
            worker=request.worker,
            lease_for=span_us(request.lease_for),
        )
        due_in, until, quarantined, left, queues, paused, stopped_at_last_attempt, has_seen_limits, expired_now = rows[
            0
        ][_CLAIMED_COLUMNS:]
        self._alternation.has_seen_limits = has_seen_limits
        await self._release_unconfirmed(request, until - (span_us(request.lease_for) or 0))
        jobs = await self._decode_or_end([] if rows[0][0] is None else rows, request.worker)
        expired, has_made_due = await self._end_expired() if expired_now else ((), False)
        due_in = 0 if has_made_due else due_in
        claim = Claim(
            jobs=jobs,
            refused=len(ids) - len(jobs) - len(left),
            next_due=None if due_in is None else timedelta(microseconds=max(0, due_in)),
            has_quarantined=quarantined,
            stopped_at_last_attempt=stopped_at_last_attempt,
            lease_until_us=until if jobs else None,
            expired=expired,
        )
        return ClaimByIds(claim, dict(zip(left, queues, strict=True)), frozenset(paused))

    async def _claim_by_ids(self, request: ClaimRequest) -> Claim:
        """Claims jobs by ids that no transport delivered: ready ones that are not claimed count as refused."""
        named = msgspec.structs.replace(request, ids=list(dict.fromkeys(filter(is_id, request.ids or ()))))
        if request.promote:
            await self._pool.fetch(self._sql["promote_ids"], ids=list(named.ids or ()))
        delivered = await self.claim_ids(named)
        return msgspec.structs.replace(delivered.claim, refused=len(request.ids or ()) - len(delivered.claim.jobs))

    # ── settle ────────────────────────────────────────────────────────────────────────────────────────────────
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Apply what is still guarded; refused settlements get the job's state."""
        return await self._settling.settle(settlements) if settlements else []

    # ── log lines ─────────────────────────────────────────────────────────────────────────────────────────────
    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        possible = [each for each in records if is_id(each.lease.job_id)]
        if len(possible) < len(records):
            are_stored = iter(await self.append_logs(possible))
            return [is_id(each.lease.job_id) and next(are_stored) for each in records]
        rows = await self._pool.fetch(self._sql["append_logs"], **record_columns(records))
        stored = {ordinal for (ordinal,) in rows}
        return [ordinal in stored for ordinal in range(1, len(records) + 1)]

    # ── heartbeat ─────────────────────────────────────────────────────────────────────────────────────────────
    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        rows = await self._pool.fetch(
            self._sql["heartbeat"],
            retry_for=HEARTBEAT_RETRY_SHARE * lease_for.total_seconds(),
            ids=[lease.job_id for lease in leases],
            claims=[lease.claims for lease in leases],
            lease_for=span_us(lease_for),
            alive_for=span_us(heartbeat.alive_for(lease_for)),
            has_deltas=heartbeat.has_deltas,
            **heartbeat.to_row(),
        )
        statuses = [LeaseStatus(status) for _, status in rows if status is not None]
        return HeartbeatReply(statuses=statuses, command=WorkerCommand(rows[0][0]))

    async def deregister(self, worker: str) -> None:
        await self._pool.fetch(self._sql["delete_worker"], worker=worker)

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        await wait_for_topics(self._notifications, self._query.any_finished, topics, timeout)
