"""Builder of a claim on SQLite: takes jobs queue by queue, inside one write transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast.core.lifecycle import must_start_now
from holdfast.core.models import Job, JobState
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.requests import UNREADABLE, remaining_slots
from holdfast.stores.sqlite.encoding import array_elements, as_json, decode_job, decode_jobs, decode_seqs
from holdfast.stores.sqlite.limits import LimitedClaim
from holdfast.stores.sqlite.maintenance import resolve_in
from holdfast.stores.sqlite.writer import Transaction


class SqliteClaimBuilder:
    """Builds a claim, queue by queue."""

    def __init__(
        self, transaction: Transaction, statements: Mapping[str, str], request: ClaimRequest, lease_until_us: int
    ) -> None:
        self._transaction = transaction
        self.connection = transaction.connection
        self._sql = statements
        self._request = request
        self.now_us = transaction.now_us
        self._lease = {"worker": request.worker, "until": lease_until_us, "now": transaction.now_us}
        self._must_start_left = 1 << 30 if request.isolated else request.max_must_start
        self.requested_queues = frozenset(request.capacity)  # the wildcard is for all other queues
        self._slots = dict(request.capacity)
        self.jobs: list[Job] = []
        self.began_limited = False
        """True if the first claimed job is under limits."""
        self.has_quarantined = False
        self.stopped_at_last_attempt = False

    @property
    def is_full(self) -> bool:
        """Returns True if the claim has all it asked for."""
        return len(self.jobs) >= (1 if self._request.isolated else self._request.limit)

    def free_slots(self, queue: str) -> int:
        """Returns how many jobs of this queue the claim may still take."""
        return self._slots.get(queue, self._slots.get(EVERY_QUEUE, 0))

    def take_ready(self, queue: str) -> None:
        """Takes jobs of one queue under no limit, suspects included."""
        if self._request.isolated:
            self._take("pick_quarantined", queue=queue, limit=1)
            return
        slots_left = min(self.free_slots(queue), self._request.limit - len(self.jobs))
        quarantined, suspect = self.connection.execute(self._sql["tiers"], {"queue": queue}).fetchone()
        self.has_quarantined = self.has_quarantined or bool(quarantined)
        if suspect and self._must_start_left > 0:
            self._take("pick_with_suspects", queue=queue, limit=slots_left, max_must_start=self._must_start_left)
        else:
            self._take("pick_ready", queue=queue, limit=slots_left)

    def take_limited(self, claim: LimitedClaim, queue: str) -> bool:
        """Takes jobs under limits from one queue, at most as many as can start now. Returns True if it took any."""
        taken = len(self.jobs)
        if self._request.isolated:
            seqs = [] if self.is_full else claim.choose_quarantined(queue)
        else:
            left = min(self._request.limit, self._request.free_runners) - taken
            slots_left = min(self.free_slots(queue), left, self._must_start_left)
            seqs = claim.choose_jobs(queue, slots_left) if slots_left > 0 else []
            quarantined = read_value(self.connection, self._sql["any_limited_quarantined"], {"queue": queue})
            self.has_quarantined = self.has_quarantined or bool(quarantined)
        if seqs:
            self._take("pick_admitted", seqs=as_json(seqs))
            self.began_limited = self.began_limited or not taken
        return len(self.jobs) > taken

    def take_ids(self, ids: Sequence[str], capacity: Mapping[str, int], paused: set[str]) -> int:
        """Takes jobs by their ids; returns the number of deliveries refused, repeats included."""
        batch = as_json(dict.fromkeys(ids))
        max_tier = 1 << 30 if self._request.isolated else min(1, self._must_start_left)
        for queue, slots in capacity.items():
            every = queue == EVERY_QUEUE
            excluded = paused | (self.requested_queues if every else set())
            slots_left = min(slots, (1 if self._request.isolated else self._request.limit) - len(self.jobs))
            self._take(
                "pick_ids",
                ids=batch,
                queue=None if every else queue,
                excluded=as_json(sorted(excluded)),
                max_tier=max_tier,
                max_must_start=self._must_start_left,
                limit=slots_left,
            )
        return len(ids) - len(self.jobs)

    def _take(self, pick: str, **parameters: object) -> None:
        values = {"now": self._lease["now"], "worker": self._lease["worker"], **parameters}
        seqs, jobs_json, must_start = self.connection.execute(self._sql[pick], values).fetchone()
        if seqs == "[]":
            return
        must_start = must_start or 0
        if must_start > self._must_start_left:
            fitting, stopped_at_last_attempt = _fitting(array_elements(jobs_json), self._must_start_left)
            self.stopped_at_last_attempt = self.stopped_at_last_attempt or stopped_at_last_attempt
            if not fitting:
                return
            seqs = as_json(decode_seqs(seqs)[number] for number in fitting)
            jobs_json = f"[{','.join(array_elements(jobs_json)[number] for number in fitting)}]"
            must_start = self._must_start_left
        self._must_start_left -= must_start
        self.connection.execute(self._sql["claim_picked"], {"seqs": seqs, **self._lease})
        try:
            jobs = decode_jobs(jobs_json)
        except UNREADABLE:
            jobs = self._decode_or_end(decode_seqs(seqs), array_elements(jobs_json))
        self.jobs += jobs
        self._slots = remaining_slots(self._slots, (job.queue for job in jobs))

    def _decode_or_end(self, seqs: Sequence[int], jobs_json: Sequence[str]) -> list[Job]:
        """Returns the readable jobs. One that another program corrupted becomes dead, and blocks no queue."""
        jobs = []
        for seq, each in zip(seqs, jobs_json, strict=True):
            try:
                jobs.append(decode_job(each))
            except UNREADABLE as error:
                values = {"seq": seq, "now": self._lease["now"], "error": f"the stored job cannot be read: {error}"}
                job_id, has_dependents = self.connection.execute(self._sql["mark_unreadable"], values).fetchone()
                resolve_in(self._transaction, self._sql, [(job_id, JobState.DEAD)] if has_dependents else [])
        return jobs


def _fitting(jobs_json: Sequence[str], max_must_start: int) -> tuple[list[int], bool]:
    """Returns indexes of the jobs that a claim takes, and True if a last attempt beyond ``max_must_start`` ends it.

    Suspects beyond ``max_must_start`` are skipped.
    """
    fitting: list[int] = []
    for number, each in enumerate(jobs_json):
        with suppress(*UNREADABLE):
            job = decode_job(each)
            if must_start_now(job) and max_must_start == 0:
                if not job.lost_leases:
                    return fitting, True
                continue
            max_must_start -= must_start_now(job)
        fitting.append(number)
    return fitting, False


def read_value(connection: sqlite3.Connection, sql: str, parameters: Mapping[str, object] | Sequence[object]) -> Any:
    """The single value a statement gives."""
    return connection.execute(sql, parameters).fetchone()[0]
