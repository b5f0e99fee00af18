"""The functions of limits read no table as a whole, with any statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from tests.conformance.test_plans_postgres import LARGE_TABLES, NOW, STATISTICS, Plans
from tests.support import postgres

FUNCTIONS = {
    "claim": "select from {schema}.claim_limited({now}, '{{default,queue-2,queue-4,none}}', '{{50,50,50,50}}', 100, "
    "'w', 30000000, false, false, false, false)",
    "isolated": "select from {schema}.claim_limited({now}, '{{default}}', '{{1}}', 1, "
    "'w', 1000, true, true, true, true)",
    "use": "select from {schema}.running_weights()",
    "prune": "select {schema}.prune_limits({now}, 100)",
    "waiting": "select from {schema}.count_waiting('{{key=1,key=1,late=1,late=1,none}}', 100)",
    "take": "select {schema}.take_tokens({now}, 'key=7', 1)",
}


@pytest.fixture(scope="module")
def plans() -> Iterator[Plans]:
    with ExitStack() as stack:
        yield Plans(stack)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("major", [postgres.MAIN, postgres.FLOOR])
def test_functions_of_limits_scan_no_table(plans: Plans, major: int, statistics: str, name: str) -> None:
    schema, connection = plans.connect(major, statistics)
    call = FUNCTIONS[name].format(schema=schema, now=NOW)
    for _ in range(7):  # the plans of its statements change after some calls
        connection.execute("begin")
        before = read_rows(connection, schema)
        connection.execute(f"explain (analyze, buffers) {call}".encode())
        after = read_rows(connection, schema)
        connection.execute("rollback")
        assert {table for table in after if after[table][0] > before[table][0]} == set()
        rows = {table: after[table][1] - before[table][1] for table in after}
        assert {
            table: number for table, number in rows.items() if number > 5000
        } == {}  # of 25,000 jobs, 20,000 partitions


def read_rows(connection: psycopg.Connection[Any], schema: str) -> dict[str, tuple[int, int]]:
    """Sequential scans, and rows fetched through indexes, by table."""
    rows = connection.execute(
        "select relname, seq_scan, coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables "
        "where schemaname = %s and relname = any(%s)",
        [schema, sorted(LARGE_TABLES)],
    )
    return {table: (scans, fetched) for table, scans, fetched in rows}
