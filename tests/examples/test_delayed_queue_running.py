"""Delayed Queue started and stopped as a whole, and what its papers say. Tests are named by the rows they prove."""

from __future__ import annotations

import fcntl
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.examples.common import PATIENCE, until
from tests.examples.delayed_support import EXAMPLE, QUERY, SETTINGS, Delayed, Server
from tests.examples.programs import ROOT
from tests.examples.readme import Readme, free_ports
from tests.support.servers import base

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^pytest (tests/\S+(?: -k \w+)?) +#", README, re.MULTILINE)
"""The arguments of the commands that run all tests, and those from end to end."""


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.rows("D1", "D3", "D4", "D10")
def test_one_command_starts_everything_and_one_stops_it(delayed: Delayed, tmp_path: Path) -> None:
    redis, server = delayed.free_port(), Server(delayed.free_port())
    given = {"HOLDFAST_URL": f"redis://127.0.0.1:{redis}/0?{QUERY}", "SERVER_PORT": str(server.port)}
    environment = delayed.environment(**given)

    def run(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "delayed_queue", *words], cwd=tmp_path, env=environment)

    def stop_by_command(starting: subprocess.Popen[bytes]) -> None:
        assert run("stop").wait(PATIENCE) == 0

    def stop_by_ctrl_c(starting: subprocess.Popen[bytes]) -> None:
        starting.send_signal(signal.SIGINT)

    before = set(tmp_path.iterdir())
    for stop in (stop_by_command, stop_by_ctrl_c):
        with run("start", "--workers", "2") as starting:
            until(lambda: _listens(server.port), "the server")
            job_id = server.schedule("hello", delay=0.1)
            until(lambda job_id=job_id: server.ask(f"/jobs/{job_id}")[1]["state"] == "succeeded", "the job's end")
            family = psutil.Process(starting.pid).children(recursive=True)
            assert {"server", "worker"} <= {word for each in family for word in each.cmdline()}
            stop(starting)
            assert starting.wait(PATIENCE) == 0
        assert not any(each.is_running() for each in family)
        assert not _listens(server.port)
        assert not _listens(redis)
        assert set(tmp_path.iterdir()) == before


@pytest.mark.rows("D37")
def test_default_port_is_the_one_in_the_readme(delayed: Delayed) -> None:
    environment = delayed.environment()
    environment.pop("SERVER_PORT", None)
    command = [sys.executable, "-c", "from delayed_queue.app import app; print(app.settings.api_port)"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "8080\n"
    assert "curl -sf localhost:8080/jobs" in README


def _refusal(delayed: Delayed, folder: Path, *words: str) -> tuple[int, str]:
    """The exit code and the error of a command that is refused."""
    command = [sys.executable, "-m", "delayed_queue", *words]
    environment = delayed.environment(HOLDFAST_URL=f"redis://127.0.0.1:{delayed.free_port()}/0?{QUERY}")
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            error = process.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it has started, and ends all that it started
            raise
    return process.returncode, error


@pytest.mark.rows("D10")
def test_stopping_without_a_running_queue_is_refused(delayed: Delayed, tmp_path: Path) -> None:
    assert _refusal(delayed, tmp_path, "stop") == (78, "error: delayed_queue.pid: nothing is running here\n")


@pytest.mark.parametrize("number", ["0", "-1", "257"])
def test_number_of_workers_is_checked(delayed: Delayed, tmp_path: Path, number: str) -> None:
    code, error = _refusal(delayed, tmp_path, "start", "--workers", number)
    assert (code, "--workers: give a whole number from 1 to 256" in error) == (2, True)


@pytest.mark.rows("D10")
def test_process_that_took_the_number_of_a_killed_start_is_not_stopped(delayed: Delayed, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (tmp_path / "delayed_queue.pid").write_text(str(other.pid), encoding="utf-8")
        assert _refusal(delayed, tmp_path, "stop") == (78, "error: delayed_queue.pid: nothing is running here\n")
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.rows("D3")
def test_second_start_in_a_directory_is_refused(delayed: Delayed, tmp_path: Path) -> None:
    """Also while the first one has not yet written its number."""
    with (tmp_path / "delayed_queue.pid").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = (78, "error: delayed_queue.pid: it is running already; stop it first\n")
        assert _refusal(delayed, tmp_path, "start") == refused
        assert _refusal(delayed, tmp_path, "stop")[0] == 78


@pytest.mark.rows("D3", "D5", "D6", "D7", "D10", "D37")
def test_readme_commands_run(delayed: Delayed, tmp_path: Path) -> None:
    with free_ports(2) as (redis, server):
        url = f"redis://127.0.0.1:{redis}/0?{QUERY}"
        readme = Readme(
            EXAMPLE / "README.md",
            tmp_path,
            delayed.environment(HOLDFAST_URL=url, SERVER_PORT=server),
            {"localhost:8080": f"localhost:{server}"},
            ["worker_started", "api_started"],
        )
        readme.run()
    assert readme.ran[-1] == "python -m delayed_queue stop"
    assert [line.split()[0] for line in readme.ran].count("curl") == 3


# ── the papers ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("D2", "D44", "D48", "D56")
def test_readme_states_requirements_and_omissions() -> None:
    needs, _, _ = README.partition("## What it needs\n")[2].partition("```")
    assert all(each in needs for each in ("Python 3.11 or newer", "curl", "Redis 6.2 or newer or Valkey"))
    assert "| Express, ioredis, ulid, Jest | Starlette with uvicorn, redis-py with hiredis, " in README
    server = (EXAMPLE / "delayed_queue" / "server.py").read_text(encoding="utf-8")
    assert "site = Starlette(" in server
    assert "Partitions of the sorted set were not built" in README
    (curve,) = re.findall(r"((?:^\|.*\|\n)+)", README[README.index("## A large backlog") :].partition("\n## ")[0], re.M)
    assert re.findall(r"^\| ([\d,]+) \|", curve, re.M) == ["1,000", "10,000", "100,000", "1,000,000"]


@pytest.mark.rows("D1", "D12", "D36")
def test_redis_is_the_only_service_and_private_in_tests(delayed: Delayed) -> None:
    settings = SETTINGS.read_text(encoding="utf-8")
    assert re.findall(r"^url = \"(\w+):", settings, re.M) == ["redis"]
    assert delayed.client.config_get("dir")["dir"].startswith(str(base()))
    assert delayed.port != 6379
    assert delayed.client.keys("*") == []


@pytest.mark.rows("D11")
def test_one_documented_command_selects_every_test() -> None:
    command, _ = DOCUMENTED
    program = [sys.executable, "-m", "pytest", *command.split(), "--collect-only", "-q"]
    collected = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout
    here = {path.name for path in Path(__file__).parent.glob("test_delayed_queue_*.py")}
    assert set(re.findall(r"(test_\w+\.py)", collected.stdout)) == here


@pytest.mark.rows("D13", "D14")
@pytest.mark.timeout(1200)
def test_documented_end_to_end_command_passes_in_about_a_minute() -> None:
    _, command = DOCUMENTED
    program = [sys.executable, "-m", "pytest", *command.split(), "-q", "-p", "no:cacheprovider"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stdout
    assert int(re.findall(r"^(\d+) passed", ran.stdout, re.MULTILINE)[0]) >= 5
    # Not what a clock shows: other tests keep the machine busy meanwhile. Two free cores do this much in a minute.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime <= 120
