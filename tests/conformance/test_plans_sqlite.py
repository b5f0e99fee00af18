"""The hot statements stay on their indexes: with any statistics, 20,000 rows in every state, and a bounded cost."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.stores import open_store
from holdfast.stores.common.named_sql import load_statements

STATEMENTS = load_statements(files("holdfast.stores.sqlite") / "queries.sql")

ROWS = 20_000
"""In each state."""
SUSPECTS = 1_000
"""Ready jobs whose last lease was lost, and as many that lost two: what a host full of workers held when it died."""
ENOUGH = 50 * 500
"""Steps of SQLite's machine for a batch of fifty."""

NOW = 1_000_000_000_000
BY_ID = "sqlite_autoindex_holdfast_job_1"
BY_SEQ = "INTEGER PRIMARY KEY"

HOT: dict[str, tuple[str, ...]] = {
    "next_ready_queue": ("holdfast_job_ready",),
    "any_ready": ("holdfast_job_ready",),
    "any_due": ("holdfast_job_due", "holdfast_job_waiting"),
    "any_due_any_queue": ("holdfast_job_due_any_queue", "holdfast_job_waiting_any_queue"),
    "promote_queue": ("holdfast_job_due", "holdfast_job_waiting", BY_SEQ),
    "promote_any_queue": ("holdfast_job_due_any_queue", "holdfast_job_waiting_any_queue", BY_SEQ),
    "promote_ids": (BY_ID,),
    "next_due": ("holdfast_job_due", "holdfast_job_waiting"),
    "next_due_any_queue": ("holdfast_job_due_any_queue", "holdfast_job_waiting_any_queue"),
    **dict.fromkeys(("mark_depended_on", "set_waiting", "add_dependencies", "states_by_id"), (BY_ID,)),
    **dict.fromkeys(("batch", "batch_states", "add_members", "add_member_count", "init_batch"), (BY_ID,)),
    **dict.fromkeys(("known_members",), (BY_ID, "PRIMARY KEY (waiter=? AND job_id=?)")),
    "count_members": (BY_SEQ,),
    "resolve_dependencies": ("holdfast_dependency_on",),
    **dict.fromkeys(
        ("decrement_waits", "cancel_waiters", "set_waits", "delete_receiver", "detach_receiver"), (BY_SEQ,)
    ),
    "mark_earlier_children_met": ("PRIMARY KEY (waiter=?)",),
    "renew_dependencies": ("PRIMARY KEY", BY_ID),
    "known_children": ("PRIMARY KEY (waiter=? AND job_id=?)",),
    **dict.fromkeys(("wait_again", "reopen_waiters", "restore_waiters"), (BY_SEQ, "PRIMARY KEY (waiter=?)")),
    "reopen_dependencies": ("holdfast_dependency_on", BY_SEQ),
    "dependencies": ("PRIMARY KEY (waiter=?)", "holdfast_dependency_on", BY_SEQ),
    **dict.fromkeys(("receiver", "receiver_deadline"), (BY_SEQ,)),
    "step_result": ("sqlite_autoindex_holdfast_step_1",),
    "delete_steps": ("sqlite_autoindex_holdfast_step_1",),
    "delete_receivers": (BY_SEQ,),
    "take_signal": ("holdfast_signal_kept", BY_SEQ),
    **dict.fromkeys(("count_signals", "signals"), ("holdfast_signal_kept",)),
    "find_signal": ("sqlite_autoindex_holdfast_signal_1",),
    "next_receiver": ("holdfast_receiver_of", BY_SEQ),
    "prune_signals": ("holdfast_signal_sent", BY_SEQ),
    "pick_ready": ("holdfast_job_ready",),
    "pick_with_suspects": ("holdfast_job_ready",),
    "pick_quarantined": ("holdfast_job_ready",),
    "tiers": ("holdfast_job_ready",),
    "pick_ids": (BY_ID,),
    "claim_picked": (BY_SEQ,),
    "mark_unreadable": (BY_SEQ,),
    "insert_payload": (BY_ID,),
    "insert_tag": (BY_ID,),
    "take_key": (BY_ID,),
    "mark_keyed": (BY_ID, "PRIMARY KEY"),
    "release_key": ("PRIMARY KEY",),
    **dict.fromkeys(("is_stored", "unique_keys_of"), (BY_ID,)),
    **dict.fromkeys(
        ("rewrite_unstarted", "rewrite_options", "rewrite_payload", "set_expiry", "clear_expiry"), (BY_ID,)
    ),
    "insert_expiry": (BY_ID,),
    "drop_tags": (BY_ID, "holdfast_tag_of"),
    "drop_expiry": (BY_ID, BY_SEQ),
    "any_expired": ("holdfast_expiry_due",),
    "expired": ("holdfast_expiry_due",),
    "drop_expired": (BY_SEQ,),
    "expire_jobs": (BY_SEQ,),
    "complete": (BY_ID,),
    "tx_outcome": (BY_ID,),
    "settle_succeeded": (BY_ID,),
    "settle_one": (BY_ID,),
    "set_rank": (BY_SEQ,),
    "job_state": (BY_ID,),
    "recordable": (BY_ID,),
    "valid_leases": (BY_ID,),
    "leased_job": (BY_ID,),
    "record_step": ("sqlite_autoindex_holdfast_step_1",),
    "steps": (BY_ID, "sqlite_autoindex_holdfast_step_1"),
    "extend_leases": (BY_ID,),
    "lease_states": (BY_ID,),
    "any_worker_has_message": ("PRIMARY KEY", "holdfast_job_cancelling"),
    "expired_leases": ("holdfast_job_lease",),
    "find_prunable": ("holdfast_job_ended", "holdfast_dependency_on", BY_SEQ, BY_ID),
    "prune_jobs": (BY_SEQ, "holdfast_dependency_on", BY_ID),
    "delete_jobs": (BY_SEQ,),
    "delete_keys_of": ("holdfast_key_of",),
    "cancel_unstarted": (BY_ID,),
    "cancel_running": (BY_ID,),
    "replay": (BY_ID,),
    **dict.fromkeys(("history_until", "history_add"), ("holdfast_job_ended",)),
    **dict.fromkeys(("history", "history_mark", "prune_history"), ("PRIMARY KEY",)),
    "stats": (
        "holdfast_job_ready",
        "holdfast_job_limited",
        "holdfast_job_waiting",
        "holdfast_job_due_any_queue",
        "holdfast_job_lease",
        "holdfast_job_ended",
    ),
    "events": ("holdfast_job_ended", "holdfast_attempt_retried"),
    "failed_jobs": ("holdfast_job_ended", "holdfast_attempt_retried", BY_SEQ),
    "last_ended": ("holdfast_job_ended", "holdfast_attempt_retried"),
    "drop_payload": (BY_ID, BY_SEQ),
    "clear_inline_payload": (BY_ID,),
    "deletable": (BY_ID,),
    "choose_again": (BY_ID,),
    "states_of": (BY_ID,),
    "get": (BY_ID,),
    "get_many": (BY_ID,),
    "summaries": (BY_ID,),
    "key_holder": ("PRIMARY KEY",),
    "attempts": ("PRIMARY KEY", BY_ID),
    "logs": ("PRIMARY KEY", BY_ID),
    "detach_expired_keys": ("holdfast_key", BY_ID),
    "prune_keys": ("holdfast_key",),
    "delete_worker": ("PRIMARY KEY",),
    "oldest_ready": ("holdfast_job_ready", "holdfast_job_limited", "PRIMARY KEY"),
    **dict.fromkeys(("find_ended", "choose_ended", "count_ended"), ("holdfast_job_unsuccessful",)),
    **dict.fromkeys(("replace_schedule", "remove_schedule", "schedule", "schedules"), ("PRIMARY KEY",)),
    **dict.fromkeys(("due_schedules", "next_schedule"), ("holdfast_schedule_due",)),
    **dict.fromkeys(
        ("replace_limit", "remove_limit", "queue_virtual_time", "set_virtual_time", "buckets", "add_partition"),
        ("PRIMARY KEY",),
    ),
    **dict.fromkeys(("move_partition", "drop_partition"), ("PRIMARY KEY",)),
    "any_open_partition": (
        "holdfast_partition_start_tag",
        "holdfast_partition_blocked",
        "holdfast_job_limited_quarantined",
    ),
    "next_unblocked": ("holdfast_partition_blocked",),
    "unblock_partitions": ("holdfast_partition_blocked",),
    "next_partitions": ("holdfast_partition_start_tag", "holdfast_job_limited", BY_SEQ),
    "partition_jobs": ("holdfast_job_limited",),
    "unassigned_jobs": ("holdfast_job_ready",),
    "set_partition": (BY_SEQ,),
    "partitions_of": (BY_ID,),
    "running_partitions": ("holdfast_job_limited_running",),
    "count_unstarted": ("holdfast_job_unstarted", "holdfast_job_unstarted_second"),
    **dict.fromkeys(("limited_quarantined", "any_limited_quarantined"), ("holdfast_job_limited_quarantined",)),
    "pick_admitted": (BY_SEQ,),
    "limited_queues_of": (BY_ID,),
    "queues_under_limits": ("PRIMARY KEY", "holdfast_job_limited_quarantined", "holdfast_job_ready"),
    "any_running_limited": ("holdfast_job_limited_running",),
    "find_tagged": ("PRIMARY KEY (tag=? AND seq<?)", BY_SEQ),
    "count_tagged": ("PRIMARY KEY (tag=?)", BY_SEQ),
    "newest_job": ("holdfast_job",),
    **dict.fromkeys(
        ("find_unended", "count_unended"),
        (
            "holdfast_job_ready",
            "holdfast_job_limited",
            "holdfast_job_waiting",
            "holdfast_job_due",
            "holdfast_job_lease",
        ),
    ),
    "overview_queues": ("holdfast_job_ready", "holdfast_job_limited", "holdfast_job_waiting", "holdfast_job_due"),
    "overview": (
        "holdfast_job_ready",
        "holdfast_job_limited",
        "holdfast_job_waiting",
        "holdfast_job_due",
        "holdfast_job_lease",
        "holdfast_job_ended",
    ),
}
"""Each statement that runs for every batch, beat or sweep, with the indexes it may not do without."""

AS_GIVEN = "a row as it is given: it looks for nothing"
FEW_QUEUES = "a row for each queue that was ever paused"
FEW_WORKERS = "a row for each worker"
BY_HAND = "an operator's question, rare and bounded, that the table answers in its own order"
COLD = {
    **dict.fromkeys(
        (
            "insert_job",
            "insert_single_job",
            "insert_attempt",
            "insert_line",
            "insert_step",
            "copy_step",
            "upsert_worker",
            "add_schedule",
            "add_limit",
            "set_receiver",
            "insert_signal",
        ),
        AS_GIVEN,
    ),
    "set_bucket": AS_GIVEN,
    "add_limited_queue": AS_GIVEN,
    "any_bucket": "the first row it meets",
    "clamp_buckets": "when a limit changes: a row for each of its buckets",
    "unblock_all_partitions": "when a limit changes: every partition that waits",
    **dict.fromkeys(("limits", "limits_version"), "a row for each limit, of which there are a thousand at most"),
    "limited_queues": "a row for each queue that ever had a job under a limit",
    "jobs_to_assign": "when a limit is added or removed: goes through the table page by page",
    "prune_buckets": "a row for each bucket that has tokens missing, page by page, in a sweep",
    **dict.fromkeys(("paused_queues", "known_queues", "set_paused"), FEW_QUEUES),
    **dict.fromkeys(("workers", "set_command", "prune_workers"), FEW_WORKERS),
    **dict.fromkeys(("choose", "count", "stuck", "nameless_queue_jobs"), BY_HAND),
    "all_signals": "the oldest ones, by their own index in its order",
    "find": "as hot as its page is small, which has a test of its own",
    "history_move": "writes one row by its key",
    "begin_writing": "no row at all: it waits for the turn to write",
}
"""Why each of the others need not be looked at."""

PARAMETERS: dict[str, object] = {
    "queue": "default",
    "after": "",
    "now": NOW,
    "before": NOW,
    "limit": 50,
    "until": NOW,
    "counted_until": NOW - 50,
    "length": 60_000_000,
    "least": 1,
    **dict.fromkeys(("max_count", "fill_time", "max_tier"), 1),
    "max_must_start": 50,
    "topic": "topic-7",
    "ids": json.dumps([f"id-{n}" for n in range(0, ROWS * 9, ROWS * 9 // 50)]),
    "queues": '["default"]',
    "own": '["default"]',
    "buckets": '["tenant=7", "tenant=8"]',
    "seqs": json.dumps(list(range(1, ROWS * 9, ROWS * 9 // 50))),
    "workers": '["worker"]',
    "settlements": json.dumps([[f"id-{n}", 1, None] for n in range(2 * ROWS + 1, 2 * ROWS + 50)]),
    "leases": json.dumps([[f"id-{n}", 1] for n in range(2 * ROWS + 1, 2 * ROWS + 50)]),
    "id": f"id-{2 * ROWS + 7}",
    "claims": 1,
    "every": 0,
    "since": NOW,
    "has_ended": 1,
    "at": NOW - ROWS,
    "job": "",
    "seq": 7,
    "rank": 1,
    "state": 5,
    "states": "[6]",
    "worker": None,
    "partition": "",
    "start_tag": -1,
    "offset": 0,
    "names": '["bucket-7", "bucket-8"]',
    "name": "schedule-7",
    "expected": 1,
    "revision": 1,
    "document": "{}",
}
"""What the statements are given; a parameter not named here is null."""


POSITIONAL = {
    "take_key": ("key of id-7", "id-8", None, NOW, 255),
    "rewrite_unstarted": ("id-7", NOW, 31, "other", 1, NOW + 5, 1),
    "insert_expiry": ("id-7", NOW),
    "drop_expiry": ("id-7",),
    "drop_tags": ("id-7",),
    **dict.fromkeys(("mark_depended_on", "states_by_id"), ('["id-7", "id-8"]',)),
    "set_waiting": ("id-7", 4, NOW, 1, None, None, None),
    "batch_states": ('["id-7", "id-8"]',),
    "known_members": ('[["id-7", "id-8"]]',),
    "init_batch": ("id-7",),
    "add_members": ("id-7", '["id-8", "id-9"]'),
    "add_member_count": ("id-7", 2),
    "count_members": ("[[7, 1, 0], [8, 0, 1]]", NOW),
    "add_dependencies": ("id-7", '[["id-8", "end", 0]]', 0),
    "resolve_dependencies": ('[["id-7", "dead"], ["id-8", "succeeded"]]',),
    **dict.fromkeys(("decrement_waits", "cancel_waiters"), ("[[7, 1], [8, 1]]", NOW)),
    **dict.fromkeys(("wait_again", "reopen_waiters", "restore_waiters", "renew_dependencies"), ("[7, 8]",)),
    "known_children": (7, '["id-8", "id-9"]'),
    "reopen_dependencies": ('["id-7", "id-8"]',),
    "set_waits": (7, 1),
    **dict.fromkeys(("delete_receiver", "detach_receiver", "mark_earlier_children_met"), (7,)),
    "receiver_deadline": (7, "step"),
    "step_result": (7, "step"),
    "leased_job": (f"id-{2 * ROWS + 7}", 1, "worker", NOW),
    "record_step": (7, "ship", 2, 1, 1, NOW, "1", "step"),
    "take_signal": ("topic-7", "id-7"),
    "count_signals": ("topic-7", 100),
    "find_signal": ("signal-7",),
    "next_receiver": ("topic-7",),
}
"""What the statements with places instead of names are given; nulls if nothing stands here."""


class Parameters(dict[str, Any]):
    """Every name there is."""

    def __missing__(self, name: str) -> None:
        return None


FILL = """
with recursive n (n) as (values (1) union all select n + 1 from n where n < :rows)
insert into holdfast_job (id, queue, task, state, rank, run_at, created_at, max_attempts, claims,
                          lost_leases, has_key, worker, lease_until, ended_at, expires_at)
select 'id-' || (n + :block * :rows), iif(n % 2, 'default', 'queue-' || n % 10), 'task', :state, n % 3,
       iif(:state in (1, 3, 4), :now + n - :rows / 2, :now - n), :now - 1000000, 5, 1, :lost_leases, 1, 'worker',
       iif(:state = 2, :now + n - :rows / 2, null), iif(:state >= 5, :now - n, null),
       iif(n % 3, null, :now + n)
from n limit :most
"""
FILL_LIMITED = """
with recursive n (n) as (values (1) union all select n + 1 from n where n < :rows)
insert into holdfast_job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, lost_leases, worker,
                          lease_until, partition)
select 'limited-' || :state || :lost_leases || n, iif(n % 2, 'default', 'queue-' || n % 10), 'task', '{}', :state,
       n % 3, :now - n, :now - 1000000, 5, :lost_leases, 'worker', iif(:state = 2, :now + n, null),
       'tenant=' || n % 5000
from n
"""
FILL_BUCKETS = """
with recursive n (n) as (values (1) union all select n + 1 from n where n < :rows)
insert into holdfast_bucket (name, full_at, paused_until) select 'bucket-' || n, :now + n - :rows / 2, 0 from n
"""
LIST_PARTITIONS = """
insert into holdfast_partition (queue, partition, start_tag)
select distinct queue, partition, 0 from holdfast_job where partition is not null
"""
BLOCK_PARTITIONS = """
update holdfast_partition
set start_tag = abs(random()) % 1000000, blocked_until = iif(abs(random()) % 2, :now + 1 + abs(random()) % 1000, null)
"""
FILL_KEYS = """
insert into holdfast_key (key, job_id, keep_until)
select 'key of ' || id, id, iif(seq % 2, :now + 1000000, null) from holdfast_job
"""
FILL_EXPIRIES = """
insert into holdfast_expiry (seq, expires_at) select seq, coalesce(expires_at, :now - seq) from holdfast_job
"""
FILL_SCHEDULES = """
with recursive n (n) as (values (1) union all select n + 1 from n where n < :rows)
insert into holdfast_schedule (name, next_at, revision, document)
select 'schedule-' || n, iif(n % 3, :now + n - :rows / 2, null), 1, '{}' from n
"""

FILL_WAITS = [
    """insert into holdfast_dependency (waiter, job_id, condition, state, is_child)
       select seq, 'id-' || (seq / 5), 'success', seq % 3, seq % 2 from holdfast_job where seq % 5 > 1""",
    """insert into holdfast_receiver (seq, topic, step, number, is_ordered, claims, since, until)
       select seq, 'topic-' || (seq % 5000), 'step', 1, 1, claims, :now, :now
       from holdfast_job where state in (2, 4)""",
    """insert into holdfast_signal (id, topic, value, sent_at, job_id)
       select 'signal-' || seq, 'topic-' || (seq % 5000), '1', :now - seq, iif(seq % 3, id, null) from holdfast_job""",
    """insert into holdfast_step (job_seq, name, number, is_ordered, claims, ended_at, result)
       select seq, 'step', 1, 1, 1, :now, '1' from holdfast_job where seq % 3""",
]

Statistics = dict[str, list[tuple[Any, ...]]]


def _statistics(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    connection.execute("analyze")
    return connection.execute("select tbl, idx, stat from sqlite_stat1").fetchall()


def _fill(connection: sqlite3.Connection, state: int, **values: int) -> None:
    values = {"rows": ROWS, "now": NOW, "state": state, "block": state, "most": ROWS, "lost_leases": 0, **values}
    connection.execute(FILL, values)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Statistics]:
    """A file with 20,000 rows in every state, and the result of ANALYZE while it was empty, idle and full."""
    path = tmp_path_factory.mktemp("plans") / "holdfast.db"
    store = open_store(f"sqlite:///{path}", now=ManualClock())
    asyncio.run(store.open())
    asyncio.run(store.close())
    given: Statistics = {"never analysed": []}
    with closing(sqlite3.connect(path)) as connection:
        given["empty"] = _statistics(connection)
        for state in (5, 6, 7):
            _fill(connection, state)
        given["idle"] = _statistics(connection)
        for state in (0, 1, 2, 3, 4):
            _fill(connection, state)
        _fill(connection, 0, block=8, most=SUSPECTS, lost_leases=1)
        _fill(connection, 0, block=9, most=SUSPECTS, lost_leases=2)
        for state, lost_leases, rows in ((0, 0, ROWS), (0, 2, SUSPECTS), (2, 0, SUSPECTS)):
            connection.execute(FILL_LIMITED, {"now": NOW, "rows": rows, "state": state, "lost_leases": lost_leases})
        connection.execute(FILL_BUCKETS, {"now": NOW, "rows": ROWS})
        connection.execute(LIST_PARTITIONS)
        connection.execute(BLOCK_PARTITIONS, {"now": NOW})
        connection.execute(FILL_KEYS, {"now": NOW})
        connection.execute(FILL_EXPIRIES, {"now": NOW})
        connection.execute(FILL_SCHEDULES, {"now": NOW, "rows": ROWS})
        for fill in FILL_WAITS:
            connection.execute(fill, {"now": NOW})
        given["full"] = _statistics(connection)
        connection.commit()
    return path, given


@pytest.fixture(params=["never analysed", "empty", "idle", "full"])
def connection(request: pytest.FixtureRequest, filled: tuple[Path, Statistics]) -> Iterator[sqlite3.Connection]:
    """The full file as a planner sees it with the statistics of another day."""
    path, given = filled
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("delete from sqlite_stat1")
        writer.executemany("insert into sqlite_stat1 values (?, ?, ?)", given[request.param])
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def _bound(name: str, **parameters: object) -> Any:
    places = re.findall(r"\?(\d*)", STATEMENTS[name])
    if not places:
        return Parameters(PARAMETERS | parameters)
    return POSITIONAL.get(name, [None] * max(int(number or place) for place, number in enumerate(places, 1)))


def cost(connection: sqlite3.Connection, name: str, **parameters: object) -> int:
    """Steps of SQLite's machine that the statement takes, to the hundred; nothing it writes stays."""
    hundreds = 0

    def count() -> int:
        nonlocal hundreds
        hundreds += 1
        return 0

    connection.execute("begin")
    connection.set_progress_handler(count, 100)
    connection.execute(STATEMENTS[name], _bound(name, **parameters)).fetchall()
    connection.set_progress_handler(None, 0)
    connection.execute("rollback")
    return hundreds * 100


def test_every_hot_statement_searches_its_indexes(connection: sqlite3.Connection) -> None:
    faults = []
    for name, indexes in HOT.items():
        plan = [row[3] for row in connection.execute(f"explain query plan {STATEMENTS[name]}", _bound(name))]
        # A table function, a subquery's few rows and a constant may be scanned: they are the batch itself.
        scans = [step for step in plan if re.match(r"SCAN (holdfast_\w+|j|p|k)\b", step)]
        missing = [index for index in indexes if not any(index in step for step in plan if step.startswith("SEARCH"))]
        if scans or missing:
            faults.append((name, missing, plan))
    assert faults == []


def test_every_hot_statement_costs_what_its_batch_costs(connection: sqlite3.Connection) -> None:
    """A plan can name its index and still walk through all of it: count the steps of SQLite's machine."""
    costs = {name: cost(connection, name) for name in HOT}
    assert {name: steps for name, steps in costs.items() if steps > ENOUGH} == {}


def test_a_page_of_everything_costs_a_page(connection: sqlite3.Connection) -> None:
    assert cost(connection, "find", before=1 << 62, after=0, states=None) <= ENOUGH


def test_every_statement_is_looked_at_or_need_not_be() -> None:
    assert sorted([*HOT, *COLD]) == sorted(STATEMENTS)
