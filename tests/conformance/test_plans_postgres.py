"""The hot statements stay on their indexes: with any statistics, planned with values or without, among 50,000 rows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.resources import files
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

from holdfast.core.clock import ManualClock
from holdfast.stores import open_store
from holdfast.stores.common.named_sql import load_statements
from holdfast.stores.postgres.cursors import START
from holdfast.stores.postgres.encoding import EVERYTHING, number_parameters
from holdfast.stores.postgres.queueing import NO_JOB
from tests.conformance.support import ending, new_job, put, take
from tests.support import postgres
from tests.support.servers import until
from tests.support.stores import migrations

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
LARGE_TABLES = {"job", "key", "tag", "expiry", "attempt", "line", "schedule", "partition", "partition_inbox", "bucket"}

FILL = """
insert into {schema}.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims,
                          lost_leases, tier, keyed, tagged, worker, lease_until, ended_at, expires_at)
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
                          lease_until, keyed, tagged)
select ('00000000-0000-0000-0003-' || lpad(to_hex(n), 12, '0'))::uuid,
       case when n % 2 = 1 then 'default' else 'queue-2' end, 'task', '{{}}',
       case when n % 20 = 0 then 2 else 0 end, n % 3, {now} - n, {now} - 1000000, 3,
       'key=' || case when n < 5000 then 1 else n end || repeat(chr(31) || 'late=1', n / 20001), 'worker',
       {now} + 1000000 + n, true, true from generate_series(1, 25000) n;
delete from {schema}.partition_inbox;
insert into {schema}.partition (queue, name, turn, blocked_until)
select queue, partition, min(seq), case when min(seq) % 2 = 0 then {now} + min(seq) end
from {schema}.job where partition is not null and state = 0 group by queue, partition;
insert into {schema}.partition_inbox (queue, name) select 'queue-4', 'key=' || n from generate_series(1, 10000) n;
insert into {schema}.bucket (name, full_at) select 'key=' || n, {now} + n from generate_series(1, 20000) n;
insert into {schema}.job_limit (name, revision, queue, keyed, concurrency, interval_us, burst, document)
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
insert into {schema}.history (step, start, queue, state, number, run_us, longest_us)
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


QUEUES = ["default", "queue-2", "queue-4", "nobody's"]
BY_ID = "job_pkey(id)"
CLAIM = ("job_ready(queue, tier, rank, run_at, seq)", "job_quarantined(queue)", "tid(ctid)")
RUNNING = {"ids": ids(2), "claims": [1] * BATCH}
LINES: dict[str, Any] = {"ordinals": list(range(1, BATCH + 1)), "numbers": [2] * BATCH, "agos": [0] * BATCH}
LINES |= {"levels": ["info"] * BATCH, "texts": ["said"] * BATCH, "fields": [None] * BATCH}
STEPS: dict[str, Any] = {"workers": [None] * BATCH, "numbers": [1] * BATCH, "in_orders": [True] * BATCH}
STEP: dict[str, Any] = {"number": 1, "in_order": True, "name": "charge", "result": None}
STEPS |= {"names": ["charge"] * BATCH, "results": [None] * BATCH}
HISTORY = {"mark": NOW - BATCH, "until": NOW, "lag": 0}
ANYWHERE = {"anywhere": True, "promote": True}
FEED = {"low": 0, "at": 0, "job": NO_JOB, "claims": 0, "seen": "3:3:", "shown": f"{1 << 31}:{1 << 31}:", "top": 1 << 31}
"""Everything there is, for who has seen nothing."""
CASES = [
    Case("claim", (*CLAIM, "job_due(queue)"), {"max_must_start": 0}),
    Case("claim", ("job_ready(queue, tier)",)),
    Case("claim_with_suspects", (*CLAIM, "job_due(queue)")),
    Case("claim", (*CLAIM, "job_due(queue)"), {"ranks": [1] * 4, "run_ats": [NOW - 5000] * 4, "seqs": [9] * 4}),
    Case("claim", ("job_ready(queue, tier, rank, run_at, seq)", "job_due_anywhere()"), {"anywhere": True}),
    Case("claim", ("job_due_anywhere()",), {"anywhere": True, "promote": True}),
    Case("ready_queues", ("job_ready(queue)",)),
    Case("claim_quarantined", ("job_quarantined(queue)", BY_ID)),
    Case("claim_delivered", (BY_ID, "job_due(queue)", "job_quarantined(queue)"), {"ids": ids(0)}),
    Case("claim_delivered", (BY_ID, "job_due_anywhere()"), {"ids": ids(0), "anywhere": True}),
    Case("claim_delivered", (BY_ID, "job_due(queue)"), {"ids": [NO_JOB]}),
    Case("places", (BY_ID,)),
    Case("depths", ("job_ready(queue, tier)",)),
    Case("oldest", ("job_ready(queue, tier)",)),
    Case("passed", (BY_ID, "job_ready(queue, tier, rank, run_at)"), {"ids": ids(0)}),
    Case("passed", (BY_ID, "job_ready(queue, tier, rank)"), {"ids": ids(0), "margin": ROWS}),
    Case("dead_queues", ("job_dead(queue)",)),
    Case("newest_dead", ("job_dead(queue)",)),
    Case("promote_queues", ("job_due(queue, run_at)", BY_ID)),
    Case("promote_anywhere", ("job_due_anywhere(run_at)", BY_ID)),
    Case("promote_delivered", (BY_ID,), {"ids": ids(1)}),
    Case("mark_unreadable", (BY_ID,)),
    Case("insert_jobs", ()),
    Case("insert_uniform_jobs", ()),
    Case("insert_lone_job", (), {"ids": [f"00000000-0000-0000-0002-{0:012x}"], "payloads": ["{}"]}),
    Case("insert_keyed_jobs", ()),
    Case("key_owner", ("key_pkey(key)",)),
    Case("unique_keys_of", (BY_ID,)),
    Case("key_owners", ("key_pkey(key)",), {"keys": ["a", "b"]}),
    *[Case(f"settle_{name}", (BY_ID,), RUNNING) for name in ("succeeded", "limited_succeeded", "rest")],
    Case("any_limited", ("partition_pkey(queue)", "partition_inbox_name(queue)", "job_ready(queue)")),
    Case("settle_succeeded", (BY_ID,), RUNNING | {"results": None}),
    Case("record", (BY_ID,), RUNNING | LINES),
    Case("save_steps", (BY_ID,), RUNNING | STEPS),
    Case("save_step", (BY_ID,), {"id": ids(2)[0], "claims": 1, "worker": None, **STEP}),
    Case("steps", ("step_pkey(job_id)",)),
    Case("states_of", (BY_ID,)),
    Case("beat", (BY_ID,), RUNNING),
    Case("expired", ("job_lease(lease_until)",)),
    Case("history_mark", ("history_pkey(step)",)),
    Case("history_begin", (), {"first": 1}),
    Case("history_until", ("job_ended(state, ended_at)",), HISTORY),
    Case("history_add", ("job_ended(state, ended_at)",), HISTORY),
    Case("history_move", ("history_pkey(step)",), HISTORY),
    Case("prune_history", ("history_pkey(step, start)",), {"step": 60_000_000, "kept": 20_000 - BATCH}),
    Case("history", ("history_pkey(step, start)",), {"step": 60_000_000, "since": NOW - BATCH}),
    Case("prune_jobs", ("job_ended(state, ended_at)",), {"span": ROWS // 2}),
    Case(
        "delete_jobs",
        (BY_ID, "attempt_pkey(job_id)", "tag_of(job_id)", "line_pkey(job_id)", "expiry_pkey(job_id)"),
        {"ids": ids(5)},
    ),
    Case("delete_keys_of", ("key_of(job_id)",), {"ids": ids(5), "whatever": True}),
    Case("prune_keys", ("key_over(keep_until)",)),
    Case("outlived_keys", ("key_over(keep_until)",)),
    Case("cancel_unstarted", (BY_ID,), {"ids": ids(0)}),
    Case("cancel_running", (BY_ID,), {"ids": ids(2)}),
    Case("expire_jobs", ("expiry_due(expires_at)", "expiry_pkey(job_id)", BY_ID)),
    Case("rewrite_waiting", (BY_ID,), {"id": ids(0)[0]}),
    Case("rewrite_waiting", (BY_ID,), {"id": ids(0)[0], "delay": 5, "queue": "other"}),
    Case("drop_tags", ("tag_of(job_id)",)),
    Case("add_tags", ()),
    Case("set_expiry", ()),
    Case("replay", (BY_ID,), {"ids": ids(6), "laters": [0] * BATCH}),
    Case(
        "figures",
        (
            "job_ended(state, ended_at)",
            "job_due_anywhere()",
            "job_lease()",
            "job_ready()",
            "job_waiting()",
            "attempt_pkey(job_id)",
        ),
        {"recent": 1_000_000, "max_count": BATCH},
    ),
    Case("endings", ("job_ended(state, ended_at)", "attempt_retried(ended_at)"), FEED),
    Case("transactions", (), {"top": 1 << 31}),
    Case(
        "endings",
        ("job_ended(state, ended_at)", "attempt_retried(ended_at)"),
        FEED | {"low": NOW - ROWS // 2, "at": NOW - ROWS // 2},
    ),
    Case("deletable", (BY_ID,), {"ids": ids(6)}),
    Case("lock_jobs", (BY_ID,)),
    Case("choose_again", (BY_ID,), {"ids": ids(6)}),
    Case("get", (BY_ID, "key_of(job_id)")),
    Case("get_many", (BY_ID, "key_of(job_id)"), {"ids": ids(2)}),
    Case("outlines", (BY_ID,), {"ids": ids(2)}),
    Case("attempts", ("attempt_pkey(job_id)",)),
    Case("lines", ("line_pkey(job_id, claims, number)",), {"claims": 0, "number": 0}),
    Case("over", (BY_ID,)),
    Case("stuck", ("job_lease(lease_until)",)),
    Case("unnamed_queue_jobs", ("job_ready(queue)", "job_waiting(queue)", "job_due(queue)")),
    Case("oldest_ready", ("job_ready(queue, tier, rank)",)),
    Case("overview_queues", ("job_ready(queue)", "job_waiting(queue)", "job_due(queue)")),
    Case(
        "overview",
        ("job_ready(queue)", "job_waiting(queue)", "job_due(queue)", "job_ended(state, ended_at)"),
        {"max_count": BATCH, "ended": [5, 6, 7], "recent": 1_000_000},
    ),
    Case("replace_schedule", ("schedule_pkey(name)",)),
    Case("remove_schedule", ("schedule_pkey(name)",)),
    Case("schedule", ("schedule_pkey(name)",)),
    Case("schedules", ("schedule_pkey(name)",)),
    Case("due_schedules", ("schedule_due(next_at)",)),
    Case("next_schedule", ("schedule_due(next_at)",)),
    Case("jobs_without_partition", ("job_ready(queue, tier)",)),
    Case("jobs_to_assign", ("job_pkey(id)",), {"after": ids(1)[0]}),
    Case("partition_facts", (BY_ID,)),
    Case("set_partitions", (BY_ID,), {"ids": ids(0), "versions": ["1"] * BATCH, "partitions": ["a"] * BATCH}),
    Case("replace_limit", (), {"name": "key"}),
    Case("remove_limit", (), {"name": "key"}),
    Case("pause_buckets", (), {"buckets": ["key=1", "key=2"]}),
    Case("find", ("job_pkey(id)", "key_of(job_id)")),
    Case("find", ("job_pkey(id)",), {"before": ids(6)[0]}),
    Case("find", ("job_pkey(id)",), {"tag": "tagged"}),
    Case("choose", (), {"states": [0, 1]}),
    Case("find_ended", ("job_unsuccessful(state, id)", "key_of(job_id)")),
    Case("choose_ended", ("job_unsuccessful(state, id)",)),
    Case("count_ended", ("job_unsuccessful(state, id)",), {"limit": BATCH}),
]

COLUMNS = {
    "ids": [f"00000000-0000-0000-0001-{n:012x}" for n in range(BATCH)],
    "queues": ["default"] * BATCH,
    "tasks": ["task"] * BATCH,
    "payloads": ["{}"] * BATCH,
    "ranks": [0] * BATCH,
    **dict.fromkeys(
        ("run_ats", "delays", "max_attempts", "options", "tags", "policies", "keep_for", "expires_ats", "expires_ins"),
        [None] * BATCH,
    ),
    "givens": [False] * BATCH,
    **dict.fromkeys(("partitions", "weights", "are_waiting")),
    "keys": [f"key {n}" for n in range(BATCH)],
}
UNIFORM = COLUMNS | {
    "queue": "default",
    "task": "task",
    "rank": 0,
    "run_at": None,
    "delay": None,
    "max_attempts": 5,
    "options": None,
    "given": False,
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
    "anywhere": False,
    "promote": False,
    "max_must_start": 10,
    "limit": BATCH,
    "worker": "worker",
    "lease_for": 30_000_000,
    "queue": None,
    "others": BATCH,
    **dict.fromkeys(("max_count", "fill_time", "max_tier"), 1),
    "max_counts": [BATCH] * len(QUEUES),
    "aged": 1_000_000,
    "key": "key of nothing",
    "error": None,
    "results": [None] * BATCH,
    "states": [3] * BATCH,
    **dict.fromkeys(("reasons", "errors", "tracebacks", "delays"), [None] * BATCH),
    "refunds": [False] * BATCH,
    "lease_expireds": [False] * BATCH,
    "workers": ["worker"] * BATCH,
    "state": 5,
    "span": 0,
    "whatever": False,
    "force": False,
    "payload": None,
    "unasked": True,
    "before": "ffffffff-ffff-ffff-ffff-ffffffffffff",
    **dict.fromkeys(("running", "succeeded", "failed", "concurrency", "pid", "interval_us", "burst"), 1),
    "host": "here",
    "name": "schedule-7",
    "after": "schedule-5",
    "expected": 1,
    "next_at": NOW,
    "document": "{}",
    **dict.fromkeys(("task", "shares", "weights")),
    **dict.fromkeys(("keyed", "retagged", "will_expire"), True),
    **dict.fromkeys(("rank", "run_at", "delay", "options"), None),
    "tags": ["t"],
    "expires_at": NOW,
    "expires_in": None,
}
"""What the statements are given, unless their case says otherwise."""
OWN = {
    "insert_jobs": COLUMNS,
    "insert_uniform_jobs": UNIFORM,
    "insert_lone_job": UNIFORM | {"channel": "somewhere", "news": "queue:default"},
    "insert_keyed_jobs": COLUMNS,
    "beat": {"queues": "default"},
    "oldest": {"queue": "default"},
    "passed": {"queue": "default", "margin": 100},
    "newest_dead": {"queue": "default"},
    "jobs_to_assign": {"queue": "default"},
    "find": {"states": None},
    "choose_again": {"states": [6]},
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


def make(connection: psycopg.Connection[Any], schema: str, statistics: str) -> None:
    """A full store in which the tables were last analysed as ``statistics`` says."""
    analyse = f"analyze {', '.join(f'{schema}.{table}' for table in sorted(LARGE_TABLES))}".encode()
    for table in LARGE_TABLES:
        connection.execute(f"alter table {schema}.{table} set (autovacuum_enabled = off)".encode())
    if statistics == "empty":
        connection.execute(analyse)
    fill(connection, schema, 5, 6, 7)
    if statistics == "idle":
        connection.execute(analyse)
    fill(connection, schema, 0, 1, 2, 3, 4)
    connection.execute(FILL_LIMITED.format(schema=schema, now=NOW).encode())
    connection.execute(FILL_REST.format(schema=schema, now=NOW).encode())
    if statistics == "full":
        connection.execute(analyse)


async def migrated(url: str) -> None:
    store = open_store(url, now=ManualClock())
    await store.open()
    await store.close()


class Plans:
    """Schemas by their server and their statistics, made when they are first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._schemas: dict[tuple[int, str], str] = {}

    def connect(self, major: int, statistics: str) -> tuple[str, psycopg.Connection[Any]]:
        server = postgres.shared(major)
        connection = self._stack.enter_context(psycopg.connect(server.url(), autocommit=True))
        if (major, statistics) not in self._schemas:
            schema = self._schemas[major, statistics] = self._stack.enter_context(server.fresh_schema())
            asyncio.run(migrated(server.url(schema=schema)))
            make(connection, schema, statistics)
        return self._schemas[major, statistics], connection


@pytest.fixture(scope="module")
def plans() -> Iterator[Plans]:
    with ExitStack() as stack:
        yield Plans(stack)


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
    """Whether this is a scan of the index ``bound`` names, with a condition on each of its columns."""
    index, _, columns = bound.removesuffix(")").partition("(")
    if index == "tid":
        return "ctid" in node.get("TID Cond", "")
    condition = node.get("Index Cond", "")
    wanted = [column for column in columns.split(", ") if column]
    return node.get("Index Name") == index and all(re.search(rf"\b{column}\b", condition) for column in wanted)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("major", [postgres.MAIN, postgres.FLOOR])
def test_every_hot_statement_reads_only_what_its_batch_needs(
    plans: Plans, major: int, statistics: str, mode: str
) -> None:
    schema, connection = plans.connect(major, statistics)
    connection.execute(f"set plan_cache_mode = {mode}".encode())
    faults = {}
    for number, case in enumerate(CASES):
        found = Explained(connection, schema, case).faults(case.bounds)
        if found:
            faults[f"{number} {case.name}"] = found
    assert faults == {}


def test_a_page_costs_the_same_however_deep(plans: Plans) -> None:
    schema, connection = plans.connect(postgres.MAIN, "full")
    connection.execute("set plan_cache_mode = force_generic_plan")
    depths = [VALUES["before"], *(ids(state, ROWS // 20)[-1] for state in (6, 5, 2, 1, 0))]
    pages = [Explained(connection, schema, Case("find", (), {"before": before})).pages for before in depths]
    assert max(pages) < 1.5 * min(pages)


# ── what a plain job writes ───────────────────────────────────────────────────────────────────────────────────────
def index_entries(connection: psycopg.Connection[Any], schema: str) -> int:
    """How many entries the rows of the job table have in its indexes: one wherever an index is for such a row."""
    predicates = connection.execute(
        "select coalesce(pg_get_expr(indpred, indrelid), 'true') from pg_index where indrelid = %s::regclass",
        [f"{schema}.job"],
    ).fetchall()
    counts = [f"(select count(*) from {schema}.job where {each})" for (each,) in predicates]  # noqa: S608 - our own
    (total,) = connection.execute(f"select {' + '.join(counts)}".encode()).fetchone() or ()
    return int(total)


def writes(connection: psycopg.Connection[Any], schema: str) -> dict[str, tuple[int, int, int]]:
    """Rows inserted, updated and deleted, by table; tables without writes are left out."""
    rows = connection.execute(
        "select relname, n_tup_ins, n_tup_upd, n_tup_del from pg_stat_user_tables where schemaname = %s", [schema]
    )
    return {name: counts for name, *numbers in rows if any(counts := tuple(numbers))}


def test_plain_job_writes_exactly_one_row_three_times() -> None:
    """Each write with two index entries: its id, and the one question that can be asked of such a row."""
    server = postgres.shared()
    with server.fresh_schema() as schema, psycopg.connect(server.url(), autocommit=True) as connection:
        entries = asyncio.run(live(server.url(schema=schema), lambda: index_entries(connection, schema)))
        expected = {
            "job": (BATCH, 2 * BATCH, 0),
            "identity": (1, 0, 0),
            "migration": (len(migrations("postgres")), 0, 0),
        }
        # Its connections report what they did as they end.
        until(lambda: writes(connection, schema) == expected, f"{expected}")
    assert entries == [2 * BATCH] * 3


async def live(url: str, count: Callable[[], int]) -> list[int]:
    """Submit, claim and settle a batch of plain jobs; what ``count`` says after each of the three."""
    store = open_store(url)
    await store.open()
    await put(store, *[new_job() for _ in range(BATCH)])
    counts = [count()]
    jobs = await take(store, BATCH)
    counts.append(count())
    answers = await store.queueing.settle([ending(job) for job in jobs])
    counts.append(count())
    await store.close()
    assert [answer.accepted for answer in answers] == [True] * BATCH
    return counts
