"""Databases with millions of jobs, made by a few statements, as submissions and settlements leave them."""

from __future__ import annotations

import time

import uvloop

from benchmarks.application import fill
from benchmarks.postgres import server
from benchmarks.postgres.server import Database
from holdfast.core.models import JobState
from holdfast.stores.common.named_sql import CODES

_AT_ONCE = 1_000_000  # rows a transaction
_INSERT = """
insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims, attempts,
    worker, started_at, ended_at, reason, waits)
select (lpad(to_hex(n), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid,
    case when p.queues = 1 then 'default' else 'queue-' || (n % p.queues) end, 'noop', '{"n":' || n || '}',
    p.state, 0, p.now + p.delay + n, p.now + n, 5, p.begun, case p.state when 5 then 1 else 0 end,
    case p.begun when 1 then 'filler' end, case p.begun when 1 then p.now end, case p.state when 5 then p.now end,
    p.reason, case p.state when 4 then 1 end
from (select %s::bigint as first, %s::bigint as last, %s::int as queues, %s::bigint as now, %s::int as state,
    %s::int as begun, %s::text as reason, %s::bigint as delay) p
cross join lateral generate_series(p.first, p.last) n
""".replace(" % ", " %% ")
_SLEEPS = """
insert into holdfast.step (job_id, name, number, is_ordered, claims, ended_at, result)
select id, 'sleep', 1, true, claims, started_at, run_at - started_at from holdfast.job where state = 1 and claims > 0
"""
_RECEIVERS = """
insert into holdfast.receiver (job_id, begun_at, deadline, claims, number, is_ordered, is_listed, step, topic)
select id, started_at, run_at, claims, 1, true, true, 'wait_for topic-' || seq, 'topic-' || seq
from holdfast.job where state = 4
"""
_DAY = 86_400_000_000  # microseconds


def filled(
    home: Database, *, waiting: int = 0, ended: int = 0, sleeping: int = 0, receivers: int = 0, queues: int = 1
) -> None:
    """Gives an empty database so many jobs of each kind, those that wait for a worker last; vacuumed, as it would be.

    ``sleeping``: begun, and asleep for three days. ``receivers``: begun, and waiting for a signal, with a deadline in
    three days.
    """
    kinds = (
        (ended, JobState.SUCCEEDED, 1, None, 0),
        (sleeping, JobState.SCHEDULED, 1, "snoozed", 3 * _DAY),
        (receivers, JobState.WAITING, 1, "signal", 3 * _DAY),
        (waiting, JobState.QUEUED, 0, None, 0),
    )
    uvloop.run(fill(home.url, 0))
    now, first = time.time_ns() // 1000 - sum(number for number, *_ in kinds), 0
    for number, state, begun, reason, delay in kinds:
        last = first + number
        for start in range(first, last, _AT_ONCE):
            end = min(last, start + _AT_ONCE) - 1
            home.execute(_INSERT, start, end, queues, now, CODES[state], begun, reason, delay)
        first = last
    if sleeping:
        home.execute(_SLEEPS)
    if receivers:
        home.execute(_RECEIVERS)
    home.execute("vacuum (analyze)")
    server.checkpoint()
