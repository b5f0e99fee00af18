"""Builders of claims: arguments of their scripts, and what the replies add."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Literal

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Claim, ExpiredJob, Job
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.requests import remaining_slots
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.encoding import decode_text

ClaimKind = Literal["ready", "limited"]
"""The jobs that a script claims: those under no limit, or those under limits."""
MAX_PER_SCRIPT = 200
"""Jobs one script handles: about 2 ms, for which all others wait."""
_PROMOTE_ROUNDS = 5  # scripts a claim spends on what is due before it takes regardless
_MAX_SCANS = 100  # scripts a claim spends on ids that cannot be claimed any more
_MAX_LIMITED_SCANS = 3  # the same, on partitions without room


class ClaimStatus(IntEnum):
    """Work that a script of a claim leaves to the next one."""

    DONE = 0
    MORE_TO_EXAMINE = 1  # ids, or partitions
    MORE_DUE = 2  # jobs that are not ready yet


class RedisIdClaimBuilder:
    """Builds a claim of given ids from the replies of its scripts."""

    def __init__(self, request: ClaimRequest) -> None:
        self._request = request
        self._slots = dict(request.capacity)
        self._max_must_start = 1 << 30 if request.isolated else request.max_must_start
        self.stopped_at_last_attempt = False
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self._lease_until_us: int | None = None

    def script_arguments(self) -> list[Argument]:
        """Returns the arguments of the next script."""
        request = self._request
        named = [queue for queue in self._slots if queue != EVERY_QUEUE]
        return [
            (1 if request.isolated else request.limit) - len(self.jobs),
            1 << 30 if request.isolated else min(1, self._max_must_start),
            int(request.promote),
            self._slots.get(EVERY_QUEUE, ""),
            self._max_must_start,
            len(named),
            *(argument for queue in named for argument in (queue, self._slots[queue])),
        ]

    def take(self, jobs: list[Job], lease_until_us: int, *, stopped_at_last_attempt: bool) -> None:
        """Adds the reply of a script."""
        self._lease_until_us = lease_until_us
        self.stopped_at_last_attempt = stopped_at_last_attempt
        self._max_must_start = max(0, self._max_must_start - sum(map(must_start_now, jobs)))
        self.jobs += jobs
        self._slots = remaining_slots(self._slots, (job.queue for job in jobs))

    def to_claim(self, asked: int) -> Claim:
        """Returns the result of a claim of so many ids."""
        refused = asked - len(self.jobs)
        return Claim(
            jobs=self.jobs,
            refused=refused,
            stopped_at_last_attempt=self.stopped_at_last_attempt,
            lease_until_us=self._lease_until_us,
            expired=self.expired,
        )


class RedisClaimBuilder:
    """Builds a claim from the replies of its scripts."""

    def __init__(self, request: ClaimRequest, last_named: dict[ClaimKind, str]) -> None:
        """``last_named``: the named queue served last, of each kind; the claim updates it."""
        self._request = request
        self._last_named = last_named
        self._slots = {queue: max(0, slots) for queue, slots in request.capacity.items()}
        self._max_must_start = request.max_must_start
        self._asked: deque[int] = deque()  # how many jobs each of the scripts under way was asked for
        self._free_runners = request.free_runners
        self._rounds = self._scans = self._limited_scans = 0
        self._skipped = b""  # by ready list, how many ids at its head the next script skips; packed
        self.jobs: list[Job] = []
        self.expired: tuple[ExpiredJob, ...] = ()
        self.has_no_capacity = not any(self._slots.values())
        """True if no queue has a free slot."""
        self.is_done = self.has_no_capacity
        self._promoted = 0
        self._has_quarantined = False
        self._stopped_at_last_attempt = self._all_examined = False
        self._due_in: dict[ClaimKind, int] = {}  # as the script of each kind has answered
        self._lease_until_us: int | None = None
        self.began_limited = False
        """True if the first claimed job is under limits."""
        self.has_limited_jobs = False
        """True if a queue of the request has jobs under limits."""
        self.unassigned_queues: list[str] = []
        """Queues with limits that have ready jobs without a partition."""

    @property
    def promoted(self) -> int:
        """Due jobs made ready so far."""
        return self._promoted

    def script_calls(self, served: str) -> list[list[Argument]]:
        """Returns the arguments of the next scripts: several if each queue has slots for all jobs of the first script.
        Only the first claims jobs that must start at once; only a single script scans past suspects."""
        request = self._request
        left = 1 if request.isolated else request.limit - len(self.jobs)
        can_pipeline = not self._skipped and all(each == 0 or each >= left for each in self._slots.values())
        self._asked = deque(
            min(MAX_PER_SCRIPT, left - taken)
            for taken in range(0, left if can_pipeline else min(left, MAX_PER_SCRIPT), MAX_PER_SCRIPT)
        )
        pairs = self._wanted("ready")
        return [
            [
                asked,
                0 if number else max(0, self._max_must_start),
                int(request.isolated),
                int(request.promote),
                int(self._rounds + 1 >= _PROMOTE_ROUNDS),
                self._slots.get(EVERY_QUEUE) or "",
                served,
                b"" if self._max_must_start > 0 else self._skipped,
                *pairs,
            ]
            for number, asked in enumerate(self._asked)
        ]

    def take(self, jobs: list[Job], reply: Sequence[Any]) -> None:
        """Adds the reply of a script."""
        rows, promoted, due_in, quarantined, until, _, status, self._skipped, stopped, limited, unassigned = reply
        self.has_limited_jobs, self.unassigned_queues = bool(limited), [decode_text(queue) for queue in unassigned]
        self._promoted += promoted
        self._due_in["ready"] = int(due_in)
        self._has_quarantined = self._has_quarantined or bool(quarantined)
        self._lease_until_us = int(until)
        self._add(jobs, "ready")
        self._rounds += status == ClaimStatus.MORE_DUE
        self._scans += status == ClaimStatus.MORE_TO_EXAMINE
        asked = self._asked.popleft()
        self._stopped_at_last_attempt, self._all_examined = bool(stopped), status == ClaimStatus.DONE
        may_scan = status == ClaimStatus.MORE_TO_EXAMINE and self._scans < _MAX_SCANS
        may_scan = may_scan and (not self.jobs or bool(self._skipped))  # else the claimed jobs would wait for it
        again = status == ClaimStatus.MORE_DUE or may_scan or len(rows) >= asked
        again = again or (self._stopped_at_last_attempt and self._max_must_start > 0)  # by one that was not the first
        self.is_done = self.is_full or not again

    # ── jobs under limits ─────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_full(self) -> bool:
        """Returns True if the claim has as many jobs as it may."""
        return len(self.jobs) >= (1 if self._request.isolated else self._request.limit)

    def limited_call(self, served: str, *, promote: bool) -> list[Argument] | None:
        """Returns the arguments of the next script for jobs under limits; None if the claim may take none."""
        request = self._request
        max_must_start = 1 if request.isolated else self._max_must_start  # each of them starts at once
        left = min(
            (1 if request.isolated else request.limit) - len(self.jobs),
            MAX_PER_SCRIPT,
            self._free_runners,
            max_must_start,
        )
        if left <= 0 or self.has_no_capacity:
            return None
        return [
            left,
            int(request.isolated),
            int(promote and request.promote and self._rounds < _PROMOTE_ROUNDS),
            self._slots.get(EVERY_QUEUE) or "",
            served,
            *self._wanted("limited"),
        ]

    def take_limited(self, jobs: list[Job], reply: Sequence[Any]) -> bool:
        """Adds the reply of ``limited_call``; returns True if there may be more jobs."""
        rows, promoted, due_in, quarantined, until, _, status, last_named = reply
        self._promoted += promoted
        self._rounds += status == ClaimStatus.MORE_DUE
        self._due_in["limited"] = int(due_in)
        self._has_quarantined = self._has_quarantined or bool(quarantined)
        self._lease_until_us = int(until)
        self._max_must_start -= sum(not must_start_now(job) for job in jobs)
        self._free_runners -= len(rows)
        self.began_limited = self.began_limited or (bool(jobs) and not self.jobs)
        self._add(jobs, "limited")
        if status == ClaimStatus.MORE_TO_EXAMINE and last_named:  # its blocked partitions must not hold up other queues
            self._last_named["limited"] = decode_text(last_named)
        self.is_done = self.is_done or self.is_full
        self._limited_scans += not rows and status != ClaimStatus.MORE_DUE
        may_scan = status == ClaimStatus.MORE_TO_EXAMINE and self._limited_scans < _MAX_LIMITED_SCANS
        return len(rows) >= MAX_PER_SCRIPT or status == ClaimStatus.MORE_DUE or may_scan

    # ── all jobs ──────────────────────────────────────────────────────────────────────────────────────────────
    def _wanted(self, kind: ClaimKind) -> list[Argument]:
        """Returns named queues and their slots, round robin: behind the one served last."""
        named = sorted(self._slots.keys() - {EVERY_QUEUE})
        start = bisect_right(named, self._last_named[kind])
        return [argument for queue in named[start:] + named[:start] for argument in (queue, self._slots[queue])]

    def _add(self, jobs: list[Job], kind: ClaimKind) -> None:
        self.jobs += jobs
        self._max_must_start -= sum(map(must_start_now, jobs))
        for queue in [job.queue for job in jobs if job.queue in self._slots][-1:]:
            self._last_named[kind] = queue
        self._slots = remaining_slots(self._slots, (job.queue for job in jobs))

    @property
    def _none_left(self) -> bool:
        """Returns True if no ready job of the wanted queues was left."""
        jobs_left = (
            self.has_limited_jobs or self.unassigned_queues or self._has_quarantined or self._stopped_at_last_attempt
        )
        wanted = [name for name, slots in self._request.capacity.items() if slots > 0]
        may_be_left = jobs_left or self.is_full or self._skipped or not self._all_examined
        return self.is_done and not may_be_left and all(map(self._slots.get, wanted))

    def to_claim(self, *, receives_notifications: bool) -> Claim:
        """Returns the result of the claim. ``receives_notifications``: of each job that becomes ready."""
        due_in = [each for each in self._due_in.values() if each >= 0]
        return Claim(
            jobs=self.jobs,
            promoted=self._promoted,
            next_due=timedelta(microseconds=min(due_in)) if due_in else None,
            has_quarantined=self._has_quarantined,
            stopped_at_last_attempt=self._stopped_at_last_attempt,
            none_left=receives_notifications and self._none_left,
            lease_until_us=self._lease_until_us,
            expired=self.expired,
        )
