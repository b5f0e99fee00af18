"""What one test leaves in a schema, the next one never sees."""

from __future__ import annotations

import pytest

from tests.support.postgres import MAIN, shared
from tests.support.schemas import migrated_schema

SUBMIT = 'SELECT {schema}.submit(\'[{{"task": "work"}}]\'::jsonb)'


def run(schema: str, sql: str) -> list[tuple[object, ...]]:
    return shared().execute(sql.format(schema=schema))


def test_the_next_finds_it_empty_and_counts_from_one() -> None:
    used = []
    for _ in range(2):
        with migrated_schema(MAIN) as schema:
            assert run(schema, "SELECT count(*) FROM {schema}.identity") == [(1,)]
            run(schema, SUBMIT)
            assert run(schema, "SELECT seq FROM {schema}.job") == [(1,)]
            used.append(schema)
    assert used[0] == used[1]


@pytest.mark.parametrize(
    "change",
    [
        "CREATE INDEX another ON {schema}.job (task)",
        "ALTER TABLE {schema}.job ALTER COLUMN task SET STATISTICS 7",
        "DROP FUNCTION {schema}.written_by CASCADE",
        "GRANT USAGE ON SCHEMA {schema} TO public",
        "CREATE TABLE {schema}.mine ()",
        "DELETE FROM {schema}.migration WHERE number = 1",
        "DROP SCHEMA {schema} CASCADE",
        "INSERT INTO {schema}.queue SELECT number::text, false FROM generate_series(1, 2000) AS number",
    ],
)
def test_changed_schema_is_dropped_after_the_test(change: str) -> None:
    with migrated_schema(MAIN) as schema:
        run(schema, change)
    assert run(schema, "SELECT 1 FROM pg_namespace WHERE nspname = '{schema}'") == []
