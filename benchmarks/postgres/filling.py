"""Databases with millions of jobs, made by a few statements, as submissions and settlements leave them."""

from __future__ import annotations

import time

import uvloop

from benchmarks.application import fill
from benchmarks.postgres import server
from benchmarks.postgres.server import Database

_AT_ONCE = 1_000_000  # rows a transaction
_INSERT = """
insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims, attempts,
    worker, started_at, ended_at)
select (lpad(to_hex(n), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid,
    case when p.queues = 1 then 'default' else 'queue-' || (n % p.queues) end, 'noop', '{"n":' || n || '}',
    case p.ended when 1 then 5 else 0 end, 0, p.now + n, p.now + n, 5, p.ended, p.ended,
    case p.ended when 1 then 'filler' end, case p.ended when 1 then p.now end, case p.ended when 1 then p.now end
from (select %s::bigint as first, %s::bigint as last, %s::int as queues, %s::int as ended, %s::bigint as now) p
cross join lateral generate_series(p.first, p.last) n
""".replace(" % ", " %% ")


def filled(home: Database, *, waiting: int = 0, ended: int = 0, queues: int = 1) -> None:
    """Give an empty database so many jobs that have succeeded and then so many that wait; vacuumed, as it would be."""
    uvloop.run(fill(home.url, 0))
    now = time.time_ns() // 1000 - waiting - ended
    for is_ended, first, last in ((1, 0, ended), (0, ended, ended + waiting)):
        for start in range(first, last, _AT_ONCE):
            home.execute(_INSERT, start, min(last, start + _AT_ONCE) - 1, queues, is_ended, now)
    home.execute("vacuum (analyze) holdfast.job")
    server.checkpoint()
