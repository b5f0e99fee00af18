"""Family ``maintenance`` of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from holdfast.core.history import COUNT_DELAY, FIRST_WINDOW, HistoryInterval
from holdfast.core.models import ExpiredJob, Job, JobState, NewJob, Submitted
from holdfast.core.waits import SIGNAL_RETENTION
from holdfast.stores.common.named_sql import CODES
from holdfast.stores.common.requests import EXPIRY_ROUNDS, FORGOTTEN_AFTER
from holdfast.stores.sqlite.dependencies import Resolution, resolve_dependencies, run_flow
from holdfast.stores.sqlite.encoding import as_json, read_job, span_us
from holdfast.stores.sqlite.opened import SqliteFamily
from holdfast.stores.sqlite.submission import submit_one_by_one
from holdfast.stores.sqlite.writer import Transaction


class SqliteMaintenance(SqliteFamily):
    """Family ``maintenance`` of SQLite."""

    async def promote_due(self, *, limit: int) -> int:
        def run_in_transaction(transaction: Transaction) -> int:
            values = {"now": transaction.now_us, "limit": limit}
            rows = transaction.connection.execute(self._sql["promote_any_queue"], values).fetchall()
            for (queue,) in set(rows):
                transaction.notify_topic(f"queue:{queue}")
            return len(rows)

        return await self._opened().writer.call(run_in_transaction)

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        values = {"now": self._now()}
        ended: list[ExpiredJob] = []
        for _ in range(EXPIRY_ROUNDS):
            found = await self._opened().read(
                lambda reader: reader.execute(self._sql["any_expired"], values).fetchone()
            )
            if not found[0] or len(ended) >= limit:
                break
            remaining = limit - len(ended)
            ended += await self._opened().writer.call(partial(end_expired, statements=self._sql, limit=remaining))
        return ended

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        values = {"now": self._now(), "limit": limit}
        return await self._opened().read(
            lambda reader: [read_job(job_json) for (job_json,) in reader.execute(self._sql["expired_leases"], values)]
        )

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        now_us = self._now()
        states = [
            {"state": CODES[JobState(state)], "before": now_us - span_us(span), "limit": limit}
            for state, span in ended_for.items()
        ]

        def find_in(reader: sqlite3.Connection) -> list[dict[str, int | str]]:
            find = self._sql["find_prunable"]
            return [{**state, "seqs": as_json([seq for (seq,) in reader.execute(find, state)])} for state in states]

        found = await self._opened().read(find_in)  # not in the write, for which all others wait
        return await self._opened().writer.call(lambda transaction: self._prune_in(transaction, found, limit))

    def _prune_in(self, transaction: Transaction, found: list[dict[str, int | str]], limit: int) -> int:
        connection, now_us = transaction.connection, transaction.now_us
        pruned = 0
        for values in found:
            rows = connection.execute(self._sql["prune_jobs"], values).fetchall()[: limit - pruned]
            with_key = [job_id for _, job_id, has_key in rows if has_key]
            if rows:
                delete_rows(transaction, self._sql, [seq for seq, _, _ in rows], with_key, keys_until=now_us)
            pruned += len(rows)
        connection.execute(self._sql["detach_expired_keys"], {"now": now_us, "limit": limit})
        connection.execute(self._sql["prune_keys"], {"now": now_us, "limit": limit})
        connection.execute(self._sql["prune_buckets"], {"now": now_us, "limit": limit})
        before = now_us - span_us(SIGNAL_RETENTION)
        connection.execute(self._sql["prune_signals"], {"before": before, "limit": limit})
        connection.execute(self._sql["prune_workers"], {"before": now_us - span_us(FORGOTTEN_AFTER)})
        return pruned

    async def count_ended(self, *, limit: int) -> bool:
        return await self._opened().writer.call(lambda transaction: self._count_ended_in(transaction, limit))

    def _count_ended_in(self, transaction: Transaction, limit: int) -> bool:
        connection, now_us = transaction.connection, transaction.now_us
        before = now_us - span_us(COUNT_DELAY)
        (counted_until,) = connection.execute(self._sql["history_mark"]).fetchone() or (now_us - span_us(FIRST_WINDOW),)
        values = {"counted_until": counted_until, "before": before, "limit": limit}
        until, more = connection.execute(self._sql["history_until"], values).fetchone()
        if until <= counted_until:
            return False
        connection.execute(self._sql["history_add"], {"counted_until": counted_until, "until": until})
        connection.execute(self._sql["history_move"], {"until": until})
        for interval in HistoryInterval:
            values = {"length": interval.length_us, "before": now_us - interval.retention_us - interval.length_us}
            connection.execute(self._sql["prune_history"], values)
        return bool(more)

    async def reannounce(self) -> int:
        return 0


def end_expired(transaction: Transaction, statements: Mapping[str, str], *, limit: int) -> tuple[ExpiredJob, ...]:
    """Looks at jobs whose ``expires`` has come, at most so many, and ends those that no worker has taken."""
    connection, now = transaction.connection, {"now": transaction.now_us}
    seqs = as_json(seq for (seq,) in connection.execute(statements["expired"], now | {"limit": limit}))
    if seqs == "[]":
        return ()
    rows = connection.execute(statements["expire_jobs"], now | {"seqs": seqs}).fetchall()
    resolve_in(
        transaction, statements, [(job_id, JobState.CANCELLED) for job_id, *_, has_dependents in rows if has_dependents]
    )
    connection.execute(statements["drop_expired"], {"seqs": seqs})
    transaction.ended += [job_id for job_id, *_ in rows]
    return tuple(ExpiredJob(job_id, task, queue) for job_id, task, queue, _ in rows)


def resolve_in(transaction: Transaction, statements: Mapping[str, str], ended: Iterable[tuple[str, str]]) -> None:
    """Resolves dependencies on jobs that ended, given as (id, how it ended); wakes their waiters."""
    _notify_resolved(
        transaction, run_flow(transaction.connection, resolve_dependencies(statements, ended, transaction.now_us))
    )


def submit_in(transaction: Transaction, statements: Mapping[str, str], jobs: Sequence[NewJob]) -> list[Submitted]:
    """Stores jobs one by one; notifies waiters of jobs that this ends."""
    answers, resolution = run_flow(transaction.connection, submit_one_by_one(statements, jobs, transaction.now_us))
    _notify_resolved(transaction, resolution)
    return answers


def _notify_resolved(transaction: Transaction, resolution: Resolution) -> None:
    for queue in resolution.queues:
        transaction.notify_topic(f"queue:{queue}")
    transaction.ended += resolution.ended


def delete_rows(
    transaction: Transaction, statements: Mapping[str, str], seqs: list[int], ids: list[str], *, keys_until: int
) -> None:
    """Delete jobs by their rows, and the keys of ``ids`` that end before ``keys_until``."""
    connection = transaction.connection
    if ids:
        connection.execute(statements["delete_keys_of"], {"ids": as_json(ids), "before": keys_until})
    connection.execute(statements["delete_jobs"], {"seqs": as_json(seqs)})
