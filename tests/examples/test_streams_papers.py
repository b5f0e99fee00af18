"""The `streams` example's README, containers, settings and story."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import yaml
from fastapi import FastAPI

from holdfast import Settings
from tests.examples.common import until
from tests.examples.programs import ROOT, environment
from tests.examples.readme import Readme, free_ports, run_documented_tests
from tests.examples.rows import checked_rows, named_rows
from tests.examples.streams_support import EXAMPLE, OWN_VARIABLES, SERVICES, settings_file
from tests.support.servers import private_folder

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
INFRASTRUCTURE = EXAMPLE / "infrastructure"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
CONTAINERS = yaml.safe_load((INFRASTRUCTURE / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
STORY_TIMEOUT = 300


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder that other users can read: the servers may run as another one."""
    folder = private_folder("streams")
    yield folder
    folder.rmdir()


def processes_of(folder: Path) -> list[str]:
    """Returns the command lines of processes that were started with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) or process.environ().get("TMPDIR") == str(folder):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a program that starts the whole system."""
    return environment(EXAMPLE, OWN_VARIABLES, TMPDIR=str(folder), **more)


# ── the story ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("S1", "S40")
def test_story_keeps_every_promise_and_leaves_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "streams", "story"]
    ran = subprocess.run(
        command, env=variables(folder), capture_output=True, text=True, timeout=STORY_TIMEOUT, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert processes_of(folder) == []
    assert list(folder.iterdir()) == []
    assert "✗" not in ran.stdout
    figures = dict(re.findall(r"│ (users|notifications) +│ +((?:\d+ │ +)+\d+) │", ran.stdout))
    for service in SERVICES:
        accepted, succeeded, dead, cancelled, unfinished = map(int, re.findall(r"\d+", figures[service]))
        assert accepted == succeeded + dead + cancelled > 0
        assert unfinished == 0
    for chapter in ("kill -9", "rate limited", "dead after 1 attempt", "POST /users answers 503"):
        assert chapter in ran.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_start_leaves_no_process(folder: Path, number: signal.Signals, tmp_path: Path) -> None:
    with free_ports(1) as (port,):
        given = variables(folder, GATEWAY_PORT=port)
        command = [sys.executable, "-m", "streams", "start"]
        with (tmp_path / "log").open("wb") as log:
            started = subprocess.Popen(command, cwd=tmp_path, env=given, stdout=log, stderr=log)
        until(lambda: len(processes_of(folder)) > 2, "the first servers")
        started.send_signal(number)
        assert started.wait(STORY_TIMEOUT) == 0, (tmp_path / "log").read_text()
    assert processes_of(folder) == []
    assert list(folder.iterdir()) == []


def test_commands_refuse_what_cannot_work(tmp_path: Path) -> None:
    def refused(*words: str, **more: str) -> str:
        command = [sys.executable, "-m", "streams", *words]
        given = {**variables(tmp_path), **more}
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 78
        return done.stderr

    nothing = "error: streams.json: no system runs in this directory; start it: python -m streams start\n"
    for words in (["stop"], ["pending", "users"], ["run", "users", "holdfast", "list"]):
        assert refused(*words) == nothing
    expected = "error: GATEWAY_PORT: 'http' is not valid; give a port from 1 to 65535\n"
    assert refused("start", GATEWAY_PORT="http") == expected


# ── the README ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("S1", "S4", "S39", "S76")
def test_readme_commands_run(tmp_path: Path) -> None:
    """The runbook too: a stuck job, pending entries, a replay."""
    with free_ports(1) as (port,):
        given = environment(EXAMPLE, OWN_VARIABLES, GATEWAY_PORT=port)
        replaced = {"localhost:8000": f"localhost:{port}"}
        readme = Readme(EXAMPLE / "README.md", tmp_path, given, replaced, ["The gateway answers at"])
        readme.run()
    ran = "\n".join(readme.ran)
    for command in ("holdfast list --state running", "holdfast why", "streams pending", "/replay", "holdfast doctor"):
        assert command in ran
    assert not (tmp_path / "streams.json").exists()


@pytest.mark.rows("S73")
def test_readme_maps_each_recovery_path_to_code_and_test() -> None:
    section = README.partition("## Reliability patterns")[2].partition("## Trade-offs")[0]
    rows = {
        name: cells
        for name, *cells in re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", section, re.M)
    }
    paths = {"idempotency boundaries", "leases and visibility timeout", "retry discipline", "checkpoints"}
    assert paths | {"dead letters and replay"} <= rows.keys()
    for how, code, tests in list(rows.values())[1:]:
        assert how
        assert re.search(r"`[\w/.-]+`", code)
        assert re.search(r"`test_streams_\w+\.py`", tests)
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", README)
    assert [link for link in links if not (EXAMPLE / link).exists()] == []


@pytest.mark.rows("S74")
def test_readme_states_the_trade_offs() -> None:
    section = README.partition("## Trade-offs")[2].partition("## Runbook")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    assert [decision for decision, _, _ in rows] == [
        "Redis Streams over a workflow engine",
        "idempotency in the application over strict queue semantics",
        "a database per service",
        "leases and a visibility timeout over a central orchestrator",
    ]
    assert all(gain and price for _, gain, price in rows)


@pytest.mark.rows("S73")
def test_readme_links_every_row_to_code_and_a_test_that_claims_it() -> None:
    section = README.partition("## Requirements")[2].partition("## Tests")[0]
    rows = re.findall(r"^\| (S[^|]*) \| [^|]* \| ([^|]*) \| ([^|]*) \|$", section, re.MULTILINE)
    assert sorted(int(row) for names, _, _ in rows for row in re.findall(r"S(\d+)", names)) == sorted(
        {*range(1, 77)} | {68, 69}
    )
    for names, code, tests in rows:
        assert re.search(r"\]\([^)]+\)", code)
        files = re.findall(r"\]\(([\w/.]+\.py)\)", tests)
        claimed = {row for file in files for row in named_rows((EXAMPLE / file).read_text(encoding="utf-8"), "s")}
        assert {int(row) for row in re.findall(r"S(\d+)", names)} <= claimed, (names, files)
    assert checked_rows("test_streams_*.py", "s") <= {*range(1, 77)}


def test_documented_tests_need_no_service() -> None:
    files, given = run_documented_tests(README, "test_readme_states_the_trade_offs")
    assert files == {path.name for path in Path(__file__).parent.glob("test_streams_*.py")}
    assert "1 passed" in given


# ── containers and settings ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("S66")
def test_stack_is_fastapi_python_redis_postgresql_and_compose() -> None:
    for module in ("streams.gateway", "streams.provider", *(f"streams.{name}.api" for name in SERVICES)):
        assert isinstance(import_module(module).site, FastAPI)
    dockerfile = (INFRASTRUCTURE / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.12", dockerfile, re.MULTILINE)
    images = {name: service["image"] for name, service in CONTAINERS.items() if "image" in service}
    assert images == {"redis": "redis:7", "users-db": "postgres:16", "notifications-db": "postgres:16"}


@pytest.mark.rows("S67")
def test_compose_file_starts_every_part_with_its_settings() -> None:
    assert "`cd infrastructure`, then `docker compose up --build`" in README
    built = {name: service for name, service in CONTAINERS.items() if "build" in service}
    for service in built.values():
        assert (INFRASTRUCTURE / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).samefile(INFRASTRUCTURE / "Dockerfile")
    workers = {f"{name}-{part}" for name in SERVICES for part in ("worker", "migrate")}
    assert built.keys() == {*SERVICES, *workers, "gateway", "provider"}
    assert [name for name, service in CONTAINERS.items() if "ports" in service] == ["gateway"]
    for name in SERVICES:
        settings = Settings.load(path=settings_file(name), environ={})
        given = CONTAINERS[name]["environment"]
        assert given == CONTAINERS[f"{name}-worker"]["environment"] == CONTAINERS[f"{name}-migrate"]["environment"]
        assert (given["HOLDFAST_URL"], given["HOLDFAST_TRANSPORT_URL"]) == (settings.url, settings.transport_url)
        assert EXAMPLE / Path(given["HOLDFAST_CONFIG"]).relative_to("/streams") == settings_file(name)
        owner = CONTAINERS[f"{name}-db"]["environment"]["POSTGRES_USER"]
        assert settings.url == f"postgresql://{owner}:{owner}@{name}-db:5432/{owner}"
    targets = [word for service in built.values() for word in service.get("command", []) if ":site" in word]
    assert len(targets) == 3
    dockerfile = (INFRASTRUCTURE / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    for target in (*targets, json.loads(command)[1]):
        assert isinstance(getattr(import_module(target.partition(":")[0]), "site", None), FastAPI)


@pytest.mark.rows("S3", "S23", "S24")
def test_settings_of_the_services_differ_by_their_names_alone() -> None:
    from streams.guard import DEFAULT_TTL

    texts = [settings_file(name).read_text(encoding="utf-8").replace(name, "SERVICE") for name in SERVICES]
    assert texts[0] == texts[1]
    for name in SERVICES:
        settings = Settings.load(path=settings_file(name), environ={})
        assert (settings.transport, settings.transport_key, settings.transport_dead_key) == (
            "redis_stream",
            f"{name}:jobs",
            f"{name}:dead",
        )
        assert settings.keep_succeeded == settings.keep_cancelled == timedelta(seconds=DEFAULT_TTL), "as the guard"
        assert str(settings.retry) == "1,5,25,125"
        assert settings.max_attempts == 5
