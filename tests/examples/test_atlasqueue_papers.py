"""The AtlasQueue example's tables, papers and dependencies. Tests are named by the rows they prove."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
import pytest
import yaml
from packaging.requirements import Requirement

from holdfast.settings.settings import SETTINGS
from tests.examples.atlasqueue_support import DEAD, EXAMPLE, QUEUE, Atlasqueue
from tests.examples.common import PATIENCE, until
from tests.examples.programs import ROOT
from tests.examples.readme import Readme, free_ports, run_documented_tests
from tests.support.stores import migrations

pytestmark = pytest.mark.timeout(400)

README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

COLUMNS = {
    "jobs": {
        "id": "uuid",
        "type": "text",
        "payload": "json",
        "status": "text",
        "attempts": "bigint",
        "max_attempts": "bigint",
        "run_at": "timestamp with time zone",
        "locked_until": "timestamp with time zone",
        "lock_owner": "text",
        "last_error": "text",
        "created_at": "timestamp with time zone",
        "updated_at": "timestamp with time zone",
    },
    "idempotency_keys": {"key": "text", "job_id": "uuid", "created_at": "timestamp with time zone"},
}
IS = "select column_name, data_type from information_schema.columns where table_schema = 'public' and table_name = %s"


@pytest.mark.rows("A10", "A44", "A126", "A149")
def test_migrate_creates_the_tables_once(atlasqueue: Atlasqueue) -> None:
    """On PostgreSQL 16, by two that do it at once; a third finds nothing to do."""
    assert atlasqueue.value("show server_version").startswith("16.")
    atlasqueue.sql("drop view jobs, idempotency_keys")
    atlasqueue.sql("drop schema holdfast cascade")
    both = [atlasqueue.program("atlasqueue", "migrate") for _ in range(2)]
    assert [each.process.wait(60) for each in both] == [0, 0]
    found = [line for each in both for line in each.log().splitlines() if line != "up to date"]
    assert sorted(found) == [*migrations("postgres"), "tables"]
    assert {table: dict(atlasqueue.sql(IS, table)) for table in COLUMNS} == COLUMNS
    assert atlasqueue.run("migrate").log() == "up to date\n"


@pytest.mark.rows("A10")
def test_foreign_table_is_left_untouched(atlasqueue: Atlasqueue) -> None:
    atlasqueue.sql("drop view jobs")
    atlasqueue.sql("create table jobs (id int)")
    refused = atlasqueue.program("atlasqueue", "migrate")
    assert refused.process.wait(60) == 78
    assert refused.log().startswith('error: DATABASE_URL: "jobs" is not a view: give AtlasQueue a database of its own')


CHANGES = [
    "insert into jobs (id) values (gen_random_uuid())",
    "update jobs set max_attempts = 1",
    "delete from jobs",
    "delete from jobs where false",
    "insert into idempotency_keys (key) values ('k')",
    "update idempotency_keys set key = 'other'",
    "delete from idempotency_keys",
]


@pytest.mark.rows("A10")
def test_views_refuse_changes_with_a_sentence(atlasqueue: Atlasqueue) -> None:
    job_id = atlasqueue.submit(key="k")
    before = atlasqueue.row(job_id), atlasqueue.sql("select * from idempotency_keys")
    for statement in CHANGES:
        verb, view = statement.split()[0].upper(), "jobs" if " jobs" in statement else "idempotency_keys"
        with pytest.raises(psycopg.errors.FeatureNotSupported) as refused:
            atlasqueue.sql(statement)
        found = refused.value.diag
        assert found.message_primary == f"{view} is a view, and {verb} is refused: change jobs through Holdfast"
        assert "holdfast.submit()" in str(found.message_hint)
    assert (atlasqueue.row(job_id), atlasqueue.sql("select * from idempotency_keys")) == before


@pytest.mark.rows("A62", "A124")
def test_status_is_one_of_five(atlasqueue: Atlasqueue) -> None:
    states = range(7)  # queued scheduled running failed waiting succeeded dead
    atlasqueue.sql(
        """insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, lease_until)
        select gen_random_uuid(), 'default', 'noop', '{}', n, 0, n, n, n from unnest(%s::int[]) n""",
        list(states),
    )
    found = [status for (status,) in atlasqueue.sql("select status from jobs order by run_at")]
    assert found == ["queued", "queued", "running", "failed", "queued", "succeeded", "dead"]


@pytest.mark.rows("A75", "A103")
def test_worker_logs_to_stdout(atlasqueue: Atlasqueue) -> None:
    command = [sys.executable, "-m", "atlasqueue", "worker"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=atlasqueue.folder, env=atlasqueue.environment(), text=True, **pipes) as worker:
        assert worker.stdout is not None
        line = json.loads(worker.stdout.readline())
        worker.send_signal(signal.SIGTERM)
        _, trouble = worker.communicate(timeout=PATIENCE)
    assert (line["event"] in ("metrics_served", "worker_started"), line["level"], trouble) == (True, "info", "")


# ── the papers ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("A46", "A148", "A151", "A152")
def test_dependencies_contain_no_task_queue() -> None:
    extras = ("fastapi", "postgres", "redis", "web")
    needed = [*PROJECT["dependencies"], *(each for name in extras for each in _extra(name))]
    names = {re.split(r"[\[<>=;]", each)[0] for each in needed}
    core = {"click", "cronsim", "msgspec", "rich", "structlog", "tomlkit", "tzdata", "uvloop"}
    assert names == core | {
        "asyncpg",
        "fastapi",
        "redis",
        "httptools",
        "jinja2",
        "prometheus-client",
        "starlette",
        "uvicorn",
    }
    assert PROJECT["requires-python"] == ">=3.11"


def _extra(name: str) -> list[str]:
    return list(PROJECT["optional-dependencies"][name])


SERVICES = yaml.safe_load((EXAMPLE / "compose.yaml").read_text(encoding="utf-8"))["services"]
ENVIRONMENT = dict(
    line.split("=", 1)
    for line in (EXAMPLE / ".env.docker").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


@pytest.mark.rows("A97", "A105")
def test_readme_and_compose_file_name_the_same_servers() -> None:
    words = SERVICES["postgres"]["environment"]
    url = f"postgresql://{words['POSTGRES_USER']}:{words['POSTGRES_PASSWORD']}@%s:5432/{words['POSTGRES_DB']}"
    assert f"export DATABASE_URL={url % '127.0.0.1'}\n" in README
    assert f'url = "{url % "postgres"}"' in (EXAMPLE / "holdfast.toml").read_text(encoding="utf-8")
    assert ENVIRONMENT["DATABASE_URL"] == url % "postgres"
    servers = {name: (SERVICES[name]["image"], SERVICES[name]["ports"]) for name in ("postgres", "redis")}
    assert servers == {
        "postgres": ("postgres:16", ["127.0.0.1:5432:5432"]),
        "redis": ("redis:7", ["127.0.0.1:6379:6379"]),
    }
    assert SERVICES["postgres"]["volumes"] == ["atlasqueue-data:/var/lib/postgresql/data"]
    assert "`docker compose down -v` wipes it" in README
    assert "Docker with Compose v2" in README


@pytest.mark.rows("A98")
def test_compose_services_start_after_their_dependencies() -> None:
    healthy, done = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}
    conditions = {name: service.get("depends_on") for name, service in SERVICES.items()}
    assert conditions == {
        "postgres": None,
        "redis": None,
        "migrate": {"postgres": healthy, "redis": healthy},
        "api": {"migrate": done},
        "worker": {"migrate": done},
    }
    assert all(SERVICES[name]["healthcheck"]["test"] for name in ("postgres", "redis"))
    published = {name: SERVICES[name]["ports"] for name in ("api", "worker")}
    assert published == {"api": ["127.0.0.1:8000:8000"], "worker": ["127.0.0.1:9091:9091"]}


@pytest.mark.rows("A127")
def test_containers_have_every_variable() -> None:
    from atlasqueue.config import DELAYS, HANDLER_MODULES, VARIABLES, settings

    assert {*VARIABLES, *DELAYS, HANDLER_MODULES} <= ENVIRONMENT.keys()
    given = settings(ENVIRONMENT)
    changed = {name for name in SETTINGS if given.get_value(name) != settings({}).get_value(name)}
    assert changed == {"api_host", "metrics_host", "metrics_open"}
    assert given.retry.schedule(6) == settings({}).retry.schedule(6)
    dockerfile = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")
    targets = dict(re.findall(r"^FROM base AS (\w+)$.*?^CMD (\[.*?\])$", dockerfile, re.MULTILINE | re.DOTALL))
    assert {name: json.loads(words)[3] for name, words in targets.items()} == {"api": "api", "worker": "worker"}
    for name in ("migrate", "api", "worker"):
        service = SERVICES[name]
        assert (service["env_file"], service["build"]["target"] in targets) == (".env.docker", True)
        assert (EXAMPLE / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.rows("A123")
def test_readme_locates_every_part_of_the_original() -> None:
    """Those of the example, and those of Holdfast that do the same work."""
    (table,) = re.findall(r"^## Where things are$.*?((?:^\|[^\n]*\|\n)+)", README, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| (\w[^|]*) \| (`[^|]*) \|$", table, re.MULTILINE))
    assert set(rows) == {
        "configuration",
        "statuses",
        "logs",
        "metrics",
        "tables",
        "session",
        "API",
        "requests and answers",
        "submit and get",
        "worker",
        "consumer",
        "lease",
        "executor",
        "retry",
        "handlers",
    }
    named = [path for cell in rows.values() for path in re.findall(r"`([^`]+)`", cell)]
    assert [path for path in named if not (ROOT / path).exists() and not (EXAMPLE / path).exists()] == []


def test_readme_says_what_replaces_each_file_of_the_original() -> None:
    (table,) = re.findall(r"^\| file of the original \|.*?((?:^\|[^\n]*\|\n)+)", README, re.MULTILINE | re.DOTALL)
    files = {"Dockerfile.api", "Dockerfile.worker", "docker-compose.yml", ".env.docker", "pyproject.toml"}
    rows = re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|$", table, re.MULTILINE)
    assert files <= {name for original, _ in rows for name in re.findall(r"`([^`]+)`", original)}
    replaced = [re.findall(r"`([^`]+)`", cell)[0] for _, cell in rows]
    assert [path for path in replaced if not (ROOT / path).exists() and not (EXAMPLE / path).exists()] == []
    assert "downgrade" in README.partition("## Limits")[2]


@pytest.mark.rows("A11")
def test_dead_letter_list_keeps_what_the_readme_says(atlasqueue: Atlasqueue) -> None:
    (number,) = re.findall(r"of each queue the ([\d,]+) that ended last", README)
    kept = int(number.replace(",", ""))
    job_ids = atlasqueue.submit_many(kept + 5, "test.fail")
    ended = """update holdfast.job set state = 6, ended_at = n + 1 from unnest(%s::uuid[]) with ordinality as of (j, n)
        where id = j"""
    atlasqueue.sql(ended, job_ids)
    with atlasqueue.worker():
        until(lambda: set(atlasqueue.listed(DEAD)) == set(job_ids[5:]), "the mirror of the dead letters")
    assert atlasqueue.command("TYPE", DEAD) == "list"
    assert atlasqueue.value("select count(*) from jobs where status = 'dead'") == kept + 5


@pytest.mark.rows("A75", "A98", "A105")
def test_start_and_wipe_commands_replace_docker(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.client import submit

    asyncio.run(_wiped(atlasqueue))
    program = atlasqueue.program("atlasqueue", "start", HOLDFAST_API_PORT="0", WORKER_METRICS_PORT="0")
    with program:
        address = program.wait_for_events("api_started")[0]["address"]
        program.says("worker_started")
        job = submit(address, "noop", {}, key="one", within=PATIENCE)
        with httpx.Client(base_url=address, timeout=PATIENCE) as client:
            assert client.get(f"/v1/jobs/{job['id']}", params={"wait": 60}).json()["status"] == "succeeded"
        children = psutil.Process(program.process.pid).children()
        assert len(children) == 2
    lines = [json.loads(line) for line in program.log().splitlines()]
    assert all(line["event"] and line["level"] for line in lines)
    (migrated,) = program.events("migrated")
    assert (migrated["level"], migrated["applied"][-1]) == ("info", "tables")
    assert not any(child.is_running() for child in children)
    with atlasqueue.program("atlasqueue", "start", HOLDFAST_API_PORT="0", WORKER_METRICS_PORT="0") as again:
        again.says("worker_started")
        assert again.events("migrated")[0]["applied"] == []
        assert atlasqueue.value("select count(*) from jobs") == 1  # kept
    refused = atlasqueue.program("atlasqueue", "wipe")
    assert (refused.process.wait(60), atlasqueue.value("select count(*) from jobs")) == (2, 1)
    atlasqueue.run("wipe", "--yes")
    assert atlasqueue.value("select to_regclass('jobs')") is None


@pytest.mark.rows("A105")
def test_wipe_empties_the_lists_and_nothing_else(atlasqueue: Atlasqueue) -> None:
    """Of each queue, also of one that only Redis knows. Keys of other programs stay, however alike their names are."""
    foreign = {
        f"{QUEUE}2",
        f"{QUEUE}:nobodys",
        "atlasqueue",
        f"{DEAD}:nobodys",
        f"{QUEUE}2:rate:a",
        f"my{QUEUE}:turn:a",
    }
    for name in foreign:
        atlasqueue.command("SET", name, "theirs")
    for queue, suffix in (("default", ""), ("mail", ":mail")):
        with atlasqueue.worker(HOLDFAST_QUEUES=queue):
            dead = atlasqueue.submit("test.fail", max_attempts=1, queue=queue)
            until(lambda key=f"{DEAD}{suffix}", job=dead: job in atlasqueue.listed(key), "the list of the dead")
        atlasqueue.submit(queue=queue)
        assert atlasqueue.listed(f"{QUEUE}{suffix}")
    (pushed,) = atlasqueue.unheard()
    atlasqueue.sql("update holdfast.job set queue = 'by-hand' where id = %s", pushed)
    atlasqueue.command("LPUSH", f"{QUEUE}:by-hand", pushed)
    atlasqueue.command("SADD", f"{DEAD}@queues", "forgotten")
    atlasqueue.command("LPUSH", f"{DEAD}:forgotten", pushed)
    for name in (f"{QUEUE}@republished", f"{QUEUE}@republished:mail", f"{QUEUE}@republished:by-hand"):
        atlasqueue.command("ZADD", name, 1, pushed)
    for name in ("rate:test.paced", f"turn:{pushed}"):
        atlasqueue.command("SET", f"{QUEUE}:{name}", 1)
    assert foreign < set(atlasqueue.command("KEYS", "*"))
    atlasqueue.run("wipe", "--yes")
    assert set(atlasqueue.command("KEYS", "*")) == foreign
    atlasqueue.run("wipe", "--yes")


@pytest.mark.rows("A105")
def test_wipe_without_a_transport_needs_no_redis(atlasqueue: Atlasqueue) -> None:
    with free_ports(1) as (closed,):
        unreachable = {"REDIS_URL": f"redis://127.0.0.1:{closed}/0", "HOLDFAST_TRANSPORT": "none"}
        wiping = atlasqueue.program("atlasqueue", "wipe", "--yes", **unreachable)
        assert wiping.process.wait(60) == 0, wiping.log()
    assert atlasqueue.value("select to_regclass('jobs')") is None


@pytest.mark.rows("A105")
def test_wipe_deletes_nothing_while_redis_is_away(atlasqueue: Atlasqueue) -> None:
    atlasqueue.submit()
    with free_ports(1) as (closed,):
        refused = atlasqueue.program("atlasqueue", "wipe", "--yes", REDIS_URL=f"redis://127.0.0.1:{closed}/0")
        assert refused.process.wait(60) == 75
    assert refused.log().startswith("error: Redis at 127.0.0.1:")
    assert atlasqueue.value("select count(*) from jobs") == 1


async def _wiped(queue: Atlasqueue) -> None:
    from atlasqueue.tables import wipe

    await wipe(queue.application())


@pytest.mark.rows("A97", "A98", "A99", "A102", "A104")
def test_readme_commands_run(atlasqueue: Atlasqueue) -> None:
    with free_ports(2) as (api, metrics):
        variables = {"HOLDFAST_CONFIG": str(EXAMPLE / "holdfast.toml")}
        variables |= {"HOLDFAST_API_PORT": api, "WORKER_METRICS_PORT": metrics, "HANDLER_MODULES": ""}
        readme = Readme(
            EXAMPLE / "README.md",
            atlasqueue.folder,
            atlasqueue.environment(**variables),
            {"localhost:8000": f"localhost:{api}", "localhost:9091": f"localhost:{metrics}"},
            ["worker_started", "api_started"],
        )
        readme.run()
    types = "select type, count(*), count(*) filter (where status in ('queued', 'failed')) from jobs group by 1"
    found = {kind: number for kind, number, _ in atlasqueue.sql(types)}
    assert found["noop"] == 1, "the same key is the same job"
    assert {"email.send", "order.pack", "mail.send", "no.handler"} <= found.keys()
    assert any(line.startswith("curl") for line in readme.ran)


@pytest.mark.rows("A128")
def test_readme_lists_every_variable_with_its_default() -> None:
    from atlasqueue.config import DELAYS, HANDLER_MODULES, VARIABLES, settings

    found = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]*) \|", README, re.MULTILINE))
    assert found.keys() == {*VARIABLES, *DELAYS, HANDLER_MODULES}
    plain = settings({})
    for variable, (name, *_) in VARIABLES.items():
        shown = found[variable].strip("`").replace(":atlasqueue@", ":***@")
        assert plain.describe_setting(name).text.removesuffix("s") in (shown, shown.removesuffix("s"))
    assert (found["RETRY_BASE_DELAY_SECONDS"], plain.retry.base) == ("5", 5)
    assert (found["RETRY_JITTER_MAX_SECONDS"], plain.retry.jitter) == ("2", "add:2")
    assert urlsplit(plain.url).hostname == "postgres"


@pytest.mark.rows("A36")
def test_readme_promises_only_at_least_once_delivery() -> None:
    assert "| at-least-once delivery; duplicates are detectable, exactly-once is best effort | the same." in README


@pytest.mark.rows("A140")
def test_documented_install_and_tests_need_no_service() -> None:
    """The tests are one that starts its servers itself. What is installed here is what the extra asks for."""
    (extra,) = re.findall(r"^pip install -e '\.\[(dev)\]'$", README, re.MULTILINE)
    for text in _extra(extra):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(version(requirement.name), prereleases=True), text
    files, given = run_documented_tests(README, "test_status_is_one_of_five")
    assert files == {path.name for path in Path(__file__).parent.glob("test_atlasqueue_*.py")}
    assert given.startswith("1 passed") or "\n1 passed" in given


@pytest.mark.rows("A153")
def test_licence_is_mit() -> None:
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
