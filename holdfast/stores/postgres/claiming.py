"""Builder of a claim: queues it has tried, jobs it may still take. And the locked due jobs that claims skip."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.requests import UNREADABLE, remaining_slots
from holdfast.stores.postgres.dependencies import read_resolution
from holdfast.stores.postgres.encoding import NumberedStatement, claimed_job, to_text
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool, Rows

SKIP_NO_DUE = -1  # ``skip_due_until`` of a claim that skips no due jobs


class PostgresClaimBuilder:
    """Builds a claim from the rows of its statements."""

    def __init__(self, request: ClaimRequest, capacity: Mapping[str, int]) -> None:
        self.request = request
        self.capacity = capacity
        self._slots = dict(capacity)
        self.max_must_start = request.max_must_start
        self.free_runners = request.free_runners
        self.has_limited_jobs = False  # there are jobs under limits in the queues just tried
        self.has_seen_limits = False  # in any of the queues
        self.limited_first = False
        self.began_limited = False  # the first of the jobs is under limits
        self.promote = request.promote
        self.skip_due_until = SKIP_NO_DUE
        self.claimed_at = 0  # the instant of the latest statement
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self.tried: list[str] = []
        self.promoted = 0
        self.has_quarantined = self.stopped_at_last_attempt = False
        self.has_scanned = False
        self.has_jobs_left = False  # ready jobs may be left in the wanted queues
        self.lease_until_us: int | None = None
        self.due_in: int | None = None

    def split_queues(self, queues: list[str], size: int) -> list[list[str]]:
        """Returns the queues by statement, unlisted ones apart if they share few slots; without any an empty batch."""
        is_shared = self.capacity.get(EVERY_QUEUE, 0) < self.request.limit
        named = sum(queue in self.capacity for queue in queues) if is_shared else len(queues)
        parts = (queues[:named], queues[named:])
        return [part[first : first + size] for part in parts for first in range(0, len(part), size)] or [[]]

    @property
    def skips_locked_due(self) -> bool:
        """Returns True if the claim skips due jobs, which other transactions have locked."""
        return self.skip_due_until != SKIP_NO_DUE

    def promotion_scope(self, queues: Iterable[str]) -> list[str]:
        """Returns these queues, or the wildcard, if the claim promotes due jobs of all queues."""
        return [EVERY_QUEUE] if EVERY_QUEUE in self.capacity else list(queues)

    def free_slots(self, queues: Sequence[str]) -> list[int]:
        """Returns how many jobs of each of these queues the claim may still take."""
        slots = self._slots
        return [slots.get(queue, slots.get(EVERY_QUEUE, 0)) for queue in queues]

    def wanted_jobs(self, queues: Sequence[str]) -> int:
        """Returns how many jobs of a batch of queues the claim may still take."""
        slots = {queue if queue in self.capacity else EVERY_QUEUE for queue in queues} or self._slots
        return min(self.request.limit - len(self.jobs), sum(self._slots.get(name, 0) for name in slots))

    def take(self, jobs: list[Job]) -> None:
        """Adds jobs under no limit."""
        self._add(jobs)
        self.max_must_start -= sum(map(must_start_now, jobs))

    def take_limited(self, jobs: list[Job], lease_until_us: int) -> None:
        """Adds jobs under limits: each starts at once, so it takes a free runner."""
        if jobs:
            self.began_limited = self.began_limited or not self.jobs
            self._add(jobs)
            self.max_must_start -= len(jobs)
            self.free_runners -= len(jobs)
            self.note_lease(lease_until_us)

    def _add(self, jobs: list[Job]) -> None:
        self.jobs += jobs
        self._slots = remaining_slots(self._slots, (job.queue for job in jobs))

    def note_lease(self, until_us: int) -> None:
        """Notes the end of leases; the earliest counts."""
        self.lease_until_us = min(until_us, self.lease_until_us or until_us) if self.jobs else until_us

    def note_next_due(self, due_in: int | None) -> None:
        """Notes that the next job of these queues is due in ``due_in`` microseconds."""
        if due_in is not None:
            self.due_in = due_in if self.due_in is None else min(self.due_in, due_in)

    def mark_scanned(self, queues: Sequence[str]) -> None:
        """Records that a statement has scanned these queues."""
        self.has_scanned = True
        self.tried += queues

    def note_jobs_left(self, *, some: bool) -> None:
        """Notes whether a statement may have left ready jobs."""
        self.has_jobs_left = self.has_jobs_left or some

    def to_claim(self, *, receives_notifications: bool = False) -> Claim:
        """Returns the result of the claim. ``receives_notifications``: this process is notified of each ready job."""
        jobs_left = self.has_jobs_left or self.has_seen_limits or self.has_quarantined or self.stopped_at_last_attempt
        return Claim(
            jobs=self.jobs,
            promoted=self.promoted,
            next_due=None if self.due_in is None else timedelta(microseconds=max(0, self.due_in)),
            has_quarantined=self.has_quarantined,
            stopped_at_last_attempt=self.stopped_at_last_attempt,
            none_left=receives_notifications and self.has_scanned and not jobs_left,
            lease_until_us=self.lease_until_us,
            expired=self.expired,
        )


_PAUSE, _MAX_PAUSE = 0.5, 2.0  # seconds for which claims pass over locked jobs


class _Locked(NamedTuple):
    due_until: int  # jobs of the queue that were due at this instant are locked
    retry_at: float
    pause: float


class LockedDueBackoff:
    """Due jobs that other transactions have locked, so that no promotion makes them ready. Claims pass over them for a
    pause, and promote those alone that have fallen due since."""

    def __init__(self) -> None:
        self._locked: dict[str, _Locked] = {}

    def skip_due_until(self, names: Sequence[str]) -> int:
        """Returns the instant up to which a claim of these queues passes over due jobs."""
        found, now = [self._locked.get(name) for name in names], time.monotonic()
        passed_over = [each.due_until for each in found if each is not None and each.retry_at > now]
        return min(passed_over) if passed_over and len(passed_over) == len(names) else SKIP_NO_DUE

    def are_known(self, names: Iterable[str]) -> bool:
        """Returns True if due jobs of all of these queues were found locked before."""
        return all(name in self._locked for name in names)

    def note_locked(self, names: Iterable[str], due_until: int) -> None:
        """Notes that a promotion made none of the jobs ready that were due at this instant."""
        now = time.monotonic()
        for name in names:
            before = self._locked.get(name)
            if before is not None and before.retry_at > now:  # those that have fallen due since are locked too
                self._locked[name] = before._replace(due_until=max(due_until, before.due_until))
            else:
                pause = _PAUSE if before is None else min(2 * before.pause, _MAX_PAUSE)
                self._locked[name] = _Locked(due_until, now + pause, pause)

    def note_none_due(self, names: Iterable[str]) -> None:
        """Notes that a claim that passed over none found nothing due."""
        for name in names:
            self._locked.pop(name, None)

    def retry_in_us(self, names: Iterable[str]) -> int:
        """Returns microseconds until a claim tries the first of the locked jobs again."""
        retry_at = min((self._locked[name].retry_at for name in names if name in self._locked), default=0.0)
        return max(0, round(1e6 * (retry_at - time.monotonic())))


class ClaimAlternation:
    """Alternation of claims between jobs under limits and jobs under no limit, while there are both."""

    def __init__(self) -> None:
        self.has_seen_limits = False
        """The latest claim saw jobs under limits."""
        self._was_limited = True

    @property
    def limited_first(self) -> bool:
        """Returns True if the next claim begins with jobs under limits."""
        return self.has_seen_limits and not self._was_limited

    def note_claim(self, builder: PostgresClaimBuilder) -> None:
        """Notes what a claim found, and what it began with."""
        if builder.jobs:
            self._was_limited = builder.began_limited
        if builder.has_scanned or builder.jobs:
            self.has_seen_limits = builder.has_seen_limits or builder.began_limited


async def decode_or_end(
    pool: PostgresPool,
    notifications: PostgresNotifications,
    statements: Mapping[str, NumberedStatement],
    rows: Rows,
    worker: str,
) -> list[Job]:
    """Returns the readable jobs. One that another program corrupted becomes dead, and blocks no queue."""
    try:
        return [claimed_job(row, worker) for row in rows]
    except UNREADABLE:
        jobs = []
        for row in rows:
            try:
                jobs.append(claimed_job(row, worker))
            except UNREADABLE as error:
                text = to_text(f"the stored job cannot be read: {error}")
                resolved = await pool.fetch(statements["mark_unreadable"], id=row[0], claims=row[4], error=text)
                read_resolution(resolved).notify_committed(notifications)
        return jobs
