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
    worker, started_at, ended_at, reason, waits)
select printf('%08x-%04x-7%03x-8%03x-%012x', n >> 8, n & 255, abs(random()) % 4096, abs(random()) % 4096,
        abs(random()) % 281474976710656),
    case when :queues = 1 then 'default' else 'queue-' || (n % :queues) end, 'noop', '{"n":' || n || '}',
    :state, 0, :now + :delay + n, :now + n, 5, :begun, :state = 5,
    case when :begun then 'filler' end, case when :begun then :now end, case when :state = 5 then :now end,
    :reason, case when :state = 4 then 1 end
from numbers
"""
_SLEEPS = """
insert into holdfast_step (job_seq, name, number, is_ordered, claims, ended_at, result)
select seq, 'sleep', 1, 1, claims, started_at, run_at - started_at from holdfast_job where state = 1 and claims > 0
"""
_RECEIVERS = """
insert into holdfast_receiver (seq, topic, step, number, is_ordered, claims, since, until)
select seq, 'topic-' || seq, 'wait_for topic-' || seq, 1, 1, claims, started_at, run_at
from holdfast_job where state = 4
"""
_DAY = 86_400_000_000  # microseconds


def filled(
    path: Path,
    *,
    waiting: int = 0,
    ended: int = 0,
    scheduled: int = 0,
    sleeping: int = 0,
    receivers: int = 0,
    queues: int = 1,
) -> None:
    """Creates ``path`` with so many jobs of each kind, those that wait for a worker last.

    ``scheduled``: due from tomorrow on. ``sleeping``: begun, and asleep for three days. ``receivers``: begun, and
    waiting for a signal, with a deadline in three days.
    """
    kinds = (
        (ended, JobState.SUCCEEDED, 1, None, 0),
        (scheduled, JobState.SCHEDULED, 0, None, _DAY),
        (sleeping, JobState.SCHEDULED, 1, "snoozed", 3 * _DAY),
        (receivers, JobState.WAITING, 1, "signal", 3 * _DAY),
        (waiting, JobState.QUEUED, 0, None, 0),
    )
    uvloop.run(_create(path))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("pragma synchronous=off")
        now, first = time.time_ns() // 1000 - sum(number for number, *_ in kinds), 0
        for number, state, begun, reason, delay in kinds:
            values = {"queues": queues, "state": CODES[state], "begun": begun, "reason": reason}
            values |= {"now": now, "delay": delay}
            last = first + number
            for start in range(first, last, _AT_ONCE):
                end = min(last, start + _AT_ONCE) - 1
                connection.execute(_INSERT, {**values, "first": start, "last": end})
            first = last
        for statement in (_SLEEPS, _RECEIVERS):
            connection.execute(statement)
        connection.execute("pragma synchronous=full")  # nothing is left to be written while a figure is taken
        connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    finally:
        connection.close()


async def _create(path: Path) -> None:
    async with Application(path) as app:
        await app.count()
