"""Family ``workflow`` of SQLite."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.steps import NewStep, Step
from holdfast.stores.sqlite.encoding import as_json
from holdfast.stores.sqlite.opened import SqliteFamily
from holdfast.stores.sqlite.writer import Transaction


class SqliteWorkflow(SqliteFamily):
    """Family ``workflow`` of SQLite."""

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        return await self._opened().writer.call(lambda transaction: self._save_in(transaction, steps))

    def _save_in(self, transaction: Transaction, steps: Sequence[NewStep]) -> list[bool]:
        connection, now_us = transaction.connection, transaction.now_us
        leases = as_json((step.lease.job_id, step.lease.claims, step.worker) for step in steps)
        held = dict(connection.execute(self._sql["held_leases"], {"leases": leases, "now": now_us}).fetchall())
        rows = [
            (held[index], step.name, step.number, step.in_order, step.lease.claims, now_us, step.result)
            for index, step in enumerate(steps)
            if index in held
        ]
        connection.executemany(self._sql["insert_step"], rows)
        return [index in held for index in range(len(steps))]

    async def read_steps(self, job_id: str) -> list[Step]:
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["steps"], {"id": job_id}).fetchall())
        return [Step(name, number, bool(in_order), *rest) for name, number, in_order, *rest in rows]
