"""Progress of claims through their scripts."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.encoding import decode_text

PIECE = 200
"""Jobs one script handles: about 2 ms, for which all others wait."""
_PROMOTE_ROUNDS = 5  # scripts a claim spends on what is due before it takes regardless
_MAX_LOOKS = 100  # scripts a claim spends on ids that cannot be claimed any more
_MAX_LIMITED_LOOKS = 3  # the same, on partitions without room


class DeliveryProgress:
    """Progress of a claim of delivered ids through its scripts."""

    def __init__(self, request: ClaimRequest) -> None:
        self._request = request
        self._slots = dict(request.capacity)
        self._star = self._slots.pop(EVERY_QUEUE, None)
        self._startable = 1 << 30 if request.isolated else request.max_must_start
        self.stopped_at_last_attempt = False
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self._until_us: int | None = None

    def script_arguments(self) -> list[Argument]:
        """Returns the arguments of the next script."""
        request = self._request
        return [
            (1 if request.isolated else request.limit) - len(self.jobs),
            1 << 30 if request.isolated else min(1, self._startable),
            int(request.promote),
            "" if self._star is None else self._star,
            self._startable,
            len(self._slots),
            *(argument for pair in self._slots.items() for argument in pair),
        ]

    def take(self, jobs: list[Job], until_us: int, *, stopped_at_last_attempt: bool) -> None:
        """Note a script's answer."""
        self._until_us = until_us
        self.stopped_at_last_attempt = stopped_at_last_attempt
        self._startable = max(0, self._startable - sum(map(must_start_now, jobs)))
        self.jobs += jobs
        for job in jobs:
            if job.queue in self._slots:
                self._slots[job.queue] -= 1
            elif self._star is not None:
                self._star -= 1

    def claim(self, delivered: int) -> Claim:
        refused = delivered - len(self.jobs)
        return Claim(
            jobs=self.jobs,
            refused=refused,
            stopped_at_last_attempt=self.stopped_at_last_attempt,
            lease_until_us=self._until_us,
            expired=self.expired,
        )


class RedisClaimProgress:
    """Progress of a claim through its scripts."""

    def __init__(self, request: ClaimRequest) -> None:
        self._request = request
        self._slots = {queue: max(0, slots) for queue, slots in request.capacity.items()}
        self._star = self._slots.pop(EVERY_QUEUE, 0)
        self._startable = request.max_must_start
        self._asked: deque[int] = deque()  # how many jobs each of the scripts under way was asked for
        self._idle = request.idle
        self._rounds = 0
        self._looks = 0
        self._passed = b""  # what a script passed by, in its own words for the next one
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self.is_idle = not any(self._slots.values()) and not self._star
        """Nothing is wanted."""
        self.over = self.is_idle
        self._promoted = 0
        self._quarantined = False
        self._held_back = False
        self._due_in: dict[str, int] = {}  # by script
        self._until_us: int | None = None
        self._limited_looks = 0
        self.is_limited = False
        """A queue that is wanted has jobs under limits."""
        self.unassigned: list[str] = []
        """Queues with limits that have ready jobs without a partition."""

    @property
    def promoted(self) -> int:
        """Due jobs made ready so far."""
        return self._promoted

    def script_calls(self, served: str) -> list[list[Argument]]:
        """Arguments of the next scripts: several if the first one's jobs fit every queue. Only the first claims jobs
        that must start at once; one at a time looks behind suspects."""
        request = self._request
        left = 1 if request.isolated else request.limit - len(self.jobs)
        ample = not self._passed and all(slots == 0 or slots >= left for slots in (*self._slots.values(), self._star))
        self._asked = deque(min(PIECE, left - taken) for taken in range(0, left if ample else min(left, PIECE), PIECE))
        pairs = self._wanted(served)
        return [
            [
                asked,
                0 if number else max(0, self._startable),
                int(request.isolated),
                int(request.promote),
                int(self._rounds + 1 >= _PROMOTE_ROUNDS),
                self._star or "",
                served,
                b"" if self._startable > 0 else self._passed,
                *pairs,
            ]
            for number, asked in enumerate(self._asked)
        ]

    def take(self, jobs: list[Job], reply: Sequence[Any]) -> None:
        """Note a script's answer."""
        (
            rows,
            promoted,
            due_in,
            quarantined,
            until,
            _,
            more,
            self._passed,
            stopped_at_last_attempt,
            limited,
            unassigned,
        ) = reply
        self.is_limited, self.unassigned = bool(limited), [decode_text(queue) for queue in unassigned]
        self._promoted += promoted
        self._due_in["ready"] = int(due_in)
        self._quarantined = self._quarantined or bool(quarantined)
        self._until_us = int(until)
        self._add(jobs)
        self._rounds += more == 2
        self._looks += more == 1
        asked = self._asked.popleft()
        self._held_back = bool(stopped_at_last_attempt)
        again = more == 2 or (more == 1 and self._looks < _MAX_LOOKS) or len(rows) >= asked
        again = again or (self._held_back and self._startable > 0)  # by one that was not the first
        self.over = self.is_full or not again

    # ── jobs under limits ─────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_full(self) -> bool:
        """Returns True if no more jobs are wanted."""
        return len(self.jobs) >= (1 if self._request.isolated else self._request.limit)

    def limited_call(self, served: str, *, promote: bool) -> list[Argument] | None:
        """Returns the arguments of the next script for jobs under limits; None where none is to be taken."""
        request = self._request
        max_must_start = 1 if request.isolated else self._startable  # each of them starts at once
        left = min((1 if request.isolated else request.limit) - len(self.jobs), PIECE, self._idle, max_must_start)
        if left <= 0 or self.is_idle:
            return None
        return [
            left,
            int(request.isolated),
            int(promote and request.promote and self._rounds < _PROMOTE_ROUNDS),
            max(0, self._star) or "",
            served,
            *self._wanted(served),
        ]

    def take_limited(self, jobs: list[Job], reply: Sequence[Any]) -> bool:
        """Note the answer to ``limited_call``; returns True if there may be more."""
        rows, promoted, due_in, quarantined, until, _, more = reply
        self._promoted += promoted
        self._rounds += more == 2
        self._due_in["limited"] = int(due_in)
        self._quarantined = self._quarantined or bool(quarantined)
        self._until_us = int(until)
        self._startable -= sum(not must_start_now(job) for job in jobs)
        self._idle -= len(rows)
        self._add(jobs)
        self.over = self.over or self.is_full
        self._limited_looks += not rows
        if more and not jobs:
            self._due_in["limited"] = 0
        return len(rows) >= PIECE or more == 2 or (more == 1 and self._limited_looks < _MAX_LIMITED_LOOKS)

    # ── all jobs ──────────────────────────────────────────────────────────────────────────────────────────────
    def _wanted(self, served: str) -> list[Argument]:
        """Named queues with their slots, beginning behind the one served last."""
        named = sorted(self._slots)
        start = bisect_right(named, served)
        return [argument for queue in named[start:] + named[:start] for argument in (queue, max(0, self._slots[queue]))]

    def _add(self, jobs: list[Job]) -> None:
        self.jobs += jobs
        for job in jobs:
            self._startable -= must_start_now(job)
            self._slots[job.queue] = self._slots.get(job.queue, self._star) - 1

    def claim(self) -> Claim:
        due_in = [each for each in self._due_in.values() if each >= 0]
        return Claim(
            jobs=self.jobs,
            promoted=self._promoted,
            next_due=timedelta(microseconds=min(due_in)) if due_in else None,
            quarantined=self._quarantined,
            stopped_at_last_attempt=self._held_back,
            lease_until_us=self._until_us,
            expired=self.expired,
        )
