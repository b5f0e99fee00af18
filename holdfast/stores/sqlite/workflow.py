"""Family ``workflow`` of SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core import waits
from holdfast.core.batches import BatchProgress
from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.errors import Conflict
from holdfast.core.models import MICROSECOND, Lease, NewJob, Step
from holdfast.core.steps import NewStep
from holdfast.core.waits import (
    ChildStatus,
    JobWaits,
    KeptSignal,
    ReceiverInfo,
    SentSignal,
    Signal,
    SignalReceipt,
    SignalWait,
)
from holdfast.stores.sqlite.claiming import read_value
from holdfast.stores.sqlite.dependencies import decrement_waits, run_flow, wait_for_children
from holdfast.stores.sqlite.encoding import as_json, span_us
from holdfast.stores.sqlite.limits import LimitedFamily
from holdfast.stores.sqlite.maintenance import submit_in
from holdfast.stores.sqlite.writer import Transaction

_DEPENDENCY_STATES = tuple(DependencyState)


class SqliteWorkflow(LimitedFamily):
    """Family ``workflow`` of SQLite: each verb that writes is one transaction."""

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        return await self._opened().writer.call(lambda transaction: self._save_in(transaction, steps))

    def _save_in(self, transaction: Transaction, steps: Sequence[NewStep]) -> list[bool]:
        rows = self._live_leases(transaction, [(step.lease, step.worker) for step in steps])
        self._insert_steps(transaction, [(rows[n], step, step.result) for n, step in enumerate(steps) if n in rows])
        return [index in rows for index in range(len(steps))]

    def _live_leases(self, transaction: Transaction, leases: Sequence[tuple[Lease, str | None]]) -> dict[int, int]:
        """The rows of the jobs whose leases stand, by their places in ``leases``."""
        asked = as_json((lease.job_id, lease.claims, worker) for lease, worker in leases)
        values = {"leases": asked, "now": transaction.now_us}
        return dict(transaction.connection.execute(self._sql["valid_leases"], values).fetchall())

    def _insert_steps(self, transaction: Transaction, ended: Sequence[tuple[int, NewStep, str | None]]) -> None:
        rows = [
            (seq, step.name, step.number, step.is_ordered, step.lease.claims, transaction.now_us, result)
            for seq, step, result in ended
        ]
        transaction.connection.executemany(self._sql["insert_step"], rows)

    async def read_steps(self, job_id: str) -> list[Step]:
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["steps"], {"id": job_id}).fetchall())
        return [Step(name, number, bool(is_ordered), *rest) for name, number, is_ordered, *rest in rows]

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        return await self._opened().writer.call(lambda transaction: self._receive_in(transaction, wait))

    def _receive_in(self, transaction: Transaction, wait: SignalWait) -> SignalReceipt:
        connection, now_us, step = transaction.connection, transaction.now_us, wait.step
        seq = self._live_leases(transaction, [(step.lease, step.worker)]).get(0)
        if seq is None:
            return SignalReceipt(has_lease=False)
        recorded = connection.execute(self._sql["step_result"], (seq, step.name)).fetchone()
        if recorded is not None:
            return SignalReceipt(result=recorded[0])
        signal = connection.execute(self._sql["take_signal"], (wait.topic, step.lease.job_id)).fetchone()
        before = connection.execute(self._sql["receiver_deadline"], (seq, step.name)).fetchone()
        until_us = now_us + span_us(wait.timeout) if before is None else before[0]
        if signal is None and until_us > now_us:
            place = (seq, wait.topic, step.name, step.number, step.is_ordered, step.lease.claims, now_us, until_us)
            connection.execute(self._sql["set_receiver"], place)
            connection.execute(self._sql["mark_earlier_children_met"], (seq,))
            connection.execute(self._sql["set_waits"], (seq, 1))
            return SignalReceipt(time_left=(until_us - now_us) * MICROSECOND)
        result = waits.TIMED_OUT if signal is None else waits.signal_result(signal[0])
        self._insert_steps(transaction, [(seq, step, result)])
        if before is not None:
            connection.execute(self._sql["delete_receiver"], (seq,))
        if before is not None and before[1]:
            connection.execute(self._sql["set_waits"], (seq, 0))
        return SignalReceipt(result=result)

    async def send_signal(self, signal: Signal) -> SentSignal:
        return await self._opened().writer.call(lambda transaction: self._send_in(transaction, signal))

    def _send_in(self, transaction: Transaction, signal: Signal) -> SentSignal:
        connection, topic = transaction.connection, signal.topic
        known = connection.execute(self._sql["find_signal"], (signal.id,)).fetchone()
        if known is not None:
            return SentSignal(False, known[0])
        receiver = connection.execute(self._sql["next_receiver"], (topic,)).fetchone()
        job_id = None
        if receiver is not None:
            seq, job_id, name, number, is_ordered, claims = receiver
            step = NewStep(Lease(job_id, claims), name, number, bool(is_ordered))
            self._insert_steps(transaction, [(seq, step, waits.signal_result(signal.value))])
            connection.execute(self._sql["delete_receiver"], (seq,))
            for queue in run_flow(connection, decrement_waits(self._sql, {seq: 1}, transaction.now_us)):
                transaction.notify_topic(f"queue:{queue}")
        elif read_value(connection, self._sql["count_signals"], (topic, waits.MAX_SIGNALS)) >= waits.MAX_SIGNALS:
            raise Conflict(waits.describe_full_topic(topic))
        row = (signal.id, topic, signal.value, transaction.now_us, job_id)
        connection.execute(self._sql["insert_signal"], row)
        return SentSignal(True, job_id)

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        name = "all_signals" if topic is None else "signals"
        values = {"topic": topic, "limit": limit}
        rows = await self._opened().read(lambda reader: reader.execute(self._sql[name], values).fetchall())
        return [KeptSignal(*row) for row in rows]

    # ── children and dependencies ─────────────────────────────────────────────────────────────────────────────
    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        bound = await self._limits.cache.bind(children)
        return await self._opened().writer.call(lambda transaction: self._start_in(transaction, lease, bound, worker))

    def _start_in(
        self, transaction: Transaction, lease: Lease, children: Sequence[NewJob], worker: str
    ) -> list[ChildStatus] | None:
        connection = transaction.connection
        seq = self._live_leases(transaction, [(lease, worker)]).get(0)
        if seq is None:
            return None
        jobs = dict(connection.execute(self._sql["known_children"], (seq, as_json(child.id for child in children))))
        left = [child for child in children if child.id not in jobs]
        answers = submit_in(transaction, self._sql, left)
        for child, answer in zip(left, answers, strict=True):
            jobs[child.id] = answer.job_id
            if answer.created:
                transaction.notify_topic(f"queue:{child.queue}")
        states = run_flow(connection, wait_for_children(self._sql, (seq, lease.job_id), jobs))
        return [ChildStatus(jobs[child.id], states.get(jobs[child.id])) for child in children]

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["batch"], {"id": job_id}).fetchall())
        return BatchProgress(*rows[0]) if rows else None

    async def read_waits(self, job_id: str) -> JobWaits:
        values = {"id": job_id, "limit": waits.MAX_SHOWN}
        return await self._opened().read(
            lambda reader: _waits_from(
                reader.execute(self._sql["receiver"], values).fetchone(),
                reader.execute(self._sql["dependencies"], values).fetchall(),
            )
        )


def _waits_from(receiver: Sequence[Any] | None, rows: Sequence[Sequence[Any]]) -> JobWaits:
    found: tuple[list[DependencyInfo], list[DependencyInfo]] = ([], [])
    for other, job_id, condition, state, is_child in rows:
        info = DependencyInfo(job_id, Condition(condition), _DEPENDENCY_STATES[state], bool(is_child))
        found[other].append(info)
    return JobWaits(None if receiver is None else ReceiverInfo(*receiver), *found)
