"""The table of the Atlas Jobs example, its policy and its papers. Tests are named by the rows they prove."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from holdfast.stores.base import ClaimRequest
from tests.examples.atlas_support import EXAMPLE, Atlas
from tests.examples.common import until
from tests.examples.programs import ROOT
from tests.examples.readme import Readme, free_ports, run_documented_tests
from tests.support.postgres import Postgres
from tests.support.servers import base

pytestmark = pytest.mark.timeout(400)


# ── the schema ────────────────────────────────────────────────────────────────────────────────────────────────────
COLUMNS = {
    "job_id": "uuid",
    "status": "text",
    "job_type": "text",
    "payload": "text",
    "attempt_count": "bigint",
    "max_attempts": "bigint",
    "idempotency_key": "text",
    "last_error": "text",
    "next_run_at": "timestamp with time zone",
    "worker_id": "text",
    "created_at": "timestamp with time zone",
    "updated_at": "timestamp with time zone",
}
IS = """select column_name, data_type from information_schema.columns
    where table_schema = 'public' and table_name = 'jobs'"""


@pytest.mark.rows("J4", "J41", "J56")
def test_schema_is_migrated_in_order_and_once(atlas: Atlas) -> None:
    app = atlas.application()
    applied = app.sync.migrate()
    assert applied == sorted(applied) != []
    assert app.sync.migrate() == []
    app.sync.close()
    assert [name for (name,) in atlas.sql("select name from holdfast.migration order by number")] == applied
    with atlas.one(ATLAS_SCHEDULING_ENABLED="false"):
        assert dict(atlas.sql(IS)) == COLUMNS


MANY = """insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at)
    select gen_random_uuid(), 'default', 'demo.sleep', '{}', 0, 0, n, n from generate_series(1, 100000) n"""
USED = "select idx_scan, idx_tup_read from pg_stat_user_indexes where indexrelname = 'job_ready'"
SCANNED = "select seq_tup_read from pg_stat_user_tables where relname = 'job'"


@pytest.mark.rows("J52")
def test_claim_among_100_000_jobs_uses_the_index(atlas: Atlas) -> None:
    """Whatever the planner thinks: the server's own count of what the claims have read."""
    app = atlas.application()
    app.sync.migrate()
    app.sync.close()
    atlas.sql(MANY)
    atlas.sql("analyze holdfast.job")
    scanned = atlas.value(SCANNED)
    claims = 20

    async def claim() -> None:
        async with app:
            store = await app.open_store()
            for _ in range(claims):
                (
                    await store.queueing.claim(
                        ClaimRequest("w", {"default": 1}, limit=1, lease_for=timedelta(minutes=1))
                    )
                ).jobs[0]

    app.run_blocking(claim())
    app.sync.close()
    until(lambda: atlas.sql(USED)[0][0] >= claims, "the statistics of the claims")
    assert atlas.sql(USED)[0][1] <= 100 * claims
    assert atlas.value(SCANNED) == scanned


# ── what the original left behind ─────────────────────────────────────────────────────────────────────────────────
VERSIONS = {
    1: """create table jobs (job_id uuid primary key, status varchar(32) not null, job_type varchar(64) not null,
        payload jsonb, attempt_count int not null, max_attempts int not null, idempotency_key varchar(128) unique,
        created_at timestamptz not null, updated_at timestamptz not null);
        create index idx_jobs_status on jobs (status)""",
    2: "alter table jobs alter column payload type text",
    3: "alter table jobs add column next_run_at timestamptz",
    4: "alter table jobs add column last_error text",
    5: "alter table jobs add column worker_id varchar(64)",
}
"""The original's migrations, as its document tells them."""

NOW = datetime.now(UTC).replace(microsecond=123456)
LONG_AGO, LATER = NOW - timedelta(days=3), NOW + timedelta(hours=1)


def _row(status: str, **fields: Any) -> dict[str, Any]:
    row = {"job_id": str(uuid4()), "status": status, "job_type": "demo.sleep", "payload": '{"seconds": 0}'}
    counts = {"attempt_count": 0, "max_attempts": 3, "idempotency_key": None, "last_error": None}
    return (
        row | counts | {"next_run_at": LONG_AGO, "worker_id": None, "created_at": LONG_AGO, "updated_at": NOW} | fields
    )


def _rows() -> dict[str, dict[str, Any]]:
    return {
        "fresh": _row("QUEUED", idempotency_key="order-1", updated_at=LONG_AGO),
        "later": _row("QUEUED", next_run_at=LATER, updated_at=LONG_AGO),
        "retried": _row("QUEUED", attempt_count=1, next_run_at=LATER, last_error="no: luck", worker_id="w1"),
        "running": _row("RUNNING", worker_id="w1", updated_at=LONG_AGO),
        "done": _row("SUCCEEDED", attempt_count=2, worker_id="w2", idempotency_key="order-2"),
        "dead": _row("DEAD_LETTERED", attempt_count=3, last_error="Payment: never", worker_id="w2", payload=None),
    }


def _left_behind(atlas: Atlas, version: int) -> dict[str, dict[str, Any]]:
    """The original's table after its first migrations, with a job of every kind."""
    for number in range(1, version + 1):
        for statement in VERSIONS[number].split(";"):
            atlas.sql(statement)
    columns = [
        name for (name,) in atlas.sql("select column_name from information_schema.columns where table_name = 'jobs'")
    ]
    rows = _rows()
    for row in rows.values():
        names = [name for name in row if name in columns]
        places = ", ".join(["%s"] * len(names))
        atlas.sql(" ".join(["insert into jobs (", ", ".join(names), ") values (", places, ")"]), *map(row.get, names))
    return rows


def _expected(row: dict[str, Any], version: int) -> dict[str, Any]:
    """What becomes of a row: all of it is kept; what a version did not know yet is nothing."""
    lost = {4: "last_error", 5: "worker_id"}
    kept = row | {name: None for since, name in lost.items() if version < since}
    if version < 3:
        kept["next_run_at"] = row["created_at"]
    return kept | {"status": "QUEUED"} if row["status"] == "RUNNING" else kept


@pytest.mark.rows("J44", "J53", "J54", "J55", "J56")
@pytest.mark.parametrize("version", VERSIONS)
def test_table_of_the_original_is_taken_over(atlas: Atlas, version: int) -> None:
    rows = _left_behind(atlas, version)
    starters = ["one", "two"] if version == max(VERSIONS) else ["one"]
    with atlas.running(*starters, ATLAS_SCHEDULING_ENABLED="false") as (api, *_):
        for name, row in rows.items():
            expected, seen = _expected(row, version), atlas.row(row["job_id"])
            assert api.job(row["job_id"]) == expected, name
            assert [seen[each] for each in ("payload", "last_error")] == [row["payload"], expected["last_error"]], name
        assert api.post(key="order-1").document["job_id"] == rows["fresh"]["job_id"]
    assert atlas.value("select count(*) from jobs") == len(rows)
    assert atlas.value("select count(*) from jobs_before_holdfast") == len(rows)


@pytest.mark.rows("J53")
def test_jobs_taken_over_run(atlas: Atlas) -> None:
    rows = _left_behind(atlas, 5)
    with atlas.one() as instance:
        atlas.due(rows["retried"]["job_id"])
        instance.all_ended([rows[name]["job_id"] for name in ("fresh", "retried", "running", "done")])
        assert instance.job(rows["later"]["job_id"])["status"] == "QUEUED"
        assert instance.job(rows["retried"]["job_id"])["attempt_count"] == 1


# ── the policy ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("J32", "J34", "J35")
def test_retry_delays_match_the_table(atlas: Atlas) -> None:
    app = atlas.application()
    policy, rng = app.settings.retry, random.Random(34)
    nominal = [5, 15, 45, 135, 300]
    assert [delay.total_seconds() for delay in policy.schedule(6)] == nominal
    for failures, delay in enumerate(nominal, 1):
        samples = [policy.delay_after(failures, rng).total_seconds() for _ in range(200)]
        assert 0.7 * delay <= min(samples) < max(samples) <= delay
    assert policy.delay_after(1000, rng) <= timedelta(seconds=300)
    assert app.settings.max_attempts == 3


# ── the papers ────────────────────────────────────────────────────────────────────────────────────────────────────
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.mark.rows("J14", "J57", "J58", "J59")
def test_every_test_has_real_postgresql_and_an_empty_database(postgres: Postgres, tmp_path: Path) -> None:
    """The server is one that the tests have started themselves, of programs that pip installs."""
    with closing(Atlas(postgres, tmp_path)) as first, closing(Atlas(postgres, tmp_path)) as second:
        assert first.database != second.database
        assert first.value("select setting from pg_settings where name = 'port'") == str(postgres.port)
        assert str(first.server.execute("show data_directory")[0][0]).startswith(str(base()))
        for atlas in (first, second):
            assert atlas.value("select count(*) from pg_namespace where nspname = 'holdfast'") == 0
        with first.one(ATLAS_SCHEDULING_ENABLED="false") as api:
            api.submit()
        assert first.value("select count(*) from jobs") == 1
        assert second.value("select to_regclass('jobs')") is None


@pytest.mark.rows("J15")
def test_compose_file_has_the_postgresql_of_the_settings() -> None:
    compose = (EXAMPLE / "compose.yaml").read_text(encoding="utf-8")
    settings = (EXAMPLE / "holdfast.toml").read_text(encoding="utf-8")
    given = {name: re.search(rf"POSTGRES_{name}: (\w+)", compose) for name in ("DB", "USER", "PASSWORD")}
    words = {name: found[1] for name, found in given.items() if found is not None}
    assert "image: postgres:16" in compose
    assert f"HOLDFAST_URL: postgresql://{words['USER']}:{words['PASSWORD']}@postgres:5432/{words['DB']}\n" in compose
    assert (EXAMPLE / "Dockerfile").is_file()
    assert '"127.0.0.1:5432:5432"' in compose
    assert f'"postgresql://{words["USER"]}:{words["PASSWORD"]}@127.0.0.1:5432/{words["DB"]}"' in settings


@pytest.mark.rows("J2", "J67", "J68", "J70", "J77", "J80")
def test_readme_commands_run(atlas: Atlas) -> None:
    with free_ports(2) as (first, second):
        readme = Readme(
            EXAMPLE / "README.md",
            atlas.folder,
            atlas.environment(SERVER_PORT=first),
            {"8080": first, "8081": second},
            ["worker_started", "api_started"],
        )
        readme.run()
    assert atlas.sql("select job_type, idempotency_key from jobs") == [("email.send", "welcome-42")]
    assert [line.split()[0] for line in readme.ran].count("curl") == 6


USES: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "e-mail": ("email.send", '{"to": "a@b.c", "subject": "hi"}', lambda result: "To: a@b.c" in result),
    "payments": ("payment.charge", '{"amount": 5}', lambda result: result["amount"] == 5),
    "files": ("file.process", f'{{"path": "{ROOT / "LICENSE"}"}}', lambda result: len(result) == 64),
    "external calls": ("api.call", '{"url": "http://127.0.0.1:%d/metrics"}', lambda result: result == 200),
    "events": (
        "event.handle",
        '{"event": "e1", "handlers": ["demo.sleep"], "seconds": 0}',
        lambda result: len(result) == 1,
    ),
}


@pytest.mark.rows("J20")
def test_every_kind_of_use_has_a_task(atlas: Atlas) -> None:
    result = "select result::json from holdfast.job where id = %s"
    with atlas.one() as instance:
        for use, (task, payload, is_right) in USES.items():
            assert f"| {use} | `{task}`" in README
            job_id = instance.submit(task, payload.replace("%d", str(instance.port)))
            instance.all_ended([job_id])
            assert is_right(atlas.value(result, job_id)), use
            handler = f"{job_id}/demo.sleep"
        instance.when(atlas.value("select job_id::text from jobs where idempotency_key = %s", handler), "SUCCEEDED")
        for task, payload in (("payment.charge", '{"amount": 0}'), ("api.call", '{"url": "file:///etc/passwd"}')):
            assert instance.when(instance.submit(task, payload), "DEAD_LETTERED")["attempt_count"] == 1


@pytest.mark.rows("J81")
def test_documented_command_runs_the_tests() -> None:
    files, given = run_documented_tests(README, "test_scheduling_setting_leaves_jobs_queued")
    assert files == {path.name for path in Path(__file__).parent.glob("test_atlas_*.py")}
    assert given.startswith("1 passed") or "\n1 passed" in given


@pytest.mark.rows("J79")
def test_default_port_is_the_one_in_the_readme(atlas: Atlas) -> None:
    environment = atlas.environment()
    environment.pop("SERVER_PORT", None)
    command = [sys.executable, "-c", "from atlas_jobs.app import app; print(app.settings.api_port)"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "8080\n"
    assert "curl -sf localhost:8080/jobs" in README
    assert "on 127.0.0.1; 8080 |" in README


@pytest.mark.rows("J82")
def test_licence_is_mit() -> None:
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
