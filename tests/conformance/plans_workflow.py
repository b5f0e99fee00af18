"""The statements and functions of signals and dependencies, for the tests of PostgreSQL's plans."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.plans import BATCH, BY_ID, NOW, ROWS, RUNNING, Case, connected, ids
from tests.conformance.plans_statistics import KeptStatistics

TABLES = ("dependency", "receiver", "signal", "step")
MAX_ROWS = 32 * BATCH
"""Of a table, for one call of a function."""

# Each waiting job waits for ten running ones; the first job that has succeeded has 10,000 dependents.
_FILL_WAITS = """
update {schema}.job set has_dependents = true where state in (2, 5);
update {schema}.job set waits = 10, run_at = 253402300799000000 where state = 4;
update {schema}.job set members = 10, failed = 0 where state = 4 and seq % 2 = 0;
insert into {schema}.dependency (waiter, job_id, is_child, condition, state)
select ('00000000-0000-0000-0000-' || lpad(to_hex(4 * {rows} + 1 + n % 1000), 12, '0'))::uuid,
       ('00000000-0000-0000-0000-' || lpad(to_hex(2 * {rows} + n), 12, '0'))::uuid,
       n % 3 = 0, case when n % 2 = 0 then 'success' else 'end' end, 'open' from generate_series(1, {rows}) n;
insert into {schema}.dependency (waiter, job_id, is_child, condition, state)
select ('00000000-0000-0000-0000-' || lpad(to_hex(n), 12, '0'))::uuid,
       ('00000000-0000-0000-0000-' || lpad(to_hex(5 * {rows} + 7), 12, '0'))::uuid,
       false, 'success', 'met' from generate_series(1, {rows}) n;
insert into {schema}.receiver (job_id, topic, step, number, is_ordered, claims, begun_at, deadline, is_listed)
select id, 'topic-' || seq % 100, 'step', 1, true, claims, {now}, {now}, seq % 3 > 0
from {schema}.job where state in (2, 4);
insert into {schema}.signal (id, topic, value, sent_at, job_id)
select 'signal-' || seq, case when seq % 2 = 0 then 'topic-1' else 'topic-' || seq end, '1', {now} - seq,
       case when seq % 3 > 0 then id end from {schema}.job;
insert into {schema}.step (job_id, ended_at, claims, number, is_ordered, name)
select id, {now}, 1, 1, true, 'charge' from {schema}.job;
"""

STEP = {"at": NOW, "id": ids(2)[9], "claims": 1, "worker": "worker", "number": 2, "is_ordered": True, "name": "ship"}

CASES = [
    Case("record_step", (BY_ID,), {"text": json.dumps(STEP)}),
    Case("record_step", (BY_ID, "step_pkey(job_id, name)"), {"text": json.dumps(STEP | {"previous": "charge"})}),
    Case("settle_with_dependents", (BY_ID,), RUNNING),
    Case("unlocked", (BY_ID, "dependency_on(job_id, state)"), {"ids": ids(2)}),
    Case("prune_jobs", ("job_ended(state, ended_at)",), {"span": ROWS // 2}),
    Case("prunable", (BY_ID,), {"ids": ids(5)}),
    Case("delete_jobs", (BY_ID, "dependency_pkey(waiter)", "receiver_pkey(job_id)"), {"ids": ids(4, 10)}),
    Case("lock_children", (BY_ID,)),
    Case("batch", (BY_ID,), {"id": ids(4)[0]}),
    Case("delete_steps", ("step_pkey(job_id)", "receiver_pkey(job_id)"), {"ids": ids(4, 10), "from_step": 2}),
    Case("lock_leased_job", (BY_ID,), {"claims": 1}),
    Case("known_children", ("dependency_pkey(waiter)",), {"id": ids(4)[0], "ids": ids(2)}),
    Case("receiver", (BY_ID, "receiver_pkey(job_id)")),
    Case("dependencies_of", ("dependency_pkey(waiter)",), {"id": ids(4)[0]}),
    Case("dependents_of", ("dependency_on(job_id, state)",), {"id": ids(5)[0]}),
    Case("signals", ("signal_kept(topic)",), {"topic": "topic-1"}),
    Case("all_signals", ("signal_kept_any_job()",)),
    Case("prune_signals", ("signal_sent(sent_at)", "signal_pkey(id)"), {"span": ROWS}),
]


def quoted(job_ids: list[str]) -> str:
    """The ids as text of an array."""
    return "{" + ",".join(job_ids) + "}"


def added(waiters: list[str], jobs: list[str]) -> str:
    """Text for ``add_dependencies``."""
    pairs = [{"waiter": waiter, "job_id": job, "condition": "success"} for waiter in waiters for job in jobs]
    return json.dumps({"at": NOW, "notifies": False, "dependencies": pairs, "members": []})


MEMBERS = json.dumps(
    {
        "at": NOW,
        "notifies": False,
        "dependencies": [],
        "members": [{"batch": batch, "job_id": job} for batch in ids(4, 10) for job in ids(5, 5)[1:]],
    }
)
"""For ``add_dependencies``: jobs that have ended join batches."""

_FUNCTIONS: dict[str, tuple[str, list[Any]]] = {
    "resolve": ("resolve_dependencies(%s, %s, true)", [quoted(ids(2)), NOW]),
    "lock": ("lock_dependencies(%s)", [quoted(ids(2))]),
    "add": ("add_dependencies(%s)", [added(ids(0, 10), ids(5, 5)[1:])]),
    "join": ("add_dependencies(%s)", [MEMBERS]),
    "lock batches": ("lock_batches(%s)", [json.dumps(json.loads(MEMBERS)["members"])]),
    "reopen": ("reopen_dependencies(%s)", [quoted(ids(2) + ids(4, 10))]),
    "children": ("await_children(%s, %s, %s)", [ids(2)[0], quoted(ids(4)), quoted(ids(0))]),
    "receive": ("receive_signal(%s, %s, 1, 'worker', 's', 1, true, 'topic-1', 1000)", [NOW, ids(2)[0]]),
    "wait": ("receive_signal(%s, %s, 1, 'worker', 's', 1, true, 'none', 1000)", [NOW, ids(2)[0]]),
    "send": ("send_signal(%s, 'new', 'topic-1', '1', 10000)", [NOW]),
    "keep": ("send_signal(%s, 'new', 'none', '1', 10000)", [NOW]),
}


def fill_waits(major: int, schema: str, kept: KeptStatistics) -> None:
    """Adds signals and dependencies to a full store, and their statistics to those that are kept."""
    names = ", ".join(f"{schema}.{table}" for table in TABLES)
    with connected(major) as connection:
        connection.execute(f"truncate {names}".encode())  # pages of rows that were rolled back would be statistics too
        for moment in ("empty", "idle"):
            kept.restore(moment)
            connection.execute(f"analyze {names}".encode())
            kept.save(moment)
        connection.execute(_FILL_WAITS.format(schema=schema, rows=ROWS, now=NOW).encode())
        kept.restore("full")
        connection.execute(f"analyze {names}, {schema}.job".encode())
        kept.save("full")


def calls(schema: str) -> dict[str, tuple[str, list[Any]]]:
    """A statement and its values for each function."""
    return {name: (f"select * from {schema}.{call}", values) for name, (call, values) in _FUNCTIONS.items()}  # noqa: S608 - ours
