"""What the command line says of a PostgreSQL server that cannot be used: one line, the exit code, no password."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.interfaces.cli import JOBS, ROOT, Cli
from tests.support import postgres
from tests.support.pages import find_block
from tests.support.postgres import MAIN, PASSWORD, USER, Postgres, installed
from tests.support.stores import migrations

SECRET = "s3cr3t-word"


@pytest.fixture(scope="module")
def strict() -> Iterator[Postgres]:
    """A server that asks for passwords."""
    with Postgres(durable=False, authenticated=True) as server:
        yield server


def given(folder: Path, code: int, *words: str) -> str:
    """All that the program in a process of its own says when it fails so."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOLDFAST_LOG_LEVEL": "debug"}
    ran = subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == code, output
    assert "Traceback" not in output
    assert SECRET not in output
    assert PASSWORD not in output
    return output


WORKER = ["worker", "start", "--drain", "--app", "jobs:app"]


@pytest.mark.parametrize("words", [["status"], WORKER, ["migrate"], ["doctor"]], ids=" ".join)
def test_a_wrong_password_exits_78(strict: Postgres, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    url = strict.url().replace(":hunter2", f":{SECRET}")
    output = given(tmp_path, 78, *words, "--url", url)
    assert "password authentication failed" in output


def test_a_missing_database_exits_78(strict: Postgres, cli: Cli) -> None:
    assert 'database "nothing" does not exist' in cli.fail("status", "--url", strict.url("nothing"), code=78)


@pytest.mark.parametrize("words", [["status"], ["enqueue", "work"], WORKER], ids=" ".join)
def test_a_server_that_is_away_exits_75(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    with closing(Postgres(authenticated=True)) as server:
        output = given(tmp_path, 75, *words, "--url", server.url().replace(":hunter2", f":{SECRET}"))
    assert "cannot be reached" in output


def test_a_worker_whose_role_may_not_write_exits_78_before_it_starts(strict: Postgres, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    with strict.fresh_schema() as schema:
        given(tmp_path, 0, "migrate", "--url", strict.url(schema=schema))
        strict.execute(
            f"drop role if exists reader; create role reader login password '{PASSWORD}';"
            f"grant usage on schema {schema} to reader; grant select on all tables in schema {schema} to reader;"
            f"grant execute on all functions in schema {schema} to reader"
        )
        output = given(tmp_path, 78, *WORKER, "--url", strict.url(user="reader", schema=schema))
    assert "refuses us: permission denied" in output
    assert "worker_started" not in output


def test_a_worker_whose_database_takes_no_writes_exits_75_before_it_starts(strict: Postgres, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    with strict.fresh_schema() as schema:
        url = strict.url(schema=schema)
        given(tmp_path, 0, "migrate", "--url", url)
        output = given(tmp_path, 75, *WORKER, "--url", f"{url}&default_transaction_read_only=on")
    assert "takes no writes" in output
    assert "worker_started" not in output


def test_a_password_that_was_not_encoded_is_not_shown(tmp_path: Path) -> None:
    for url in (f"postgresql://app:{SECRET}#2@host/db", f"postgresql://app:1/{SECRET}@host/db"):
        assert "percent-encode" in given(tmp_path, 78, "status", "--url", url)


def test_set_up_queries_and_backup_of_the_page_work(strict: Postgres, cli: Cli) -> None:
    for statement in find_block("docs/postgresql.md", "create role").text.rstrip().split("\n"):
        strict.execute(statement)
    host = f"queue:%E2%80%A6@127.0.0.1:{strict.port}"
    owner, app = f"postgresql://{host}/queue", strict.url("queue", user=USER)
    cli.run("migrate", "--url", owner)
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(find_block("docs/postgresql.md", "grant usage").text.encode())
        connection.execute("create table holdfast.later (number int)")  # as a migration would
    cli.run("enqueue", "report.build", "--key", "monday", "--url", app)
    with psycopg.connect(app, autocommit=True) as connection:
        rows = connection.execute(find_block("docs/postgresql.md", "select state").text.encode()).fetchall()
        assert [row[:2] for row in rows] == [("queued", 1)]
        assert connection.execute("insert into holdfast.later values (1)").rowcount == 1

    strict.execute("create database restored owner queue template template0")
    for line in find_block("docs/postgresql.md", "pg_dump").text.replace("queue@host", host).splitlines():
        program, *words = shlex.split(line)
        subprocess.run([installed(MAIN) / "bin" / program, *words], cwd=cli.folder, check=True, timeout=60)
    restored = strict.url("restored", user=USER)
    assert [job["task"] for job in cli.json("list", "--url", restored)["jobs"]] == ["report.build"]


# ── migrate --sql ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_migrate_prints_what_another_tool_is_to_run(cli: Cli) -> None:
    url = "postgresql://nobody@nowhere/db?schema=queue"
    text = cli.run("migrate", "--sql", "0..1", "--url", url)
    assert cli.json("migrate", "--sql", "0..1", "--url", url) == {"sql": text}
    assert 'create schema if not exists "queue";' in text
    assert """insert into "queue".migration (number, name, expand) values (1, '0001_initial', true);""" in text


def test_what_migrate_prints_makes_a_file_a_store(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(
            cli.run("migrate", "--sql", f"0..{len(migrations('sqlite'))}", "--url", f"sqlite:///{file}")
        )
    assert cli.json("migrate", "--url", f"sqlite:///{file}")["applied"] == []


@pytest.mark.parametrize("url", ["sqlite:///holdfast.db", "postgresql://nobody@nowhere/db"])
@pytest.mark.parametrize("span", ["1", "1..1", "0..9", "-1..1", "1..0", "a..b"])
def test_a_span_without_migrations_is_refused(cli: Cli, url: str, span: str) -> None:
    newest = len(migrations("sqlite" if url.startswith("sqlite") else "postgres"))
    error = cli.fail("migrate", f"--sql={span}", "--url", url, code=2)
    assert f"give FROM..TO with 0 <= FROM < TO <= {newest}" in error


def test_migrate_says_what_it_applied_to_a_schema(cli: Cli) -> None:
    with postgres.shared().fresh_schema() as schema:
        url = postgres.shared().url(schema=schema)
        assert json.loads(cli.run("migrate", "--json", "--url", url))["applied"] == migrations("postgres")
        assert "the schema is up to date" in cli.run("migrate", "--url", url)


def test_looking_into_a_database_without_our_tables_makes_none(cli: Cli) -> None:
    with postgres.shared().fresh_schema() as schema:
        url = postgres.shared().url(schema=schema)
        for words in (["status"], ["list"], ["queue", "list"], ["dlq", "purge", "--all"]):
            given = cli.fail(*words, "--url", url, code=1)
            assert f"has no tables of Holdfast in its schema {schema!r} yet (url from argument)" in given
            assert PASSWORD not in given
        assert cli.json("migrate", "--url", url)["applied"] == migrations("postgres")
        assert cli.run("status", "--url", url)


def test_parameter_unknown_to_the_server_is_a_configuration_error(cli: Cli) -> None:
    with postgres.shared().fresh_schema() as schema:
        for wrong in ({"foo": 1}, {"work_mem": "some"}, {"max_connections": 5}):
            url = postgres.shared().url(schema=schema, **wrong)
            assert "url: the server refuses a parameter of it: " in cli.fail("status", "--url", url, code=78)


def test_parameters_of_libpq_without_effect_are_accepted(cli: Cli) -> None:
    needless = {"channel_binding": "prefer", "connect_timeout": 5, "gssencmode": "disable", "keepalives_idle": 30}
    with postgres.shared().fresh_schema() as schema:
        unread = {"sslmode": "disable", "sslrootcert": "/no.pem"}
        url = postgres.shared().url(schema=schema, keepalives=1, tcp_user_timeout=1000, **needless, **unread)
        assert cli.json("migrate", "--url", url)["applied"] == migrations("postgres")


def test_a_command_leaves_no_thread_behind(strict: Postgres, cli: Cli) -> None:
    before = set(threading.enumerate())
    for command in ("migrate", "status", "status"):
        cli.run(command, "--url", strict.url())
    assert set(threading.enumerate()) <= before
