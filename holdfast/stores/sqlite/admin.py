"""Operating on jobs, queues and workers, bounded; and the upkeep anyone may do at any time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from holdfast.core.models import BulkResult, Job, JobFilter, JobState, ReplayRate, WorkerCommand
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import FORGOTTEN_AFTER, UNSUCCESSFUL, Chosen
from holdfast.stores.sqlite.encoding import INLINE_PAYLOAD, as_json, filter_parameters, read_job, span_us
from holdfast.stores.sqlite.opened import OpenedSqlite
from holdfast.stores.sqlite.writer import Transaction


class SqliteAdmin:
    """The verbs, over the store's named statements."""

    def __init__(self, statements: Mapping[str, str]) -> None:
        self._sql = statements

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    def cancel(self, transaction: Transaction, chosen: Chosen) -> BulkResult:
        """End what waits; flag what runs and tell its worker."""
        ids = self._standing(transaction, chosen)
        connection, batch = transaction.connection, as_json(ids)
        values = {"ids": batch, "now": transaction.now_us}
        unstarted = connection.execute(self._sql["cancel_unstarted"], values).fetchall()
        running = connection.execute(self._sql["cancel_running"], {"ids": batch}).fetchall()
        transaction.ended += [job_id for (job_id,) in unstarted]
        for _, worker in running:
            transaction.notify_topic(f"worker:{worker}")
        changed = {job_id: JobState.CANCELLED for (job_id,) in unstarted}
        changed |= {job_id: JobState.RUNNING for job_id, _ in running}
        return self._operated(transaction, ids, changed, chosen.more)

    def replay(
        self, transaction: Transaction, chosen: Chosen, *, force: bool, payload: str | None, pace: ReplayRate
    ) -> BulkResult:
        """Back to queued with a new budget, or to scheduled where its turn comes later."""
        ids = self._standing(transaction, chosen)
        connection = transaction.connection
        values = {"ids": as_json(ids), "force": int(force), "now": transaction.now_us, "payload": _inline(payload)}
        values |= {"after": span_us(pace.after), "every": span_us(pace.every)}
        rows = connection.execute(self._sql["replay"], values).fetchall()
        for job_id, queue, _ in rows:
            transaction.notify_topic(f"queue:{queue}")
            if payload is not None:
                self._replace_payload(transaction, job_id, payload)
        return self._operated(transaction, ids, {job_id: STATES[code] for job_id, _, code in rows}, chosen.more)

    def _replace_payload(self, transaction: Transaction, job_id: str, payload: str) -> None:
        connection = transaction.connection
        connection.execute(self._sql["drop_payload"], {"id": job_id})
        if len(payload) > INLINE_PAYLOAD:
            connection.execute(self._sql["clear_inline_payload"], {"id": job_id})
            connection.execute(self._sql["insert_payload"], (job_id, payload))

    def delete(self, transaction: Transaction, chosen: Chosen) -> BulkResult:
        """Remove jobs with their keys, tags and history."""
        ids = self._standing(transaction, chosen)
        rows = transaction.connection.execute(self._sql["deletable"], {"ids": as_json(ids)}).fetchall()
        gone = {job_id: STATES[state] for _, job_id, state in rows}
        self._remove(transaction, [seq for seq, _, _ in rows], list(gone), keys_until=1 << 62)
        return self._operated(transaction, ids, gone, chosen.more)

    def _remove(self, transaction: Transaction, seqs: list[int], ids: list[str], *, keys_until: int) -> None:
        connection = transaction.connection
        if ids:
            connection.execute(self._sql["delete_keys_of"], {"ids": as_json(ids), "before": keys_until})
        connection.execute(self._sql["delete_jobs"], {"seqs": as_json(seqs)})

    def select_jobs(
        self,
        reader: sqlite3.Connection,
        where: JobFilter,
        legal: frozenset[JobState],
        limit: int,
        *,
        unasked: bool = False,
    ) -> Chosen:
        """Selects the jobs that a filter matches, read outside of any transaction: that may take long, and nobody waits
        for it.

        Only ever states the operation accepts; ``unasked`` leaves out running jobs that were asked to stop already, so
        that a series of calls ends.
        """
        asked = frozenset(where.states) & legal if where.states else legal
        if not asked:
            return Chosen([], False, None)
        values = filter_parameters(where) | {
            "states": as_json(sorted(CODES[state] for state in asked)),
            "limit": limit + 1,
            "unasked": int(unasked),
        }
        if asked <= UNSUCCESSFUL:
            each = [reader.execute(self._sql["choose_ended"], values | {"state": CODES[state]}) for state in asked]
            ids = [job_id for _, job_id in sorted(row for found in each for row in found)]
        else:
            ids = [job_id for (job_id,) in reader.execute(self._sql["choose"], values)]
        return Chosen(ids[:limit], len(ids) > limit, values)

    def _standing(self, transaction: Transaction, chosen: Chosen) -> list[str]:
        """The ids to try. Of those a filter chose, the ones it still matches: others have written since."""
        if chosen.guard is None:
            return chosen.ids
        values = {**chosen.guard, "ids": as_json(chosen.ids)}
        return [job_id for (job_id,) in transaction.connection.execute(self._sql["choose_again"], values)]

    def _operated(
        self, transaction: Transaction, ids: Sequence[str], changed: Mapping[str, JobState], more: bool
    ) -> BulkResult:
        left = [job_id for job_id in ids if job_id not in changed]
        rows = transaction.connection.execute(self._sql["states_of"], {"ids": as_json(left)}).fetchall() if left else []
        states = {job_id: STATES[code] for job_id, code in rows}
        return BulkResult(
            changed=[(job_id, changed[job_id]) for job_id in ids if job_id in changed],
            refused=[(job_id, states.get(job_id)) for job_id in left],
            more=more,
        )

    def pause(self, transaction: Transaction, queue: str, *, paused: bool) -> None:
        """Close or open a queue for claims."""
        transaction.connection.execute(self._sql["set_paused"], {"queue": queue, "paused": int(paused)})
        if not paused:
            transaction.notify_topic(f"queue:{queue}")

    def send_command(self, transaction: Transaction, order: WorkerCommand, workers: Sequence[str] | None) -> list[str]:
        """Write down what living workers are to do, and wake them."""
        rows = transaction.connection.execute(
            self._sql["order_workers"],
            {"order": order, "now": transaction.now_us, "workers": None if workers is None else as_json(workers)},
        ).fetchall()
        for (worker,) in rows:
            transaction.notify_topic(f"worker:{worker}")
        return [worker for (worker,) in rows]

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────
    def deregister(self, transaction: Transaction, worker: str) -> None:
        """Forget a worker that has stopped."""
        transaction.connection.execute(self._sql["delete_worker"], {"worker": worker})

    def promote_due(self, transaction: Transaction, *, limit: int) -> int:
        """Make due jobs of every queue ready."""
        rows = transaction.connection.execute(
            self._sql["promote_anywhere"], {"now": transaction.now_us, "limit": limit}
        ).fetchall()
        for (queue,) in set(rows):
            transaction.notify_topic(f"queue:{queue}")
        return len(rows)

    def find_expired(self, reader: sqlite3.Connection, now_us: int, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out."""
        rows = reader.execute(self._sql["expired"], {"now": now_us, "limit": limit})
        return [read_job(shown) for (shown,) in rows]

    def prune(self, transaction: Transaction, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        connection, now_us = transaction.connection, transaction.now_us
        pruned = 0
        for state, span in ended_for.items():
            before = now_us - span_us(span)
            values = {"state": CODES[JobState(state)], "before": before, "limit": limit - pruned}
            rows = connection.execute(self._sql["prune_jobs"], values).fetchall()
            keyed = [job_id for _, job_id, keyed in rows if keyed]
            if rows:
                self._remove(transaction, [seq for seq, _, _ in rows], keyed, keys_until=now_us)
            pruned += len(rows)
        connection.execute(self._sql["outlived_keys"], {"now": now_us, "limit": limit})
        connection.execute(self._sql["prune_keys"], {"now": now_us, "limit": limit})
        connection.execute(self._sql["prune_workers"], {"before": now_us - span_us(FORGOTTEN_AFTER)})
        return pruned


class SqliteMaintenance:
    """Family ``maintenance`` of SQLite."""

    def __init__(self, opened: Callable[[], OpenedSqlite], now: Callable[[], int], operate: SqliteAdmin) -> None:
        self._opened = opened
        self._now = now
        self._operate = operate

    async def promote_due(self, *, limit: int) -> int:
        """Make due jobs of every queue ready."""
        return await self._opened().writer.call(lambda transaction: self._operate.promote_due(transaction, limit=limit))

    async def find_expired(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out."""
        now_us = self._now()
        return await self._opened().read(lambda reader: self._operate.find_expired(reader, now_us, limit=limit))

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        return await self._opened().writer.call(
            lambda transaction: self._operate.prune(transaction, ended_for, limit=limit)
        )


def _inline(payload: str | None) -> str | None:
    return payload if payload is not None and len(payload) <= INLINE_PAYLOAD else None
