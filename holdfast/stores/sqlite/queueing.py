"""Family ``queueing`` of SQLite: submit, claim, settle, heartbeat, log lines, wait."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.limits import LimitTable
from holdfast.core.models import TERMINAL, Claim, JobState, Lease, NewJob, Settled, Settlement, Submitted
from holdfast.core.portal import running_loop
from holdfast.core.workers import HeartbeatReply, LeaseStatus, WorkerCommand, WorkerHeartbeat
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import jobs_of_topics
from holdfast.stores.sqlite.claiming import SqliteClaimBuilder, read_value
from holdfast.stores.sqlite.encoding import as_json, encode_json, job_row, span_us
from holdfast.stores.sqlite.limits import LimitedClaim, LimitedFamily
from holdfast.stores.sqlite.maintenance import end_expired, resolve_in, submit_in
from holdfast.stores.sqlite.query import JobReader
from holdfast.stores.sqlite.submission import extra_rows, insert_rows, is_one_row, must_be_stored_alone
from holdfast.stores.sqlite.writer import Transaction

T = TypeVar("T")

MAX_PROMOTED = 1000
"""Due jobs made ready by one claim; more are made ready by the next."""


class SqliteQueueing(LimitedFamily):
    """Family ``queueing`` of SQLite: each verb is one write transaction, made of the methods below it."""

    _last_named = ""  # the queue served last, of those that its claim named
    _last_unlisted = ""  # the same, of queues that its claim did not name
    _last_limited = ""  # the queue whose jobs under limits were taken last
    _limited_first = False  # whether the next claim looks for jobs under limits before the others
    _was_full = False  # whether the last claim took all it wanted

    # ── submit ────────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        if not jobs:
            return []
        bound = await self._limits.cache.bind(jobs)
        return await self._opened().writer.call(lambda transaction: self._submit(transaction, bound))

    def _submit(self, transaction: Transaction, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Insert the batch in one go; where a key or a known id is among it, job by job."""
        if len(jobs) == 1 and is_one_row(jobs[0]):
            return [self._insert_one(transaction, jobs[0])]
        others = [job for job in jobs if not is_one_row(job)]
        if not any(map(must_be_stored_alone, others)) and self._insert_all(transaction, jobs, others):
            answers = [Submitted(job.id, True, stored_at_us=transaction.now_us) for job in jobs]
        else:
            answers = submit_in(transaction, self._sql, jobs)
        changed = {job.queue for job, answer in zip(jobs, answers, strict=True) if answer.created or answer.changed}
        transaction.topics.update(f"queue:{queue}" for queue in changed)
        return answers

    def _insert_one(self, transaction: Transaction, job: NewJob) -> Submitted:
        """Inserts a job that needs one statement: nothing to undo if it exists already."""
        inserted = transaction.connection.execute(self._sql["insert_job"], job_row(job, transaction.now_us))
        created = inserted.rowcount == 1
        if created:
            transaction.notify_topic(f"queue:{job.queue}")
        return Submitted(job.id, created, stored_at_us=transaction.now_us if created else None)

    def _insert_all(self, transaction: Transaction, jobs: Sequence[NewJob], others: Sequence[NewJob]) -> bool:
        """Returns False, having stored nothing, if one exists. ``others``: those that are not one row."""
        connection = transaction.connection
        now_us = transaction.now_us
        try:
            with transaction.savepoint():
                rows = [job_row(job, now_us) for job in jobs]
                if insert_rows(connection, self._sql["insert_job"], rows) != len(jobs):
                    raise _RowCountMismatch
                for name, rows in extra_rows(others, now_us):
                    connection.executemany(self._sql[name], rows)
        except _RowCountMismatch:
            return False
        return True

    # ── claim ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def claim(self, request: ClaimRequest) -> Claim:
        opened = self._opened()
        return await opened.writer.call(
            lambda transaction: self._claim(transaction, request),
            # After a full claim there is probably more; of given ids the refused ones must be counted.
            None
            if self._was_full or request.ids is not None
            else lambda: opened.lookup.run_query(lambda reader: self._precheck_claim(reader, request, self._now())),
        )

    def _precheck_claim(self, reader: sqlite3.Connection, request: ClaimRequest, now_us: int) -> Claim | None:
        """An empty claim if a reader sees that there is nothing to take; None if a claim is worth a transaction."""
        queues = [queue for queue, slots in request.capacity.items() if slots > 0]
        every = EVERY_QUEUE in queues
        if every:
            ready = read_value(reader, self._sql["next_ready_queue"], {"after": ""}) is not None
            due = request.promote and read_value(reader, self._sql["any_due_any_queue"], {"now": now_us})
        else:
            ready = any(read_value(reader, self._sql["any_ready"], {"queue": queue}) for queue in queues)
            due = request.promote and any(
                read_value(reader, self._sql["any_due"], {"queue": queue, "now": now_us}) for queue in queues
            )
        if ready or due:
            return None
        limited = self._limited_queues(reader, self._limits.current_table(reader), queues, request)
        if request.free_runners > 0 and any(
            read_value(reader, self._sql["any_open_partition"], {"queue": queue, "now": now_us}) for queue in limited
        ):
            return None
        return Claim(jobs=[], next_due=self._next_due(reader, queues, limited, now_us))

    def _limited_queues(
        self, connection: sqlite3.Connection, table: LimitTable | None, queues: Sequence[str], request: ClaimRequest
    ) -> list[str]:
        """The wanted queues in which there may be jobs under limits."""
        if table is None:
            return []
        values = {"every": EVERY_QUEUE in queues, "queues": as_json(queues)}
        rows = connection.execute(self._sql["queues_under_limits"], values)
        names = (name for name, limited, unassigned in rows if limited or (unassigned and name in table.queues))
        return sorted(name for name in names if name in queues or name not in request.capacity)

    def _claim(self, transaction: Transaction, request: ClaimRequest) -> Claim:
        """Promotes due jobs, claims ready ones, and returns when the next job is due."""
        connection, now_us = transaction.connection, transaction.now_us
        capacity = {queue: slots for queue, slots in request.capacity.items() if slots > 0}
        expired = end_expired(transaction, self._sql, limit=MAX_PROMOTED)
        promoted = self._promote(connection, capacity, request, now_us) if request.promote else 0
        paused = {name for (name,) in connection.execute(self._sql["paused_queues"])}
        until = now_us + span_us(request.lease_for)
        builder = SqliteClaimBuilder(transaction, self._sql, request, until)
        table = self._limits.current_table(connection)
        if request.ids is not None:
            refused = builder.take_ids(request.ids, capacity, paused | (table.queues if table else set()))
            return Claim(
                jobs=builder.jobs,
                refused=refused,
                promoted=promoted,
                stopped_at_last_attempt=builder.stopped_at_last_attempt,
                lease_until_us=until,
                expired=expired,
            )
        limited = self._limited_queues(connection, table, list(capacity), request)
        due_us = None
        if table and limited:
            open_queues = [queue for queue in limited if queue not in paused]
            due_us = self._take_with_limits(builder, table, open_queues, capacity, paused)
        else:
            self._take_unlimited(builder, capacity, paused)
        self._was_full = builder.is_full
        return Claim(
            jobs=builder.jobs,
            promoted=promoted,
            next_due=self._next_due(connection, list(capacity), limited, now_us, due_us),
            has_quarantined=builder.has_quarantined,
            stopped_at_last_attempt=builder.stopped_at_last_attempt,
            lease_until_us=until,
            expired=expired,
        )

    def _promote(
        self, connection: sqlite3.Connection, capacity: Mapping[str, int], request: ClaimRequest, now_us: int
    ) -> int:
        values = {"now": now_us, "limit": MAX_PROMOTED}
        if request.ids is not None:
            return connection.execute(self._sql["promote_ids"], {"ids": as_json(request.ids), "now": now_us}).rowcount
        if EVERY_QUEUE in capacity:
            return len(connection.execute(self._sql["promote_any_queue"], values).fetchall())
        return sum(
            connection.execute(self._sql["promote_queue"], {"queue": queue, **values}).rowcount for queue in capacity
        )

    def _take_unlimited(self, builder: SqliteClaimBuilder, capacity: Mapping[str, int], paused: set[str]) -> None:
        for queue in self._round_robin(builder.connection, capacity, paused, builder):
            builder.take_ready(queue)

    def _take_with_limits(
        self,
        builder: SqliteClaimBuilder,
        table: LimitTable,
        limited: Sequence[str],
        capacity: Mapping[str, int],
        paused: set[str],
    ) -> int | None:
        """Takes jobs with and without limits; claims alternate between the two. Returns the instant at which
        the first job that waits for several tokens will have them."""
        start = bisect_right(limited, self._last_limited)
        ordered = [*limited[start:], *limited[:start]]
        claim = LimitedClaim(builder.connection, self._sql, table, builder.now_us)
        for queue in ordered:
            claim.assign_unassigned(queue)
        closed = paused | table.queues  # their jobs without a partition wait until they have one
        if not self._limited_first:
            self._take_unlimited(builder, capacity, closed)
        for queue in ordered:
            if builder.take_limited(claim, queue):
                self._last_limited = queue
        if self._limited_first:
            self._take_unlimited(builder, capacity, closed)
        if builder.jobs:
            self._limited_first = not builder.began_limited
        return claim.due_us

    def _round_robin(
        self, connection: sqlite3.Connection, capacity: Mapping[str, int], paused: set[str], builder: SqliteClaimBuilder
    ) -> Iterator[str]:
        """Yields each wanted queue that is not paused, round robin, until the claim is full."""
        named = sorted(queue for queue in capacity if queue != EVERY_QUEUE and queue not in paused)
        start = bisect_right(named, self._last_named)
        for queue in named[start:] + named[:start]:
            if builder.is_full:
                return
            self._last_named = queue
            yield queue
        if EVERY_QUEUE not in capacity:
            return
        after = last = self._last_unlisted
        wrapped = False
        while not builder.is_full and builder.free_slots(EVERY_QUEUE):
            queue = read_value(connection, self._sql["next_ready_queue"], {"after": after})
            if queue is None or (wrapped and queue > last):
                if wrapped or not last:
                    return
                after, wrapped = "", True
                continue
            after = queue
            if queue not in paused and queue not in builder.requested_queues:
                self._last_unlisted = queue
                yield queue

    def _next_due(
        self,
        connection: sqlite3.Connection,
        queues: Sequence[str],
        limited: Sequence[str],
        now_us: int,
        due_us: int | None = None,
    ) -> timedelta | None:
        if EVERY_QUEUE in queues:
            instants = [read_value(connection, self._sql["next_due_any_queue"], {})]
        else:
            instants = [read_value(connection, self._sql["next_due"], {"queue": queue}) for queue in queues]
        instants += [read_value(connection, self._sql["next_unblocked"], {"queue": queue}) for queue in limited]
        known = [each for each in (*instants, due_us) if each is not None]
        return timedelta(microseconds=max(0, min(known) - now_us)) if known else None

    # ── settle ────────────────────────────────────────────────────────────────────────────────────────────────
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        if not settlements:
            return []
        return await self._opened().writer.call(lambda transaction: self._settle(transaction, settlements))

    def _settle(self, transaction: Transaction, settlements: Sequence[Settlement]) -> list[Settled]:
        """Successes of one worker in one statement; all else, and a batch that is not all accepted, one by one."""
        worker = settlements[0].worker
        is_simple = all(
            each.state is JobState.SUCCEEDED and not each.lease_expired and each.worker == worker
            for each in settlements
        )
        if not is_simple or not self._settle_all(transaction, settlements, worker):
            ended: list[tuple[str, str]] = []
            answers = [self._settle_one(transaction, each, ended) for each in settlements]
            resolve_in(transaction, self._sql, ended)
            return answers
        transaction.ended += [each.job_id for each in settlements]
        return [Settled(each.job_id, each.claims, True, JobState.SUCCEEDED) for each in settlements]

    def _settle_all(self, transaction: Transaction, settlements: Sequence[Settlement], worker: str | None) -> bool:
        connection = transaction.connection
        batch = encode_json([(each.job_id, each.claims, each.result) for each in settlements]).decode()
        values = {"settlements": batch, "worker": worker, "now": transaction.now_us}
        any_limited = read_value(connection, self._sql["any_running_limited"], {})
        before = connection.total_changes
        try:
            with transaction.savepoint():
                connection.execute(self._sql["settle_succeeded"], values)
                if connection.total_changes - before != len(settlements):
                    raise _RowCountMismatch
        except _RowCountMismatch:
            return False
        if any_limited:
            ids = as_json(each.job_id for each in settlements)
            for (queue,) in connection.execute(self._sql["limited_queues_of"], {"ids": ids}):
                transaction.notify_topic(f"queue:{queue}")
        return True

    def _settle_one(self, transaction: Transaction, settlement: Settlement, ended: list[tuple[str, str]]) -> Settled:
        """Settles one job. Appends it to ``ended`` if others depend on it."""
        connection, now_us = transaction.connection, transaction.now_us
        values = {
            "id": settlement.job_id,
            "claims": settlement.claims,
            "state": CODES[settlement.state],
            "reason": settlement.reason,
            "error": settlement.error,
            "error_group": settlement.error_group,
            "result": settlement.result,
            "delay": None if settlement.delay is None else span_us(settlement.delay),
            "refund": int(settlement.refund),
            "lease_expired": int(settlement.lease_expired),
            "worker": settlement.worker,
            "now": now_us,
        }
        row = connection.execute(self._sql["settle_one"], values).fetchone()
        if row is None:
            found = connection.execute(self._sql["job_state"], {"id": settlement.job_id}).fetchone()
            state = None if found is None else STATES[found[0]]
            return Settled(settlement.job_id, settlement.claims, False, state)
        seq, code, run_at, started_at, attempts, worker, queue, partition, has_dependents = row
        state = STATES[code]
        if not settlement.refund and state is not JobState.SUCCEEDED:
            values |= {"seq": seq, "state": code, "attempt": attempts, "worker": worker, "started_at": started_at}
            values |= {"traceback": settlement.traceback}
            connection.execute(self._sql["insert_attempt"], values)
            if state is JobState.FAILED and settlement.priority is not None:
                connection.execute(self._sql["set_rank"], {"seq": seq, "rank": -settlement.priority})
        if state in TERMINAL:
            transaction.ended.append(settlement.job_id)
            if has_dependents:
                ended.append((settlement.job_id, state))
        if state not in TERMINAL or partition is not None:  # under limits, its room is free
            transaction.notify_topic(f"queue:{queue}")
        return Settled(settlement.job_id, settlement.claims, True, state, run_at)

    # ── log lines ─────────────────────────────────────────────────────────────────────────────────────────────
    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        if not records:
            return []
        return await self._opened().writer.call(lambda transaction: self._append_logs(transaction, records))

    def _append_logs(self, transaction: Transaction, records: Sequence[LogBatch]) -> list[bool]:
        connection, now_us = transaction.connection, transaction.now_us
        leases = as_json((each.lease.job_id, each.lease.claims) for each in records)
        found = connection.execute(self._sql["recordable"], {"leases": leases, "now": now_us})
        running = {index: (seq, attempt) for index, seq, attempt in found}
        rows = [
            (seq, records[index].lease.claims, line.number, attempt, now_us - span_us(line.ago), *_log_columns(line))
            for index, (seq, attempt) in running.items()
            for line in records[index].lines
        ]
        connection.executemany(self._sql["insert_line"], rows)
        return [index in running for index in range(len(records))]

    # ── heartbeat ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        return await self._opened().writer.call(
            lambda transaction: self._heartbeat(transaction, heartbeat, leases, lease_for)
        )

    def _heartbeat(
        self, transaction: Transaction, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], lease_for: timedelta
    ) -> HeartbeatReply:
        connection, now_us = transaction.connection, transaction.now_us
        lease_until_us = now_us + span_us(lease_for)
        listed_until_us = now_us + span_us(heartbeat.alive_for(lease_for))
        values = heartbeat.to_row() | {"has_deltas": heartbeat.has_deltas, "now": now_us, "until": listed_until_us}
        (command,) = connection.execute(self._sql["upsert_worker"], values).fetchone()
        statuses: list[LeaseStatus] = []
        if leases:
            given = {"leases": as_json((lease.job_id, lease.claims) for lease in leases), "worker": heartbeat.worker}
            connection.execute(self._sql["extend_leases"], {**given, "now": now_us, "until": lease_until_us})
            for lease_until, cancelling in connection.execute(self._sql["lease_states"], given):
                alive = lease_until is not None and lease_until > now_us
                statuses.append((LeaseStatus.CANCEL if cancelling else LeaseStatus.HELD) if alive else LeaseStatus.LOST)
        return HeartbeatReply(statuses=statuses, command=WorkerCommand(command))

    async def deregister(self, worker: str) -> None:
        await self._opened().writer.call(
            lambda transaction: transaction.connection.execute(self._sql["delete_worker"], {"worker": worker})
        )

    # ── wait ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        notifications, search = self._opened().notifications, self._opened().lookup.run_query
        job_ids, workers = jobs_of_topics(topics), as_json(topic.removeprefix("worker:") for topic in topics)

        def is_done() -> bool:
            return bool(job_ids) and search(lambda reader: JobReader(self._sql).any_finished(reader, job_ids))

        def has_changed() -> bool:  # a heartbeat that each commit caused would cause one of each other worker
            return not all(topic.startswith("worker:") for topic in topics) or search(
                lambda reader: bool(read_value(reader, self._sql["any_worker_has_message"], {"workers": workers}))
            )

        if running_loop() is None:
            notifications.wait_in_thread(topics, timeout, is_done, has_changed)
        else:
            await notifications.wait(topics, timeout, is_done, has_changed)


def _log_columns(line: NewLine) -> tuple[str, str, str | None]:
    return line.level, line.text, line.fields


class _RowCountMismatch(Exception):
    """A batch statement changed fewer rows than it was given."""
