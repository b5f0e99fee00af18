"""Family ``admin`` of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from holdfast.core.job_changes import JobChanges
from holdfast.core.models import BulkResult, JobFilter, JobState, ReplayRate, States
from holdfast.core.workers import WorkerCommand
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import CHOICE_SECONDS, Chosen, SelectionAdmin
from holdfast.stores.common.searches import UNSUCCESSFUL
from holdfast.stores.sqlite.dependencies import renew_dependencies, run_flow
from holdfast.stores.sqlite.encoding import INLINE_PAYLOAD, as_json, decode_unique, filter_parameters, span_us
from holdfast.stores.sqlite.limits import LimitedFamily
from holdfast.stores.sqlite.maintenance import delete_rows, resolve_in
from holdfast.stores.sqlite.submission import NOT_STARTED_STATES, rewrite_unstarted, take_unique
from holdfast.stores.sqlite.writer import Transaction


class SqliteAdmin(LimitedFamily, SelectionAdmin):
    """Family ``admin`` of SQLite."""

    async def _cancel(self, chosen: Chosen) -> BulkResult:
        return await self._opened().writer.call(lambda transaction: self._cancel_in(transaction, chosen))

    def _cancel_in(self, transaction: Transaction, chosen: Chosen) -> BulkResult:
        ids = self._still_matching(transaction, chosen)
        connection, batch = transaction.connection, as_json(ids)
        values = {"ids": batch, "now": transaction.now_us}
        unstarted = connection.execute(self._sql["cancel_unstarted"], values).fetchall()
        running = connection.execute(self._sql["cancel_running"], {"ids": batch}).fetchall()
        transaction.ended += [job_id for job_id, _ in unstarted]
        resolve_in(
            transaction,
            self._sql,
            [(job_id, JobState.CANCELLED) for job_id, has_dependents in unstarted if has_dependents],
        )
        for _, worker in running:
            transaction.notify_topic(f"worker:{worker}")
        changed = {job_id: JobState.CANCELLED for job_id, _ in unstarted}
        changed |= {job_id: JobState.RUNNING for job_id, _ in running}
        return self._operated(transaction, ids, changed, chosen.more)

    async def _replay(
        self, chosen: Chosen, *, force: bool, payload: str | None, from_step: int | None, pace: ReplayRate
    ) -> BulkResult:
        return await self._opened().writer.call(
            lambda transaction: self._replay_in(
                transaction, chosen, force=force, payload=payload, from_step=from_step, pace=pace
            )
        )

    def _replay_in(
        self,
        transaction: Transaction,
        chosen: Chosen,
        *,
        force: bool,
        payload: str | None,
        from_step: int | None,
        pace: ReplayRate,
    ) -> BulkResult:
        ids = self._still_matching(transaction, chosen)
        connection = transaction.connection
        free = self._with_unique_keys(transaction, ids, force=force)
        # One that is not free leaves its instant unused.
        values = {
            "ids": as_json(each if each in free else None for each in ids),
            "force": int(force),
            "now": transaction.now_us,
            "payload": _inline(payload),
        }
        values |= {"after": span_us(pace.after), "every": span_us(pace.every)}
        rows = connection.execute(self._sql["replay"], values).fetchall()
        for _, job_id, queue, *_ in rows:
            transaction.notify_topic(f"queue:{queue}")
            if payload is not None:
                self._replace_payload(transaction, job_id, payload)
        self._limits.assign_again(connection, [row[1] for row in rows])
        if from_step is not None:
            forgotten = {"seqs": as_json(row[0] for row in rows), "from": from_step}
            connection.execute(self._sql["delete_steps"], forgotten)
            connection.execute(self._sql["delete_receivers"], forgotten)
        waiters = [seq for seq, *_, is_waiter in rows if is_waiter]
        replayed = [row[1] for row in rows if row[4]]
        waits_again = run_flow(connection, renew_dependencies(self._sql, waiters, replayed))
        changed = {job_id: STATES[code] for _, job_id, _, code, *_ in rows}
        return self._operated(transaction, ids, changed | dict.fromkeys(waits_again, JobState.WAITING), chosen.more)

    def _with_unique_keys(self, transaction: Transaction, ids: Sequence[str], *, force: bool) -> set[str]:
        """Takes the unique keys of jobs to be replayed; returns the jobs without those whose key another job holds."""
        connection = transaction.connection
        asked = {"ids": as_json(ids), "force": int(force)}
        keys = {job_id: decode_unique(text) for job_id, text in connection.execute(self._sql["unique_keys_of"], asked)}
        firsts = {keys[job_id].key: job_id for job_id in reversed(ids) if job_id in keys}
        owned = {
            job_id
            for job_id in firsts.values()
            if run_flow(connection, take_unique(self._sql, job_id, keys[job_id], transaction.now_us)) == job_id
        }
        return {job_id for job_id in ids if job_id not in keys or job_id in owned}

    def _replace_payload(self, transaction: Transaction, job_id: str, payload: str) -> None:
        connection = transaction.connection
        connection.execute(self._sql["drop_payload"], (job_id,))
        if len(payload) > INLINE_PAYLOAD:
            connection.execute(self._sql["clear_inline_payload"], (job_id,))
            connection.execute(self._sql["insert_payload"], (job_id, payload))

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        return await self._opened().writer.call(lambda transaction: self._edit_in(transaction, job_id, changes))

    def _edit_in(self, transaction: Transaction, job_id: str, changes: JobChanges) -> BulkResult:
        now_us, unstarted = transaction.now_us, changes.will_expire
        flow = rewrite_unstarted(self._sql, job_id, changes, now_us, NOT_STARTED_STATES, unstarted=unstarted)
        rows = run_flow(transaction.connection, flow)
        for _, _, queue in rows:
            transaction.notify_topic(f"queue:{queue}")
        if rows and (changes.payload is not None or changes.queue is not None):
            self._limits.assign_again(transaction.connection, [job_id])
        changed = dict.fromkeys([job_id], STATES[rows[0][1]]) if rows else {}
        return self._operated(transaction, [job_id], changed, more=False)

    async def _delete(self, chosen: Chosen, states: States) -> BulkResult:
        codes = None if states is None else as_json(CODES[state] for state in states)
        return await self._opened().writer.call(lambda transaction: self._delete_in(transaction, chosen, codes))

    def _delete_in(self, transaction: Transaction, chosen: Chosen, codes: str | None) -> BulkResult:
        ids = self._still_matching(transaction, chosen)
        rows = transaction.connection.execute(self._sql["deletable"], {"ids": as_json(ids), "states": codes}).fetchall()
        gone = {job_id: STATES[state] for _, job_id, state, _ in rows}
        depended_on = [(job_id, "deleted") for _, job_id, _, has_dependents in rows if has_dependents]
        resolve_in(transaction, self._sql, depended_on)
        delete_rows(transaction, self._sql, [row[0] for row in rows], list(gone), keys_until=1 << 62)
        return self._operated(transaction, ids, gone, chosen.more)

    async def _choose_matching(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> Chosen:
        return await self._opened().search(
            lambda reader: self._choose_in(reader, where, legal, limit, uncancelled=uncancelled),
            where,
            seconds=CHOICE_SECONDS,
        )

    def _choose_in(
        self, reader: sqlite3.Connection, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> Chosen:
        asked = frozenset(where.states) & legal if where.states else legal
        values = filter_parameters(where) | {
            "states": as_json(sorted(CODES[state] for state in asked)),
            "limit": limit + 1,
            "uncancelled": int(uncancelled),
        }
        if asked <= UNSUCCESSFUL:
            each = [reader.execute(self._sql["choose_ended"], values | {"state": CODES[state]}) for state in asked]
            ids = [job_id for _, job_id in sorted(row for found in each for row in found)]
        else:
            ids = [job_id for (job_id,) in reader.execute(self._sql["choose"], values)]
        return Chosen(ids[:limit], len(ids) > limit, values)

    def _still_matching(self, transaction: Transaction, chosen: Chosen) -> list[str]:
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

    async def pause(self, queue: str) -> None:
        await self._opened().writer.call(lambda transaction: self._set_paused(transaction, queue, paused=True))

    async def resume(self, queue: str) -> None:
        await self._opened().writer.call(lambda transaction: self._set_paused(transaction, queue, paused=False))

    def _set_paused(self, transaction: Transaction, queue: str, *, paused: bool) -> None:
        transaction.connection.execute(self._sql["set_paused"], {"queue": queue, "paused": int(paused)})
        if not paused:
            transaction.notify_topic(f"queue:{queue}")

    async def send_command(self, command: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        values = {"command": command, "workers": None if workers is None else as_json(workers)}

        def run_in_transaction(transaction: Transaction) -> list[str]:
            rows = transaction.connection.execute(self._sql["set_command"], values | {"now": transaction.now_us})
            names = [worker for (worker,) in rows.fetchall()]
            for worker in names:
                transaction.notify_topic(f"worker:{worker}")
            return names

        return await self._opened().writer.call(run_in_transaction)


def _inline(payload: str | None) -> str | None:
    return payload if payload is not None and len(payload) <= INLINE_PAYLOAD else None
