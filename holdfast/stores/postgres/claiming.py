"""Builder of a claim: which queues it has tried, and what it may still take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.requests import remaining_slots


class PostgresClaimBuilder:
    """Builds a claim from the rows of its statements."""

    def __init__(self, request: ClaimRequest, capacity: Mapping[str, int]) -> None:
        self.request = request
        self.capacity = capacity
        self._slots = dict(capacity)
        self.max_must_start = request.max_must_start
        self.free_runners = request.free_runners
        self.limited = False  # there are jobs under limits in the queues just tried
        self.limits_seen = False  # in any of the queues
        self.limited_first = False
        self.began_limited = False  # the first of the jobs is under limits
        self.promote = request.promote
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self.tried: list[str] = []
        self.promoted = 0
        self.quarantined = self.stopped_at_last_attempt = False
        self.has_scanned = False
        self.jobs_left = False  # ready jobs may be left in the wanted queues
        self.until_us: int | None = None
        self.due_in: int | None = None

    def split_queues(self, queues: list[str], size: int) -> list[list[str]]:
        """Returns the queues by statement, unlisted ones apart if they share few slots; without any an empty batch."""
        is_shared = self.capacity.get(EVERY_QUEUE, 0) < self.request.limit
        named = sum(queue in self.capacity for queue in queues) if is_shared else len(queues)
        parts = (queues[:named], queues[named:])
        return [part[first : first + size] for part in parts for first in range(0, len(part), size)] or [[]]

    def free_slots(self, queues: Sequence[str]) -> list[int]:
        """Returns how many jobs of each of these queues are wanted still."""
        slots = self._slots
        return [slots.get(queue, slots.get(EVERY_QUEUE, 0)) for queue in queues]

    def wanted_jobs(self, queues: Sequence[str]) -> int:
        """Returns how many jobs of a batch of queues are wanted still."""
        slots = {queue if queue in self.capacity else EVERY_QUEUE for queue in queues} or self._slots
        return min(self.request.limit - len(self.jobs), sum(self._slots.get(name, 0) for name in slots))

    def take(self, jobs: list[Job]) -> None:
        """Adds jobs under no limit."""
        self._add(jobs)
        self.max_must_start -= sum(map(must_start_now, jobs))

    def take_limited(self, jobs: list[Job], until_us: int) -> None:
        """Jobs under limits start at once."""
        if jobs:
            self.began_limited = self.began_limited or not self.jobs
            self._add(jobs)
            self.max_must_start -= len(jobs)
            self.free_runners -= len(jobs)
            self.note_lease(until_us)

    def _add(self, jobs: list[Job]) -> None:
        self.jobs += jobs
        self._slots = remaining_slots(self._slots, (job.queue for job in jobs))

    def note_lease(self, until_us: int) -> None:
        """Notes the end of leases; the earliest counts."""
        self.until_us = until_us if not self.jobs or self.until_us is None else min(self.until_us, until_us)

    def note_next_due(self, due_in: int | None) -> None:
        """The next job of the queues just tried falls due in so many microseconds."""
        if due_in is not None:
            self.due_in = due_in if self.due_in is None else min(self.due_in, due_in)

    def mark_scanned(self, queues: Sequence[str]) -> None:
        """Records that a statement has scanned these queues."""
        self.has_scanned = True
        self.tried += queues

    def note_jobs_left(self, *, some: bool) -> None:
        """Notes whether a statement may have left ready jobs."""
        self.jobs_left = self.jobs_left or some

    def to_claim(self, *, receives_notifications: bool = False) -> Claim:
        """Returns the result of the claim. ``receives_notifications``: of each job that becomes ready."""
        jobs_left = self.jobs_left or self.limits_seen or self.quarantined or self.stopped_at_last_attempt
        return Claim(
            jobs=self.jobs,
            promoted=self.promoted,
            next_due=None if self.due_in is None else timedelta(microseconds=max(0, self.due_in)),
            quarantined=self.quarantined,
            stopped_at_last_attempt=self.stopped_at_last_attempt,
            none_left=receives_notifications and self.has_scanned and not jobs_left,
            lease_until_us=self.until_us,
            expired=self.expired,
        )


class ClaimAlternation:
    """Alternation of claims between jobs under limits and jobs under no limit, while there are both."""

    def __init__(self) -> None:
        self.limits_seen = False
        """The latest claim saw jobs under limits."""
        self._was_limited = True

    @property
    def limited_first(self) -> bool:
        """Returns True if the next claim begins with jobs under limits."""
        return self.limits_seen and not self._was_limited

    def note_claim(self, claiming: PostgresClaimBuilder) -> None:
        """Notes what a claim found, and what it began with."""
        if claiming.jobs:
            self._was_limited = claiming.began_limited
        if claiming.has_scanned or claiming.jobs:
            self.limits_seen = claiming.limits_seen or claiming.began_limited
