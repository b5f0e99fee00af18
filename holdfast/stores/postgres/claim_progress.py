"""Progress of a claim through its queues."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest


class ClaimProgress:
    """A claim's progress through its queues."""

    def __init__(self, request: ClaimRequest, capacity: Mapping[str, int]) -> None:
        self.request = request
        self.capacity = capacity
        self.max_must_start = request.max_must_start
        self.idle = request.idle
        self.limited = False  # there are jobs under limits in the queues just tried
        self.limits_seen = False  # in any of the queues
        self.limited_first = False
        self.promote = request.promote
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self.tried: list[str] = []
        self.promoted = 0
        self.quarantined = self.stopped_at_last_attempt = False
        self.looked = False
        self.until_us: int | None = None
        self.due_in: int | None = None

    @property
    def full(self) -> bool:
        """Returns True if the claim has all it asked for."""
        return len(self.jobs) >= self.request.limit

    def wanted_slots(self, queue: str) -> int:
        """Returns the number of wanted jobs of this queue."""
        return self.capacity.get(queue, self.capacity.get(EVERY_QUEUE, 0))

    def free_slots(self, queue: str) -> int:
        """Returns the number of wanted jobs of this queue that it has not brought yet."""
        return self.wanted_slots(queue) - sum(job.queue == queue for job in self.jobs)

    def take(self, jobs: list[Job]) -> None:
        """Adds plain jobs."""
        self.jobs += jobs
        self.max_must_start -= sum(map(must_start_now, jobs))

    def take_limited(self, jobs: list[Job], until_us: int) -> None:
        """Jobs under limits start at once."""
        if jobs:
            self.jobs += jobs
            self.max_must_start -= len(jobs)
            self.idle -= len(jobs)
            self.note_lease(until_us)

    def note_lease(self, until_us: int) -> None:
        """Notes the end of leases; the earliest counts."""
        self.until_us = until_us if not self.jobs or self.until_us is None else min(self.until_us, until_us)

    def fall_due(self, due_in: int | None) -> None:
        """The next job of the queues just tried falls due in so many microseconds."""
        if due_in is not None:
            self.due_in = due_in if self.due_in is None else min(self.due_in, due_in)

    def to_claim(self) -> Claim:
        """Returns the result of the claim."""
        return Claim(
            jobs=self.jobs,
            promoted=self.promoted,
            next_due=None if self.due_in is None else timedelta(microseconds=max(0, self.due_in)),
            quarantined=self.quarantined,
            stopped_at_last_attempt=self.stopped_at_last_attempt,
            lease_until_us=self.until_us,
            expired=self.expired,
        )
