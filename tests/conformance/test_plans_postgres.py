"""The hot statements stay on their indexes: with any statistics, planned with values or without, among 50,000 rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from holdfast.stores import open_store
from holdfast.stores.postgres.queueing import NO_JOB
from tests.conformance import plans_limits, plans_workflow
from tests.conformance.plans import (
    BATCH,
    BY_ID,
    LARGE_TABLES,
    NOW,
    ROWS,
    RUNNING,
    STATISTICS,
    VALUES,
    Case,
    Explained,
    connected,
    filled_schema,
    function_faults,
    ids,
    statement_faults,
)
from tests.conformance.support import ending, new_job, put, take
from tests.support import postgres
from tests.support.servers import until
from tests.support.stores import migrations

CLAIM = ("job_ready(queue, tier, rank, run_at, seq)", "job_quarantined(queue)", "tid(ctid)")
LINES: dict[str, Any] = {"ordinals": list(range(1, BATCH + 1)), "numbers": [2] * BATCH, "agos": [0] * BATCH}
LINES |= {"levels": ["info"] * BATCH, "texts": ["said"] * BATCH, "fields": [None] * BATCH}
STEPS: dict[str, Any] = {"workers": [None] * BATCH, "numbers": [1] * BATCH, "are_ordered": [True] * BATCH}
STEP: dict[str, Any] = {"number": 1, "is_ordered": True, "name": "charge", "result": None}
STEPS |= {"names": ["charge"] * BATCH, "results": [None] * BATCH}
HISTORY = {"counted_until": NOW - BATCH, "until": NOW, "lag": 0}
ANY_QUEUE = {"any_queue": True, "promote": True}
FEED = {"low": 0, "at": 0, "job": NO_JOB, "claims": 0, "seen": "3:3:", "shown": f"{1 << 31}:{1 << 31}:", "top": 1 << 31}
"""Everything there is, for who has seen nothing."""
CASES = [
    Case("claim", (*CLAIM, "job_due(queue)"), {"max_must_start": 0}),
    Case("claim", ("job_ready(queue, tier)",)),
    Case("claim_with_suspects", (*CLAIM, "job_due(queue)")),
    Case("claim", (*CLAIM, "job_due(queue)"), {"ranks": [1] * 4, "run_ats": [NOW - 5000] * 4, "seqs": [9] * 4}),
    Case("claim", ("job_ready(queue, tier, rank, run_at, seq)", "job_due_any_queue()"), {"any_queue": True}),
    Case("claim", ("job_due_any_queue()",), {"any_queue": True, "promote": True}),
    Case("ready_queues", ("job_ready(queue)",)),
    Case("claim_quarantined", ("job_quarantined(queue)", BY_ID)),
    Case("claim_ids", (BY_ID, "job_due(queue)", "job_quarantined(queue)"), {"ids": ids(0)}),
    Case("claim_ids", (BY_ID, "job_due_any_queue()"), {"ids": ids(0), "any_queue": True}),
    Case("claim_ids", (BY_ID, "job_due(queue)"), {"ids": [NO_JOB]}),
    Case("queues_and_states", (BY_ID,)),
    Case("depths", ("job_ready(queue, tier)",)),
    Case("oldest", ("job_ready(queue, tier)",)),
    Case("overtaken", (BY_ID, "job_ready(queue, tier, rank, run_at)"), {"ids": ids(0)}),
    Case("overtaken", (BY_ID, "job_ready(queue, tier, rank)"), {"ids": ids(0), "margin": ROWS}),
    Case("dead_queues", ("job_dead(queue)",)),
    Case("newest_dead", ("job_dead(queue)",)),
    Case("promote_queues", ("job_due(queue, run_at)", BY_ID)),
    Case("promote_any_queue", ("job_due_any_queue(run_at)", BY_ID)),
    Case("promote_ids", (BY_ID,), {"ids": ids(1)}),
    Case("mark_unreadable", (BY_ID,), {"claims": 1}),
    Case("insert_jobs", ()),
    Case("insert_uniform_jobs", ()),
    Case("insert_one_job", (), {"id": f"00000000-0000-0000-0002-{0:012x}", "payload": "{}"}),
    Case("insert_keyed_jobs", ()),
    Case("key_holder", ("key_pkey(key)",)),
    Case("unique_keys_of", (BY_ID,)),
    Case("key_holders", ("key_pkey(key)",), {"keys": ["a", "b"]}),
    *[Case(f"settle_{name}", (BY_ID,), RUNNING) for name in ("succeeded", "limited_succeeded", "rest")],
    Case("settle_reprioritized", (BY_ID,), RUNNING | {"ranks": [1] * BATCH}),
    Case("any_limited", ("partition_pkey(queue)", "partition_inbox_name(queue)", "job_ready(queue)")),
    Case("settle_succeeded", (BY_ID,), RUNNING | {"results": None}),
    Case("append_logs", (BY_ID,), RUNNING | LINES),
    Case("save_steps", (BY_ID,), RUNNING | STEPS),
    Case("save_step", (BY_ID,), {"id": ids(2)[0], "claims": 1, "worker": None, **STEP}),
    Case("steps", ("step_pkey(job_id)",)),
    Case("states_of", (BY_ID,)),
    Case("heartbeat", (BY_ID,), RUNNING),
    Case("expired_leases", ("job_lease(lease_until)",)),
    Case("history_mark", ("history_pkey(length)",)),
    Case("history_begin", (), {"first": 1}),
    Case("history_until", ("job_ended(state, ended_at)",), HISTORY),
    Case("history_add", ("job_ended(state, ended_at)",), HISTORY),
    Case("history_move", ("history_pkey(length)",), HISTORY),
    Case("prune_history", ("history_pkey(length, start)",), {"length": 60_000_000, "retention": 20_000 - BATCH}),
    Case("history", ("history_pkey(length, start)",), {"length": 60_000_000, "since": NOW - BATCH}),
    Case("prune_jobs", ("job_ended(state, ended_at)",), {"span": ROWS // 2}),
    Case(
        "delete_jobs",
        (BY_ID, "attempt_pkey(job_id)", "tag_of(job_id)", "line_pkey(job_id)", "expiry_pkey(job_id)"),
        {"ids": ids(5)},
    ),
    Case("delete_keys_of", ("key_of(job_id)",), {"ids": ids(5), "ignore_lifetime": True}),
    Case("prune_keys", ("key_over(keep_until)",)),
    Case("detach_expired_keys", ("key_over(keep_until)",)),
    Case("cancel_unstarted", (BY_ID,), {"ids": ids(0)}),
    Case("cancel_running", (BY_ID,), {"ids": ids(2)}),
    Case("expire_jobs", ("expiry_due(expires_at)", "expiry_pkey(job_id)", BY_ID)),
    Case("rewrite_unstarted", (BY_ID,), {"id": ids(0)[0]}),
    Case("rewrite_unstarted", (BY_ID,), {"id": ids(0)[0], "delay": 5, "queue": "other"}),
    Case("drop_tags", ("tag_of(job_id)",)),
    Case("add_tags", ()),
    Case("set_expiry", ()),
    Case("replay", (BY_ID,), {"ids": ids(6), "laters": [0] * BATCH}),
    Case(
        "stats",
        (
            "job_ended(state, ended_at)",
            "job_due_any_queue()",
            "job_lease()",
            "job_ready()",
            "job_waiting()",
            "attempt_pkey(job_id)",
        ),
        {"recent": 1_000_000, "max_count": BATCH},
    ),
    Case("events", ("job_ended(state, ended_at)", "attempt_retried(ended_at)"), FEED),
    Case("failed_jobs", ("job_ended(state, ended_at)", "attempt_retried(ended_at)", BY_ID), {"limit": BATCH}),
    Case("running_transactions", (), {"top": 1 << 31}),
    Case(
        "events",
        ("job_ended(state, ended_at)", "attempt_retried(ended_at)"),
        FEED | {"low": NOW - ROWS // 2, "at": NOW - ROWS // 2},
    ),
    Case("deletable", (BY_ID,), {"ids": ids(6)}),
    Case("lock_jobs", (BY_ID,)),
    Case("choose_again", (BY_ID,), {"ids": ids(6)}),
    Case("get", (BY_ID, "key_of(job_id)")),
    Case("get_many", (BY_ID, "key_of(job_id)"), {"ids": ids(2)}),
    Case("summaries", (BY_ID,), {"ids": ids(2)}),
    Case("attempts", ("attempt_pkey(job_id)",)),
    Case("logs", ("line_pkey(job_id, claims, number)",), {"claims": 0, "number": 0}),
    Case("ended_or_deleted", (BY_ID,)),
    Case("stuck", ("job_lease(lease_until)",)),
    Case("nameless_queue_jobs", ("job_ready(queue)", "job_waiting(queue)", "job_due(queue)")),
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
    Case("bucket_use", ("bucket_pkey(name)",), {"buckets": ["key=1", "key=2"]}),
    Case("server_time", ()),
    Case("find", ("job_pkey(id)", "key_of(job_id)")),
    Case("find", ("job_pkey(id)",), {"before": ids(6)[0]}),
    Case("find", ("job_pkey(id)",), {"tag": "tagged"}),
    Case("find", ("job_pkey(id)",), {"before": ids(6)[-1], "after": ids(6)[0]}),
    Case("part_start", ("job_pkey(id)",), {"size": BATCH}),
    Case("find_tagged", ("tag_pkey(tag, job_id)", BY_ID), {"tag": "tagged"}),
    Case("count_tagged", ("tag_pkey(tag, job_id)", BY_ID), {"limit": BATCH}),
    *[
        Case(name, (f"{index}()",), {"states": [state], "max_count": BATCH})
        for name in ("find_unended", "count_unended")
        for state, index in ((0, "job_ready"), (1, "job_due_any_queue"), (2, "job_lease"), (4, "job_waiting_any_queue"))
    ],
    Case("choose", (), {"states": [0, 1]}),
    Case("find_ended", ("job_unsuccessful(state, id)", "key_of(job_id)")),
    Case("choose_ended", ("job_unsuccessful(state, id)",)),
    Case("count_ended", ("job_unsuccessful(state, id)",), {"limit": BATCH}),
]


@pytest.mark.parametrize("major", [postgres.MAIN, postgres.FLOOR])
def test_hot_statements_and_functions_read_only_their_batch(major: int) -> None:
    """Filling the store takes far longer than its statements, so all of them are looked at in one test."""
    with filled_schema(major) as (schema, kept):
        limits = plans_limits.calls(schema)
        for statistics in STATISTICS:
            kept.restore(statistics)
            assert (statistics, statement_faults(major, schema, CASES)) == (statistics, {})
            faults = function_faults(major, schema, limits, sorted(LARGE_TABLES), plans_limits.MAX_ROWS)
            assert (statistics, faults) == (statistics, {})
        pages = pages_by_depth(major, schema)
        assert max(pages) < 1.5 * min(pages)

        plans_workflow.fill_waits(major, schema, kept)
        workflow, tables = plans_workflow.calls(schema), ["job", *plans_workflow.TABLES]
        for statistics in STATISTICS:
            kept.restore(statistics)
            faults = statement_faults(major, schema, plans_workflow.CASES, *plans_workflow.TABLES)
            assert (statistics, faults) == (statistics, {})
            faults = function_faults(major, schema, workflow, tables, plans_workflow.MAX_ROWS)
            assert (statistics, faults) == (statistics, {})


def pages_by_depth(major: int, schema: str) -> list[int]:
    """Returns the buffers that a page of jobs reads, at each of several depths."""
    depths = [VALUES["before"], *(ids(state, ROWS // 20)[-1] for state in (6, 5, 2, 1, 0))]
    with connected(major) as connection:
        connection.execute("set plan_cache_mode = force_generic_plan")
        return [Explained(connection, schema, Case("find", (), {"before": before})).pages for before in depths]


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
