"""Files with millions of jobs, made by one statement: what they hold is what submissions and settlements leave."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import uvloop

from benchmarks.application import Application
from holdfast.core.models import JobState
from holdfast.stores.common.named_sql import CODES

_AT_ONCE = 250_000  # rows a transaction
_INSERT = """
with recursive numbers (n) as (select :first union all select n + 1 from numbers where n < :last)
insert into holdfast_job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims, attempts,
    worker, started_at, ended_at)
select printf('%08x-%04x-7%03x-8%03x-%012x', n >> 8, n & 255, abs(random()) % 4096, abs(random()) % 4096,
        abs(random()) % 281474976710656),
    case when :queues = 1 then 'default' else 'queue-' || (n % :queues) end, 'noop', '{"n":' || n || '}',
    :state, 0, case when :state = 1 then :due + n else :now + n end, :now + n, 5, :state = 5, :state = 5,
    case when :state = 5 then 'filler' end, case when :state = 5 then :now end, case when :state = 5 then :now end
from numbers
"""


_DAY = 86_400_000_000  # microseconds


def filled(path: Path, *, waiting: int = 0, ended: int = 0, scheduled: int = 0, queues: int = 1) -> None:
    """Create ``path`` with so many jobs that have succeeded, then so many due from tomorrow on, then so many that
    wait."""
    uvloop.run(_create(path))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("pragma synchronous=off")
        now, first = time.time_ns() // 1000 - waiting - ended - scheduled, 0
        for state, number in ((JobState.SUCCEEDED, ended), (JobState.SCHEDULED, scheduled), (JobState.QUEUED, waiting)):
            values = {"queues": queues, "state": CODES[state], "now": now, "due": now + _DAY}
            last = first + number
            for start in range(first, last, _AT_ONCE):
                end = min(last, start + _AT_ONCE) - 1
                connection.execute(_INSERT, {**values, "first": start, "last": end})
            first = last
        connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    finally:
        connection.close()


async def _create(path: Path) -> None:
    async with Application(path) as app:
        await app.count()
