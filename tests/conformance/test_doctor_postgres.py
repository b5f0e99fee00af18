"""What the doctor says of a PostgreSQL server: each thing that can be wrong, with its remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from holdfast.core.models import Finding
from holdfast.stores import open_store
from holdfast.stores.postgres import health
from tests.conformance.support import new_job, put, take
from tests.support.postgres import SUPERUSER, Postgres
from tests.support.servers import until


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A server of its own, with the settings that a new one has."""
    with Postgres(settings={"max_prepared_transactions": "5", "wal_level": "logical"}) as server:
        yield server


@pytest.fixture
def schema(server: Postgres) -> Iterator[str]:
    with server.fresh_schema() as schema:
        yield schema


async def findings(server: Postgres, schema: str, **parameters: object) -> dict[str, Finding]:
    store = open_store(server.url(schema=schema, **parameters))
    await store.open()
    try:
        return {finding.name: finding for finding in await store.health.doctor()}
    finally:
        await store.close()


async def finding(server: Postgres, schema: str, name: str, **parameters: object) -> Finding:
    return (await findings(server, schema, **parameters))[name]


async def test_a_server_as_it_comes_is_well(server: Postgres, schema: str) -> None:
    found = await findings(server, schema)
    assert {each.level for each in found.values()} == {"ok"}
    assert next(iter(found)) == "durability"
    assert "fsync=on synchronous_commit=on full_page_writes=on" in found["durability"].text
    assert f"PostgreSQL {server.major}" in found["version"].text


@pytest.mark.parametrize(
    ("settings", "name", "level", "remedy"),
    [
        ({"fsync": "off"}, "durability", "error", "set fsync = on"),
        ({"full_page_writes": "off"}, "durability", "error", "set full_page_writes = on"),
        ({"synchronous_commit": "off"}, "durability", "error", "synchronous_commit = on"),
        ({"autovacuum": "off"}, "vacuum", "error", "set autovacuum = on"),
    ],
    ids=["fsync", "full pages", "commit", "autovacuum"],
)
async def test_a_setting_that_endangers_jobs(
    server: Postgres, schema: str, settings: dict[str, str], name: str, level: str, remedy: str
) -> None:
    server.change(**settings)
    try:
        found = await finding(server, schema, name)
    finally:
        server.change(**dict.fromkeys(settings, "on"))
    assert found.level == level
    assert remedy in found.remedy


async def test_commits_that_do_not_wait_for_the_standby(server: Postgres, schema: str) -> None:
    await findings(server, schema)
    server.change(synchronous_commit="local", synchronous_standby_names="nobody")
    try:
        found = await finding(server, schema, "durability")
    finally:
        server.change(synchronous_commit="on", synchronous_standby_names="")
    assert (found.level, "failover" in found.text) == ("warning", True)
    assert found.remedy


async def test_a_server_that_takes_no_writes(server: Postgres, schema: str) -> None:
    await findings(server, schema)
    found = await finding(server, schema, "rights", default_transaction_read_only="on")
    assert (found.level, "takes no writes" in found.text, bool(found.remedy)) == ("error", True, True)


async def test_autovacuum_switched_off_for_the_table(server: Postgres, schema: str) -> None:
    await findings(server, schema)
    server.execute(f"alter table {schema}.job set (autovacuum_enabled = off)")
    found = await finding(server, schema, "vacuum")
    assert (found.level, found.remedy) == ("error", f"alter table {schema}.job reset (autovacuum_enabled)")


@pytest.mark.parametrize(("deleted", "level"), [(6, "ok"), (7, "warning")])
async def test_dead_rows_matter_once_they_are_more_than_twice_the_living(
    server: Postgres, schema: str, deleted: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_DEAD", 0)
    await findings(server, schema)
    table = f"{schema}.job"
    server.execute(f"alter table {table} set (autovacuum_vacuum_threshold = 1000)")
    server.execute(
        f"insert into {table} (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims)"  # noqa: S608
        " select gen_random_uuid(), 'q', 't', '{}', 0, 0, 0, 0, 1, 0 from generate_series(1, 9)"
    )
    server.execute(f"delete from {table} where ctid in (select ctid from {table} limit {deleted})")  # noqa: S608
    counted = f"select n_live_tup, n_dead_tup from pg_stat_user_tables where relid = '{table}'::regclass"  # noqa: S608
    await asyncio.to_thread(
        until, lambda: server.execute(counted) == [(9 - deleted, deleted)], "the statistics of the table"
    )
    found = await finding(server, schema, "vacuum")
    assert (found.level, f"{deleted} dead" in found.text) == (level, True)


@pytest.mark.parametrize("kind", ["a snapshot", "a write", "a prepared transaction"])
async def test_a_transaction_that_keeps_dead_rows(
    server: Postgres, schema: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await finding(server, schema, "transactions")).level == "ok"
    monkeypatch.setattr(health, "_OLD_S", 0)
    with psycopg.connect(server.url(), application_name="nightly report") as connection:
        if kind == "a snapshot":
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("select 1 from pg_class")
        else:
            connection.execute("create table mine (n int)")
        if kind == "a prepared transaction":
            connection.execute("prepare transaction 'forgotten'")
        found = await finding(server, schema, "transactions")
        if kind == "a prepared transaction":
            connection.rollback()
            connection.autocommit = True
            connection.execute("rollback prepared 'forgotten'")
        connection.rollback()
    assert found.level == "warning"
    assert ("'forgotten'" if kind == "a prepared transaction" else "nightly report") in found.text
    remedy = "rollback prepared 'forgotten'" if kind == "a prepared transaction" else "pg_terminate_backend("
    assert remedy in found.remedy


async def test_sessions_of_other_roles_are_not_passed_over_in_silence(server: Postgres, schema: str) -> None:
    with psycopg.connect(server.url(user=SUPERUSER)):
        found = await finding(server, schema, "transactions")
    assert "other sessions cannot be seen" in found.text
    assert "pg_read_all_stats" in found.remedy


async def test_doctor_warns_of_an_unread_replication_slot(server: Postgres, schema: str) -> None:
    server.execute("select pg_create_physical_replication_slot('left_behind', true)")
    try:
        found = await finding(server, schema, "replication")
    finally:
        server.execute("select pg_drop_replication_slot('left_behind')")
    assert (found.level, "left_behind" in found.text) == ("warning", True)
    assert "pg_drop_replication_slot('left_behind')" in found.remedy


async def test_a_dropped_index(server: Postgres, schema: str) -> None:
    await findings(server, schema)
    server.execute(f"drop index {schema}.job_ready")
    found = await finding(server, schema, "indexes")
    assert (found.level, "job_ready" in found.text) == ("error", True)
    assert "holdfast migrate --sql" in found.remedy


async def test_doctor_warns_of_an_unrecovered_expired_lease(server: Postgres, schema: str) -> None:
    store = open_store(server.url(schema=schema))
    await store.open()
    await put(store, new_job())
    await take(store, lease_for=timedelta(microseconds=1))
    an_hour_ago = f"update {schema}.job set lease_until = lease_until - 3600000000"  # noqa: S608 - the test's own
    server.execute(an_hour_ago)
    await store.close()
    found = await finding(server, schema, "leases")
    assert (found.level, found.text) == ("warning", "1 jobs run under expired leases")
    assert "start a worker" in found.remedy


async def test_a_url_that_says_pooled_without_need(server: Postgres, schema: str) -> None:
    found = await finding(server, schema, "pooler", pooled=1)
    assert (found.level, "pooled=1" in found.remedy) == ("warning", True)


def test_a_pooler_the_url_does_not_name() -> None:
    found = health.check_pooler(pooled=False, through=True)
    assert (found.level, "?pooled=1" in found.remedy) == ("warning", True)
    found = health.check_pooler(pooled=True, through=True)
    assert (found.level, found.text) == ("ok", "pooled=1: workers poll")
