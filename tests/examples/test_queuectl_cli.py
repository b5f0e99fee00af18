"""The command line of the queuectl example, without workers.

Each test is named by the rows of the requirements it proves.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.ids import new_id
from holdfast.stores.base import ClaimRequest
from tests.examples.queuectl_support import EXAMPLE, QUICK, ROOT, Queue, answer, call
from tests.support.load import slowness
from tests.web.client import Api
from tests.web.keyed import Keys, ask, refused

DEFAULTS: dict[str, Any] = {
    "backoff_base": 2,
    "max_retries": 3,
    "timeout": 300,
    "lock_timeout": 300,
    "check_interval": 1,
    "stop_timeout": 300,
    "execution": "shell",
    "allowed_commands": [],
    "max_memory": None,
    "max_cpu": None,
    "max_processes": None,
    "max_open_files": None,
    "max_file_size": None,
    "sandbox": "none",
    "alert_dead": None,
    "alert_command": None,
}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path)
    yield made
    made.app.sync.close()


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
REFUSED = {
    "no JSON": "sleep 1",
    "no object": '["sleep 1"]',
    "no command": '{"id": "a"}',
    "an empty command": '{"command": " "}',
    "a command that is no text": '{"command": 3}',
    "a negative budget": '{"command": "true", "max_retries": -1}',
    "a budget that is no number": '{"command": "true", "max_retries": "3"}',
    "a truth for a number": '{"command": "true", "max_retries": true}',
    "an unknown field": '{"command": "true", "retries": 3}',
    "dependencies, which come later": '{"command": "true", "depends_on": ["a"]}',
    "an empty id": '{"id": "", "command": "true"}',
    "an id that cannot be typed": '{"id": "a\\u0000b", "command": "true"}',
    "a time that is none": '{"command": "true", "run_at": "tomorrow"}',
    "a time without a zone": '{"command": "true", "run_at": "2030-01-01T00:00:00"}',
    "a negative timeout": '{"command": "true", "timeout": -1}',
    "a priority out of range": '{"command": "true", "priority": 101}',
    "an empty user": '{"command": "true", "user": ""}',
    "a user that is no text": '{"command": "true", "user": 7}',
    "a user that no variable can hold": '{"command": "true", "user": "a\\u0000b"}',
    "a NUL": '{"command": "echo \\u0000"}',
}


@pytest.mark.rows("Q7", "Q38")
@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_invalid_job_is_refused_and_nothing_is_stored(queue: Queue, text: str) -> None:
    called = call(queue, "enqueue", text)
    assert called.exit_code == 2
    assert called.stderr.startswith("Error: ")
    assert "Traceback" not in called.output
    assert answer(queue, "status", "--json")["total"] == 0


@pytest.mark.rows("Q7")
def test_one_invalid_line_refuses_all_lines(queue: Queue) -> None:
    called = call(queue, "enqueue", "-", given='{"command": "true"}\n{"comand": "true"}\n')
    assert called.exit_code == 2
    assert "line 2" in called.stderr
    assert answer(queue, "status", "--json")["total"] == 0


@pytest.mark.rows("Q14", "Q33")
def test_job_is_enqueued_once_under_its_id(queue: Queue) -> None:
    text = '{"id": "job1", "command": "sleep 1", "max_retries": 3}'
    assert call(queue, "enqueue", text).output == "job1\n"
    (listed,) = answer(queue, "list", "--state", "pending", "--json")
    assert (listed["id"], listed["command"], listed["max_retries"]) == ("job1", "sleep 1", 3)
    assert (listed["state"], listed["attempts"]) == ("pending", 0)
    again = call(queue, "enqueue", '{"id": "job1", "command": "echo other"}')
    assert again.exit_code == 1
    assert "job1 is there already" in again.stderr
    assert queue.job("job1")["command"] == "sleep 1"
    assert answer(queue, "status", "--json")["total"] == 1


@pytest.mark.rows("Q14")
def test_job_without_an_id_gets_one(queue: Queue) -> None:
    made = answer(queue, "enqueue", '{"command": "true"}', "--json")
    assert queue.job(made["id"])["max_retries"] == 3
    assert json.loads(call(queue, "show", made["id"]).output)["failures"] == []


@pytest.mark.rows("Q5", "Q15")
def test_status_and_list_show_every_job_and_state(queue: Queue) -> None:
    queue.enqueue(*({"id": f"job{number}", "command": "true"} for number in range(3)))
    queue.edit("update holdfast_job set state = 6, error = 'exit code 7', ended_at = run_at where seq = 1")
    queue.edit("update holdfast_job set state = 5, ended_at = run_at where seq = 2")
    shown = answer(queue, "status", "--json")
    assert shown["jobs"] == {"pending": 1, "processing": 0, "completed": 1, "failed": 0, "dead": 1}
    assert (shown["total"], shown["workers"]) == (3, [])
    assert "pending            1" in call(queue, "status").output
    assert [each["id"] for each in answer(queue, "list", "--json")] == ["job2", "job1", "job0"]
    assert [each["id"] for each in answer(queue, "list", "--state", "completed", "--json")] == ["job1"]
    table = call(queue, "list").output
    assert "job0  dead" in table
    assert "exit code 7" in table
    assert call(queue, "list", "--state", "running").exit_code == 2


@pytest.mark.rows("Q15")
def test_command_cannot_write_control_codes_to_the_terminal(queue: Queue) -> None:
    queue.enqueue({"id": "job1", "command": "echo \x1b[2J"})
    assert "\x1b" not in call(queue, "list").output


@pytest.mark.rows("Q43")
def test_dead_letter_queue_is_listed_and_retried(queue: Queue) -> None:
    queue.enqueue({"id": "job1", "command": "false"}, {"id": "job2", "command": "false"})
    queue.edit("update holdfast_job set state = 6, attempts = 4, error = 'exit code 1' where seq = 1")
    (dead,) = answer(queue, "dlq", "list", "--json")
    assert (dead["id"], dead["attempts"], dead["error"]) == ("job1", 4, "exit code 1")
    assert call(queue, "dlq", "retry", "job2").exit_code == 1
    assert call(queue, "dlq", "retry", "nobody").exit_code == 1
    assert call(queue, "dlq", "retry", "job1").exit_code == 0
    again = queue.job("job1")
    assert (again["state"], again["attempts"], again["error"]) == ("pending", 0, None)


# ── the program ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("Q8")
def test_command_prints_help_and_refuses_unknown_options(queue: Queue) -> None:
    shown = queue.run("--help")
    assert shown.returncode == 0
    for name in ("enqueue", "status", "list", "worker", "dlq", "config"):
        assert name in shown.stdout
    refused = queue.run("status", "--loud")
    assert refused.returncode == 2
    assert "Usage: queuectl status" in refused.stderr


@pytest.mark.rows("Q9")
def test_context_object_locates_the_queue(queue: Queue, tmp_path: Path) -> None:
    from queuectl.config import Place

    other = Queue(tmp_path / "other")
    assert call(other, "enqueue", '{"id": "job1", "command": "true"}').exit_code == 0
    assert other.job("job1")["state"] == "pending"
    assert answer(queue, "status", "--json")["total"] == 0
    shared_worker_id = call(queue, "--db", str(other.place.database), "status", "--json")
    assert json.loads(shared_worker_id.output)["total"] == 1
    assert Place.here().database.name == "queuectl.db"
    other.app.sync.close()


@pytest.mark.rows("Q10", "Q11", "Q12")
@pytest.mark.parametrize(
    ("group", "commands"),
    [("worker", {"start", "stop"}), ("dlq", {"list", "retry"}), ("config", {"get", "set", "list"})],
)
def test_command_groups_have_their_commands(queue: Queue, group: str, commands: set[str]) -> None:
    shown = call(queue, group, "--help")
    assert shown.exit_code == 0
    _, _, listed = shown.output.partition("Commands:")
    assert {line.split()[0] for line in listed.strip().splitlines()} == commands


@pytest.mark.rows("Q13")
@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_invalid_worker_count_is_refused(queue: Queue, count: str) -> None:
    assert call(queue, "worker", "start", "--count", count).exit_code == 2


@pytest.mark.rows("Q2", "Q17")
def test_first_command_in_an_empty_directory_creates_the_database(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    command = [sys.executable, "-m", "queuectl", "enqueue", '{"id": "job1", "command": "true"}']
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "queuectl.db").exists()
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {name.split(">")[0] for name in project["dependencies"]} == {"click", "holdfast"}


@pytest.mark.rows("Q17")
def test_database_is_the_file_of_that_name(queue: Queue, tmp_path: Path) -> None:
    folder = tmp_path / "50%41 #1?"
    folder.mkdir()
    assert call(queue, "--db", str(folder / "a%20b.db"), "enqueue", '{"command": "true"}').exit_code == 0
    assert [path.name for path in folder.glob("*.db")] == ["a%20b.db"]


@pytest.mark.rows("Q64")
def test_commands_need_no_login(queue: Queue) -> None:
    assert [call(queue, "status").exit_code for _ in range(30)] == [0] * 30


@pytest.mark.rows("Q67")
def test_http_api_on_the_same_queue_requires_a_key(queue: Queue, tmp_path: Path) -> None:
    queue.enqueue({"id": "job1", "command": "true"})
    keys = Keys(tmp_path)
    with Api(f"sqlite:///{queue.place.database}", keys_file=str(keys.path)) as api:
        for token in (None, "hf_wrong", keys.spare[:-1]):
            refused(ask(api, token, "GET", "/v1/jobs"), 401, "unauthorized")
        (job,) = ask(api, keys.spare, "GET", "/v1/jobs").json()["jobs"]
    assert job["key"] == "job1"
    assert "HOLDFAST_KEYS_FILE=keys.toml holdfast api" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("Q30", "Q31")
def test_settings_in_a_json_file_apply_from_the_next_command(queue: Queue) -> None:
    queue.place.config.unlink()
    assert call(queue, "config", "set", "max_retries", "1").exit_code == 0
    assert json.loads(queue.place.config.read_text(encoding="utf-8")) == {"max_retries": 1}
    assert answer(queue, "enqueue", '{"command": "true"}', "--json")["max_retries"] == 1
    assert answer(queue, "config", "get", "max_retries") == 1
    assert call(queue, "config", "set", "allowed_commands", "echo,sleep").exit_code == 0
    assert answer(queue, "config", "list", "--json") == {
        **DEFAULTS,
        "max_retries": 1,
        "allowed_commands": ["echo", "sleep"],
    }


@pytest.mark.rows("Q32")
def test_defaults_apply_without_a_settings_file(queue: Queue) -> None:
    queue.place.config.unlink()
    assert answer(queue, "config", "list", "--json") == DEFAULTS
    settings = queue.place.settings()
    assert [delay.total_seconds() for delay in settings.retry.schedule(4)] == [2, 4, 8]
    assert settings.max_attempts == DEFAULTS["max_retries"] + 1
    assert settings.command_timeout is not None
    seconds = (settings.command_timeout, settings.lease, settings.poll, settings.sweep, settings.grace)
    assert [span.total_seconds() for span in seconds] == [300, 300, 1, 1, 300]
    assert (settings.concurrency, settings.commands) == (1, "shell")
    assert (settings.keep_succeeded, settings.keep_dead) == (None, None)


@pytest.mark.rows("Q30")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_retries", "-1"),
        ("max_retries", "1.5"),
        ("max_retries", "many"),
        ("backoff_base", "0"),
        ("timeout", "true"),
        ("lock_timeout", "0"),
        ("check_interval", "NaN"),
        ("check_interval", "null"),
        ("execution", "perl"),
        ("allowed_commands", "[1]"),
        ("max_memory", "512K"),
        ("max_cpu", "true"),
        ("sandbox", "maybe"),
        ("colour", "red"),
    ],
)
def test_invalid_setting_is_refused_and_nothing_is_written(queue: Queue, name: str, value: str) -> None:
    before = queue.place.config.read_bytes()
    called = call(queue, "config", "set", name, "--", value)
    assert called.exit_code == 2
    assert name in called.stderr
    assert queue.place.config.read_bytes() == before


@pytest.mark.rows("Q30")
def test_program_with_the_name_of_a_truth_value_is_a_program(queue: Queue) -> None:
    assert call(queue, "config", "set", "allowed_commands", "true").exit_code == 0
    assert answer(queue, "config", "get", "allowed_commands") == ["true"]


@pytest.mark.rows("Q30")
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"colour": 1}', b'{"timeout": "x"}', b"", b"\xff{}", None])
def test_broken_settings_file_is_named(queue: Queue, content: bytes | None) -> None:
    queue.place.config.unlink()
    queue.place.config.mkdir() if content is None else queue.place.config.write_bytes(content)
    called = call(queue, "status")
    assert called.exit_code == 78
    assert "queuectl.json" in called.stderr


@pytest.mark.rows("Q39")
@pytest.mark.parametrize(
    ("base", "delays"), [(2, [2, 4, 8]), (3, [3, 9, 27]), (1, [1, 1, 1]), (1.5, [1.5, 2.25, 3.375])]
)
def test_delay_is_the_base_to_the_power_of_failures(queue: Queue, base: float, delays: list[float]) -> None:
    assert call(queue, "config", "set", "backoff_base", str(base)).exit_code == 0
    assert [delay.total_seconds() for delay in queue.place.settings().retry.schedule(4)] == delays


@pytest.mark.rows("Q42")
def test_attempts_come_from_the_setting_or_the_job(queue: Queue) -> None:
    from queuectl.app import open_app

    call(queue, "config", "set", "max_retries", "1000")
    assert answer(queue, "enqueue", '{"id": "a", "command": "true"}', "--json")["max_retries"] == 1000
    assert answer(queue, "enqueue", '{"id": "b", "command": "true", "max_retries": 0}', "--json")["max_retries"] == 0
    app = open_app(queue.place)
    assert app.sync.get("key:b").max_attempts == 1
    app.sync.close()


# ── the database ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_writes_are_synchronous_and_in_wal_mode(queue: Queue) -> None:
    queue.enqueue({"command": "true"})
    with closing(sqlite3.connect(queue.place.database)) as connection:
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
    findings = {each.name: each for each in queue.app.sync.doctor()}
    durability = next(each for name, each in findings.items() if "durab" in name)
    assert durability.level == "ok"
    assert durability.text.startswith("journal_mode=wal, synchronous=FULL")
    assert stat.S_IMODE(queue.place.database.stat().st_mode) == 0o600


@pytest.mark.rows("Q52")
def test_everything_is_kept_after_a_restart(queue: Queue) -> None:
    queue.enqueue(*({"id": name, "command": "true"} for name in ("pending", "failed", "dead")))
    queue.edit("update holdfast_job set state = 3, attempts = 1, run_at = run_at + 3600000000 where seq = 2")
    queue.edit("update holdfast_job set state = 6, attempts = 4 where seq = 3")
    call(queue, "config", "set", "max_retries", "7")
    queue.app.sync.close()
    fresh = json.loads(queue.run("list", "--json").stdout)
    assert {each["id"]: each["state"] for each in fresh} == {name: name for name in ("pending", "failed", "dead")}
    assert queue.run("config", "get", "max_retries").stdout == "7\n"


@pytest.mark.rows("Q19", "Q61")
def test_a_thousand_operations_leave_nothing_open(queue: Queue) -> None:
    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    call(queue, "status")
    queue.app.sync.close()
    before = handles()
    for number in range(150):
        assert call(queue, "enqueue", json.dumps({"id": f"job{number}", "command": "true"})).exit_code == 0
    for _ in range(100):
        assert call(queue, "enqueue", '{"id": "job1", "command": "true"}').exit_code == 1
    assert handles() == before
    for number in range(800):
        assert queue.job(f"job{number % 150}")["state"] == "pending"
    queue.app.sync.close()
    assert handles() == before


@pytest.mark.rows("Q60")
def test_a_thousand_jobs_are_stored_in_one_transaction(queue: Queue) -> None:
    def store(batch: int) -> float:
        names = (f"job{batch}-{number}" for number in range(1000))
        given = "".join(json.dumps({"id": name, "command": "true"}) + "\n" for name in names)
        began = time.monotonic()
        ran = queue.run("enqueue", "-", given=given)
        seconds = time.monotonic() - began
        assert (ran.returncode, ran.stdout) == (0, "1000 jobs enqueued\n")
        return seconds

    assert min(map(store, range(3))) <= 2 * slowness()
    lines = '{"id": "job0-7", "command": "true"}\n{"id": "new", "command": "true"}\n'
    repeated = queue.run("enqueue", "-", given=lines)
    assert repeated.returncode == 1
    assert "1 jobs were there already: job0-7" in repeated.stderr
    assert queue.states()["pending"] == 3001


@pytest.mark.rows("Q55")
def test_a_hundred_thousand_jobs_do_not_slow_down_commands(queue: Queue) -> None:
    from queuectl.models import drafted, parse

    job = drafted(queue.app, parse('{"command": "true"}'))  # The others differ in their ids only.
    ids = (new_id() for _ in range(100_000))
    queue.app.sync.enqueue_many((replace(job, id=each, key=each) for each in ids), batch_size=10_000)

    def status(_: int) -> float:
        began = time.monotonic()
        assert answer(queue, "status", "--json")["total"] == 100_000
        return time.monotonic() - began

    assert min(map(status, range(3))) < 2 * slowness()
    assert min(sorted(queue.app.run_blocking(_claims(queue, 100)))[94] for _ in range(3)) < 0.05 * slowness()


async def _claims(queue: Queue, count: int) -> list[float]:
    """How long single claims take."""
    store = await queue.app.open_store()
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        claim = await store.queueing.claim(
            ClaimRequest("worker", {"*": 1}, limit=1, lease_for=queue.app.settings.lease)
        )
        spent.append(time.perf_counter() - began)
        assert len(claim.jobs) == 1
    return spent


# ── what is delivered beside the code ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("Q6")
def test_modules_import_only_their_own_layer() -> None:
    imported = {
        path.stem: {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        for path in (EXAMPLE / "queuectl").glob("*.py")
    }
    assert "click" not in imported["models"] | imported["config"] | imported["app"], "only the CLI layer knows click"
    assert not {name for name, rooms in imported.items() if "sqlite3" in rooms}, "the database layer is Holdfast's"


@pytest.mark.rows("Q80")
def test_package_provides_the_command() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["project"]["scripts"]["queuectl"].partition(":")
    program = f"import sys; from {module} import {name}; sys.argv[0] = 'queuectl'; {name}()"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    ran = subprocess.run(
        [sys.executable, "-c", program, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("Usage: queuectl ")
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["queuectl"]
    assert (EXAMPLE / "queuectl" / "holdfast.toml").exists()


@pytest.mark.rows("Q81")
def test_systemd_unit_has_the_documented_settings() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    unit.read(EXAMPLE / "queuectl.service")
    assert unit["Unit"]["After"] == "network.target"
    assert unit["Service"]["Type"] == "simple"
    assert unit["Service"]["ExecStart"] == "/usr/bin/queuectl worker start --count 4"
    assert unit["Service"]["Restart"] == "always"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.rows("Q82")
def test_image_starts_three_workers() -> None:
    lines = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert 'CMD ["queuectl", "worker", "start", "--count", "3"]' in lines
    (base,) = [line for line in lines if line.startswith("FROM ")]
    version = tuple(map(int, base.removeprefix("FROM python:").removesuffix("-slim").split(".")))
    assert version >= (3, 11)


@pytest.mark.rows("Q53", "Q54", "Q58", "Q72", "Q84")
def test_readme_has_its_required_sections() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    for title in (
        "Limits",
        "What costs what",
        "By hand",
        "Where to extend it",
        "What QueueCTL promises, and what keeps it",
    ):
        assert f"\n## {title}\n" in readme
    for words in ("not distributed", "one writer", "poll", "ACID", "zero configuration"):
        assert words in readme.lower() or words in readme


def test_the_quick_settings_of_these_tests_are_settings() -> None:
    assert DEFAULTS.keys() >= QUICK.keys()
