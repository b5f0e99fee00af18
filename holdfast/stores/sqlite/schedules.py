"""Family ``schedules`` of SQLite."""

from __future__ import annotations

import sqlite3

import msgspec

from holdfast.core.schedule import DueSchedules, Schedule, ScheduleChange, decode_schedules, encode_schedule
from holdfast.stores.sqlite.limits import LimitedFamily
from holdfast.stores.sqlite.maintenance import submit_in
from holdfast.stores.sqlite.writer import Transaction


class SqliteSchedules(LimitedFamily):
    """Family ``schedules`` of SQLite."""

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        bound = msgspec.structs.replace(change, jobs=await self._limits.cache.bind(change.jobs))
        return await self._opened().writer.call(lambda transaction: self._write_in(transaction, bound))

    def _write_in(self, transaction: Transaction, change: ScheduleChange) -> int | None:
        values = {
            "name": change.schedule.name,
            "next_at": change.schedule.due_us,
            "document": encode_schedule(change.schedule),
            "expected": change.expected,
            "revision": transaction.now_us,
        }
        name = "remove_schedule" if change.remove else "replace_schedule" if change.expected else "add_schedule"
        written = transaction.connection.execute(self._sql[name], values).fetchone()
        if written is None:
            return None
        submit_in(transaction, self._sql, change.jobs)
        for job in change.jobs:
            transaction.notify_topic(f"queue:{job.queue}")
        return int(written[0])

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        statement = self._sql["schedules" if name is None else "schedule"]
        values = {"after": after, "limit": limit} if name is None else {"name": name}
        return decode_schedules(await self._opened().read(lambda reader: reader.execute(statement, values).fetchall()))

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        now_us = self._now()

        def read_due(reader: sqlite3.Connection) -> DueSchedules:
            rows = reader.execute(self._sql["due_schedules"], {"now": now_us, "limit": limit}).fetchall()
            ((next_us,),) = reader.execute(self._sql["next_schedule"], {"now": now_us})
            return DueSchedules(decode_schedules(rows), now_us, next_us)

        return await self._opened().read(read_due)
