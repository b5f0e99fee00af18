"""A filled PostgreSQL store of 50,000 rows for tests of plans, and the plans of statements and functions in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.resources import files
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from holdfast.core.clock import ManualClock
from holdfast.stores import open_store
from holdfast.stores.common.named_sql import load_statements
from holdfast.stores.postgres.cursors import START
from holdfast.stores.postgres.encoding import EVERYTHING, number_parameters
from tests.conformance.plans_statistics import KeptStatistics
from tests.support import postgres

STATEMENTS = load_statements(files("holdfast.stores.postgres") / "queries.sql")
STATISTICS = ("never analysed", "empty", "idle", "full")
MODES = ("force_generic_plan", "force_custom_plan")
"""Without the values, as on the engine's own connections; with them, as behind a pooler."""

ROWS = 10_000
"""Queued, scheduled, running, waiting, succeeded and dead each; a tenth of it in the other states."""
SUSPECTS = 1_000
BATCH = 50
PAGES = 32 * BATCH
"""Buffers that a statement may touch for a batch: each row with its index paths, several times over."""
NOW = 1_000_000_000_000
LARGE_TABLES = {
    "job",
    "key",
    "tag",
    "expiry",
    "attempt",
    "line",
    "schedule",
    "partition",
    "partition_inbox",
    "bucket",
    "history",
}

FILL = """
insert into {schema}.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims,
                          lost_leases, tier, has_key, tagged, worker, lease_until, ended_at, expires_at)
select ('00000000-0000-0000-0000-' || lpad(to_hex({block} * {rows} + n), 12, '0'))::uuid,
       case when n % 2 = 1 then 'default' else 'queue-' || n % 10 end, 'task', '{{}}', {state}, n % 3,
       case when {state} in (1, 3, 4) then {now} + n - {rows} / 2 else {now} - n end, {now} - 1000000, 5, 1,
       {lost_leases}, {lost_leases},
       true, true, 'worker', case when {state} = 2 then {now} + n - 40 end,
       case when {state} >= 5 then {now} - n end, case when n % 3 = 0 then {now} + n end
from generate_series(1, {most}) n
"""
FILL_LIMITED = """
insert into {schema}.job (id, queue, task, payload, state, rank, run_at, created_at, tier, partition, worker,
                          lease_until, has_key, tagged)
select ('00000000-0000-0000-0003-' || lpad(to_hex(n), 12, '0'))::uuid,
       case when n % 2 = 1 then 'default' else 'queue-2' end, 'task', '{{}}',
       case when n % 20 = 0 then 2 else 0 end, n % 3, {now} - n, {now} - 1000000, 3,
       'key=' || case when n < 5000 then 1 else n end || repeat(chr(31) || 'late=1', n / 20001), 'worker',
       {now} + 1000000 + n, true, true from generate_series(1, 25000) n;
delete from {schema}.partition_inbox;
insert into {schema}.partition (queue, name, start_tag, blocked_until)
select queue, partition, min(seq), case when min(seq) % 2 = 0 then {now} + min(seq) end
from {schema}.job where partition is not null and state = 0 group by queue, partition;
insert into {schema}.partition_inbox (queue, name) select 'queue-4', 'key=' || n from generate_series(1, 10000) n;
insert into {schema}.bucket (name, full_at) select 'key=' || n, {now} + n from generate_series(1, 20000) n;
insert into {schema}.job_limit (name, revision, queue, per_key, concurrency, interval_us, burst, document)
values ('key', 1, 'queue-8', true, 3, 1000, 2, '{{}}');
"""
FILL_REST = """
insert into {schema}.key (key, job_id, keep_until)
select 'key of ' || id, id, case when seq % 2 = 0 then {now} + 1000000 end from {schema}.job;
insert into {schema}.expiry (job_id, expires_at) select id, coalesce(expires_at, {now} - seq) from {schema}.job;
insert into {schema}.tag (tag, job_id) select 'tagged', id from {schema}.job;
insert into {schema}.attempt (job_id, claims, attempt, ended_at, state)
select id, 1, 1, {now} - seq, 3 from {schema}.job;
insert into {schema}.line (job_id, claims, number, attempt, at, level, text)
select id, 1, 1, 1, {now}, 'info', 'said' from {schema}.job;
insert into {schema}.history (length, start, queue, state, number, run_us, longest_us)
select 60000000, {now} - n, 'queue-' || n, 5, 1, 1, 1 from generate_series(1, 20000) n;
insert into {schema}.schedule (name, next_at, revision, document)
select 'schedule-' || n, case when n % 3 > 0 then {now} + n - 100 end, 1, '{{}}' from generate_series(1, 20000) n
"""


class Case(NamedTuple):
    """A statement, ``index(columns)`` for what conditions it must have on each index, and the values not in VALUES."""

    name: str
    bounds: tuple[str, ...]
    values: Mapping[str, Any] = {}


def ids(state: int, number: int = BATCH) -> list[str]:
    return [f"00000000-0000-0000-0000-{state * ROWS + 7 * n:012x}" for n in range(1, number + 1)]


QUEUES = ["default", "queue-2", "queue-4", "unserved"]
BY_ID = "job_pkey(id)"
RUNNING = {"ids": ids(2), "claims": [1] * BATCH}

COLUMNS = {
    "ids": [f"00000000-0000-0000-0001-{n:012x}" for n in range(BATCH)],
    "queues": ["default"] * BATCH,
    "tasks": ["task"] * BATCH,
    "payloads": ["{}"] * BATCH,
    "ranks": [0] * BATCH,
    **dict.fromkeys(
        (
            "run_ats",
            "delays",
            "max_attempts",
            "options",
            "tags",
            "unique_keys",
            "key_for",
            "expires_ats",
            "expires_ins",
        ),
        [None] * BATCH,
    ),
    "have_client_ids": [False] * BATCH,
    **dict.fromkeys(("partitions", "weights", "are_waiting")),
    "keys": [f"key {n}" for n in range(BATCH)],
}
UNIFORM = COLUMNS | {
    "payloads": "\x1f".join(["{}"] * BATCH),
    "queue": "default",
    "task": "task",
    "rank": 0,
    "run_at": None,
    "delay": None,
    "max_attempts": 5,
    "options": None,
    "has_client_id": False,
}
VALUES: dict[str, Any] = {
    **EVERYTHING,
    "now": NOW,
    "ids": ids(2),
    "id": ids(2)[0],
    "queues": QUEUES,
    "slots": [BATCH] * len(QUEUES),
    "ranks": [START.rank] * len(QUEUES),
    "run_ats": [START.run_at] * len(QUEUES),
    "seqs": [START.seq] * len(QUEUES),
    "any_queue": False,
    "promote": False,
    "skip_due_until": -1,
    "max_must_start": 10,
    "limit": BATCH,
    "worker": "worker",
    "lease_for": 30_000_000,
    "alive_for": 30_000_000,
    "has_deltas": False,
    "queue": None,
    "others": BATCH,
    **dict.fromkeys(("max_count", "fill_time", "max_tier"), 1),
    "max_counts": [BATCH] * len(QUEUES),
    "aged": 1_000_000,
    "key": "key of nothing",
    "error": None,
    "results": [None] * BATCH,
    "states": [3] * BATCH,
    **dict.fromkeys(("reasons", "errors", "error_groups", "tracebacks", "delays"), [None] * BATCH),
    "refunds": [False] * BATCH,
    "lease_expireds": [False] * BATCH,
    "workers": ["worker"] * BATCH,
    "state": 5,
    "span": 0,
    "ignore_lifetime": False,
    "force": False,
    "payload": None,
    "uncancelled": True,
    "before": "ffffffff-ffff-ffff-ffff-ffffffffffff",
    **dict.fromkeys(("running", "succeeded", "failed", "concurrency", "pid", "interval_us", "burst"), 1),
    "host": "here",
    "name": "schedule-7",
    "after": "schedule-5",
    "expected": 1,
    "next_at": NOW,
    "document": "{}",
    **dict.fromkeys(("task", "shares", "weights")),
    **dict.fromkeys(("per_key", "retagged", "will_expire"), True),
    **dict.fromkeys(("rank", "run_at", "delay", "options"), None),
    "tags": ["t"],
    "expires_at": NOW,
    "expires_in": None,
}
"""Default parameters of the statements; a case may replace them."""
OWN = {
    "insert_jobs": COLUMNS,
    "insert_uniform_jobs": UNIFORM,
    "insert_one_job": UNIFORM | {"channel": "somewhere", "notification": "queue:default"},
    "insert_keyed_jobs": COLUMNS,
    "heartbeat": {"queues": "default", "version": None, "memory": 1 << 30},
    "oldest": {"queue": "default"},
    "overtaken": {"queue": "default", "margin": 100},
    "newest_dead": {"queue": "default"},
    "jobs_to_assign": {"queue": "default"},
    "find": {"states": None, "after": ids(0)[0]},
    "find_tagged": {"states": None},
    "count_tagged": {"states": None, "tag": None, "of_tag": "tagged", "limit": None},
    "choose_again": {"states": [6]},
    "deletable": {"states": [6]},
    **{name: {"states": [6], "state": 6} for name in ("find_ended", "choose_ended", "count_ended")},
}


def fill(connection: psycopg.Connection[Any], schema: str, *states: int) -> None:
    for state in states:
        most = ROWS if state in (0, 1, 2, 4, 5, 6) else ROWS // 10
        words = {"schema": schema, "rows": ROWS, "now": NOW, "state": state, "block": state, "most": most}
        connection.execute(FILL.format(lost_leases=0, **words).encode())
        if state == 0:
            for lost_leases in (1, 2):
                again = {"block": 7 + lost_leases, "most": SUSPECTS, "lost_leases": lost_leases}
                connection.execute(FILL.format(**words | again).encode())


def make(connection: psycopg.Connection[Any], schema: str, kept: KeptStatistics) -> None:
    """Fill a store, and keep the statistics of its tables at four moments: those of STATISTICS."""
    analyse = f"analyze {', '.join(f'{schema}.{table}' for table in sorted(LARGE_TABLES))}".encode()
    kept.save("never analysed")
    connection.execute(analyse)
    kept.save("empty")
    fill(connection, schema, 5, 6, 7)
    connection.execute(analyse)
    kept.save("idle")
    fill(connection, schema, 0, 1, 2, 3, 4)
    connection.execute(FILL_LIMITED.format(schema=schema, now=NOW).encode())
    connection.execute(FILL_REST.format(schema=schema, now=NOW).encode())
    connection.execute(analyse)
    kept.save("full")


async def migrated(url: str) -> None:
    store = open_store(url, now=ManualClock())
    await store.open()
    await store.close()


@contextmanager
def filled_schema(major: int) -> Iterator[tuple[str, KeptStatistics]]:
    """A full store on the shared server, and what its statistics were when its tables were last analysed."""
    server = postgres.shared(major)
    with server.fresh_schema() as schema:
        asyncio.run(migrated(server.url(schema=schema)))
        with closing(KeptStatistics(major, schema)) as kept:
            with connected(major) as connection:
                make(connection, schema, kept)
            yield schema, kept


def connected(major: int) -> psycopg.Connection[Any]:
    """A new connection, which has planned nothing yet."""
    return psycopg.connect(postgres.shared(major).url(), autocommit=True)


class Explained:
    """The plan of one execution, with what it met on its way."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str, case: Case) -> None:
        query = number_parameters({case.name: STATEMENTS[case.name]}, schema)[case.name]
        values = {**VALUES, **OWN.get(case.name, {}), **case.values}
        connection.execute("begin")
        connection.execute("set local jit = off")
        connection.execute(f"prepare tried as {query.sql.replace('?', '$1')}".encode())
        names = query.names or ("text",) * query.sql.count("?")  # a statement for a caller's connection
        arguments = sql.SQL(", ").join(sql.Literal(literal(values[name])) for name in names)
        run = sql.SQL("execute tried({})" if names else "execute tried").format(arguments)
        options = sql.SQL("explain (analyze, buffers, format json) ")
        (document,) = connection.execute(options + run).fetchone() or ()
        connection.execute("rollback")
        connection.execute("deallocate tried")
        self.nodes = list(flattened(document[0]["Plan"]))
        self.pages = document[0]["Plan"]["Shared Hit Blocks"] + document[0]["Plan"]["Shared Read Blocks"]

    def faults(self, bounds: tuple[str, ...]) -> list[str]:
        found = [f"no condition {bound}" for bound in bounds if not any(holds(node, bound) for node in self.nodes)]
        for node in self.nodes:
            loops = node["Actual Loops"]
            kind = f"{node['Node Type']} {node.get('Index Name', node.get('Relation Name', ''))}"
            if node["Node Type"] == "Seq Scan" and node["Relation Name"] in LARGE_TABLES:
                found.append(kind)
            removed = sum(node[key] for key in node if key.startswith("Rows Removed by")) * loops
            if removed > BATCH:
                found.append(f"{kind} removed {removed} rows: {node}")
            if node.get("Relation Name") in LARGE_TABLES and node["Actual Rows"] * loops > 4 * BATCH:
                found.append(f"{kind} met {node['Actual Rows'] * loops} rows")
        return found + [f"{self.pages} pages"] * (self.pages > PAGES)


def literal(value: Any) -> str | None:
    """As the text of a parameter of any type."""
    if isinstance(value, list):
        return "{" + ",".join("null" if each is None else f'"{each}"' for each in value) + "}"
    return None if value is None else str(value)


def flattened(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from flattened(child)


def holds(node: dict[str, Any], bound: str) -> bool:
    """Returns True for a scan of the index in ``bound`` with a condition on each of its columns."""
    index, _, columns = bound.removesuffix(")").partition("(")
    if index == "tid":
        return "ctid" in node.get("TID Cond", "")
    condition = node.get("Index Cond", "")
    wanted = [column for column in columns.split(", ") if column]
    return node.get("Index Name") == index and all(re.search(rf"\b{column}\b", condition) for column in wanted)


def statement_faults(major: int, schema: str, cases: Sequence[Case], *more: str) -> dict[str, list[str]]:
    """Returns the reads of statements beyond their batch, in either mode. ``more``: tables not to be scanned either."""
    faults = {}
    for mode in MODES:
        with connected(major) as connection:
            connection.execute(f"set plan_cache_mode = {mode}".encode())
            for number, case in enumerate(cases):
                explained = Explained(connection, schema, case)
                found = explained.faults(case.bounds)
                found += [
                    f"scan of {node['Relation Name']}"
                    for node in explained.nodes
                    if node["Node Type"] == "Seq Scan" and node["Relation Name"] in more
                ]
                if found:
                    faults[f"{mode} {number} {case.name}"] = found
    return faults


def function_faults(
    major: int, schema: str, calls: Mapping[str, tuple[str, list[Any]]], tables: Sequence[str], most: int
) -> dict[str, list[str]]:
    """The tables that a call scans as a whole, or reads more than ``most`` rows of, each on a new connection."""
    faults = {}
    for name, (call, values) in calls.items():
        with connected(major) as connection:
            for _ in range(7):  # the plans of its statements change after some calls
                connection.execute("begin")
                before = read_rows(connection, schema, tables)
                connection.execute(call.encode(), values or None)
                after = read_rows(connection, schema, tables)
                connection.execute("rollback")
                found = [f"scan of {table}" for table in after if after[table][0] > before[table][0]]
                rows = {table: after[table][1] - before[table][1] for table in after}
                found += [f"{number} rows of {table}" for table, number in rows.items() if number > most]
                if found:
                    faults[name] = found
    return faults


def read_rows(connection: psycopg.Connection[Any], schema: str, tables: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Sequential scans, and rows fetched through indexes, by table."""
    rows = connection.execute(
        "select relname, seq_scan, coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables "
        "where schemaname = %s and relname = any(%s)",
        [schema, list(tables)],
    )
    return {table: (scans, fetched) for table, scans, fetched in rows}
