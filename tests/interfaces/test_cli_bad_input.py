"""A user's mistakes: one line that names the thing and the remedy, the right exit code, nothing done."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.interfaces.cli import Cli

USAGE = [
    (["lits"], "did you mean list?"),
    (["flush"], "holdfast queue purge NAME"),
    (["queue", "delete", "mail"], "holdfast queue purge NAME"),
    (["start"], "holdfast worker start"),
    (["worker", "-A", "app:app"], "Missing command. There are: start,"),
    (["list", "--bogus"], "--bogus"),
    (["list", "--limit"], "requires an argument"),
    (["list", "--limit", "0"], "1<=x<=500"),
    (["list", "--state", "bored"], "bored"),
    (["list", "--queue", "No Spaces"], "queue: 'No Spaces'"),
    (["list", "--since", "yesterday"], "since: 'yesterday'"),
    (["list", "--since", "1h", "--until", "2h"], "since: '1h' is not before until"),
    (["list", "--since", "2030-02-30T00:00:00Z"], "since"),
    (["list", "--cursor", "x"], "cursor: 'x'"),
    (["show"], "Missing argument"),
    (["show", "not-an-id"], "id: 'not-an-id'"),
    (["cancel"], "--all"),
    (["cancel", "key:a", "--queue", "mail"], "not both"),
    (["delete", "--dry-run"], "--all"),
    (["replay", "--all", "--payload", "{}"], "name its id"),
    (["enqueue"], "name the task"),
    (["enqueue", "no spaces"], "task: 'no spaces'"),
    (["enqueue", "work", "{"], "payload"),
    (["enqueue", "work", "[1]"], "give a JSON object"),
    (["enqueue", "work", '{"a": 1, "a": 2}'], "payload"),
    (["enqueue", "work", '{"a": NaN}'], "payload"),
    (["enqueue", "work", '{"a": "\\ud800"}'], "payload"),
    (["enqueue", "work", "{}", "--arg", "a=1"], "not both"),
    (["enqueue", "work", "--arg", "a"], "name=text"),
    (["enqueue", "work", "--arg", "a:=x"], "JSON"),
    (["enqueue", "work", "--arg", "a=1", "--arg", "a=2"], "once"),
    (["enqueue", "work", "--delay", "-1"], "delay: '-1'"),
    (["enqueue", "work", "--delay", "1e18"], "delay"),
    (["enqueue", "work", "--delay", "nan"], "delay"),
    (["enqueue", "work", "--run-at", "infinity"], "run_at"),
    (["enqueue", "work", "--run-at", "9999-12-31T23:59:59-01:00"], "run_at"),
    (["enqueue", "work", "--run-at", "2030-01-01T00:00:00"], "run_at"),
    (["enqueue", "work", "--run-at", "2030-01-01T00:00:00Z", "--delay", "1"], "not both"),
    (["enqueue", "work", "--priority", "101"], "priority: 101"),
    (["enqueue", "work", "--priority", "1.5"], "1.5"),
    (["enqueue", "work", "--max-attempts", "0"], "max_attempts: 0"),
    (["enqueue", "work", "--max-attempts", "many"], "max_attempts: 'many'"),
    (["enqueue", "work", "--timeout", "0"], "timeout"),
    (["enqueue", "work", "--timeout", "31d"], "timeout"),
    (["enqueue", "work", "--retry", "sometimes"], "retry: 'sometimes'"),
    (["enqueue", "work", "--tag", " "], "tags"),
    (["enqueue", "work", "--key", "a\x1bb"], "U+001B"),
    (["enqueue", "work", "--metadata", "[]"], "metadata"),
    (["enqueue", "work", "--id", "7"], "id: '7'"),
    (["enqueue", "--stream", "missing.jsonl"], "cannot be read"),
    (["enqueue", "work", "{}", "--stream", "x"], "--stream"),
    (["run"], "after --"),
    (["run", "--"], "after --"),
    (["run", "--shell", "ls", "--", "ls"], "after --"),
    (["queue", "pause", "Mail!"], "queue: 'Mail!'"),
    (["queue", "pause"], "Missing argument"),
    (["config", "get", "leese"], "did you mean lease?"),
    (["config", "set", "lease", "soon"], "lease: 'soon'"),
    (["retry-schedule", "5,x"], "retry"),
    (["retry-schedule", "--attempts", "0"], "1<=x"),
    (["retry-schedule", "fixed:1", "--task", "a"], "not both"),
    (["watch", "--interval", "often"], "interval: 'often'"),
    *[(["delete", "--all", option, ""], "give a value, or leave it out") for option in ("--url", "--config", "-A")],
    (["--url", "", "delete", "--all"], "give a value, or leave it out"),
    *[
        (["--url", url, "status"], "sqlite:///holdfast.db, postgresql://user@host/database or redis://host:6379/0")
        for url in ("REDIS://localhost", "localhost:6379", "postgresql:queue")
    ],
]


@pytest.mark.parametrize(
    ("words", "expected"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_usage_errors_exit_2_and_store_nothing(words: list[str], expected: str, cli: Cli) -> None:
    cli.run("migrate")
    given = cli.fail(*words, code=2)
    assert expected in given
    assert given.splitlines()[-1].startswith("holdfast: ")
    assert cli.json("status")["queues"] == []


SETTINGS = [
    (["--url", "mysql://x"], "mysql"),
    (["--url", "sqlite://host/file.db"], "three slashes"),
    (["--url", "sqlite:///:memory:"], "memory"),
    (["--url", "sqlite:////nowhere/at/all.db"], "does not exist"),
    (["--url", "sqlite:///."], "directory"),
    (["--url", "redis://h/0?namespce=shop"], "url: namespce is no parameter of a connection; did you mean namespace?"),
    (["--url", "redis://h/0?max_connections=20"], "url: max_connections is no parameter"),
    (["--url", "redis://h/0?retry=3"], "url: retry is no parameter"),
    (["--url", "unix:///x.sock?socket_keepalive=1"], "url: socket_keepalive is for TCP; remove it"),
    (["--url", "redis://h/0?socket_timout=3"], "did you mean socket_timeout?"),
    (["--url", "redis://h/0?ssl_cert_reqs=none"], "url: ssl_cert_reqs needs TLS; write the URL as rediss://"),
    (["--url", "rediss://h/0?ssl_cert_reqs=maybe"], "url: Invalid SSL Certificate Requirements Flag: maybe"),
    (["--url", "redis://h/0?protocol=9"], "url: protocol must be"),
    (["--url", "postgresql://h:70000/db"], "url: 'h:70000' has a port over 65535"),
    (["--url", "postgresql://u:p@[::1]:1,127.0.0.1:65536/db"], "has a port over 65535"),
    (["--url", "postgresql:///db?host=localhost&port=5432,70000"], "has a port over 65535"),
    (
        ["--url", "postgresql://h/db?channel_binding=require"],
        "url: channel_binding=require is not supported; remove it",
    ),
    (["--url", "postgresql://h/db?target_session_attrs=read-only"], "target_session_attrs=read-only is not supported"),
    (["--url", "postgresql://h/db?sslmode=verify-full&sslrootcert=/no.pem"], "sslrootcert='/no.pem': there is no such"),
    (["--url", "postgresql://h/db?sslmode=verify-full&sslrootcert=system"], "sslrootcert=system is not supported"),
    (["--url", "redis://h/abc"], "url: '/abc' is no number of a database"),
    (["--url", "redis://h/0/1"], "url: '/0/1' is no number of a database"),
    (["--config", "missing.toml"], "missing.toml: no such file"),
    (["--app", "no_such_module_here:app"], "there is no module no_such_module_here"),
]


@pytest.mark.parametrize(
    ("words", "expected"), SETTINGS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_configuration_errors_exit_78(words: list[str], expected: str, cli: Cli) -> None:
    given = cli.fail("status", *words, code=78)
    assert expected in given
    assert given.startswith("holdfast: ")


@pytest.mark.parametrize(
    "password", ["se:c@ret/?#%", "s%65cret", "geheim-ß", "back\\slash", "a space", "both \"quotes' there"]
)
def test_a_password_is_never_echoed(password: str, cli: Cli) -> None:
    url = f"mysql://me:{password}@host/db"
    assert password not in cli.fail("status", "--url", url, code=78)
    cli.run("migrate")
    misplaced = (["status", url], ["migrate", "--sql", url], ["migrate", f"--sql={url}"], ["show", url], [url])
    for words in (*misplaced, ["worker", "start", "--queues", url]):
        given = cli.fail(*words, code=2)
        assert "mysql:" in given
        assert password not in given


def test_masking_a_url_repeats_no_more_of_a_payload_than_the_error_did(cli: Cli) -> None:
    cli.run("migrate")
    payload = '{"callback":"https://h:8443/x","mail":"a@b.c","x":"' + "PRIVATE " * 300 + '" oops'
    assert cli.fail("enqueue", "t", payload, code=2).count("PRIVATE") <= 1


def test_all_problems_of_a_settings_file_are_reported_together(cli: Cli) -> None:
    Path("holdfast.toml").write_text('lease = "soon"\nconcurrencey = 3\n', encoding="utf-8")
    given = cli.fail("status", code=78)
    assert "holdfast.toml:1" in given
    assert "holdfast.toml:2" in given
    assert "did you mean concurrency?" in given


BROKEN = [
    ("import no_such_thing_at_all", "ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
    ("from holdfast import NoSuchName", "ImportError"),
    ("def (:", "SyntaxError"),
    ("1 / 0", "ZeroDivisionError"),
    ("raise SystemExit(0)", "SystemExit"),
    (
        "from holdfast import Holdfast\napp = Holdfast()\n@app.task('a')\ndef a(): ...\n@app.task('a')\ndef b(): ...",
        "registered twice",
    ),
    ("from holdfast import Holdfast\napp = Holdfast()\n@app.task\ndef a(): ...", "parentheses"),
]


@pytest.mark.parametrize(("source", "expected"), BROKEN, ids=lambda value: value.split("\n")[-1])
def test_broken_application_code_exits_78_with_the_user_traceback(source: str, expected: str, cli: Cli) -> None:
    target = cli.write_jobs(source)
    result = cli.invoke("status", "--app", target)
    first, *rest = result.stderr.splitlines()
    assert result.exit_code == 78
    assert target in first
    assert "needs no tasks: with --app none" in first
    assert expected in result.stderr
    assert f"{target.split(':')[0]}.py" in "\n".join(rest)
    assert f"holdfast{os.sep}cli" not in result.stderr
    assert "importlib" not in result.stderr


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [("missing", "it has app"), ("other", "of type object, not Holdfast"), ("apps", "did you mean app?")],
)
def test_an_attribute_that_is_no_application_exits_78(attribute: str, expected: str, cli: Cli) -> None:
    module = cli.write_jobs().split(":")[0]
    assert expected in cli.fail("status", "--app", f"{module}:{attribute}", code=78)


def test_a_module_of_the_working_directory_can_be_imported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(cli.folder)])
    cli.run("migrate", "--app", cli.write_jobs())


def test_a_broken_application_hinders_nothing_that_names_its_store(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.run("migrate", "--app", cli.write_jobs("1 / 0"), "--url", "sqlite:///holdfast.db")
    monkeypatch.setenv("HOLDFAST_APP", "no_such_module:app")
    assert "with --app none --url URL it goes on without the application" in cli.fail("status", code=78)
    job_id = cli.run("enqueue", "work", "--app", "none").strip()
    monkeypatch.setenv("HOLDFAST_URL", "sqlite:///holdfast.db")
    for words in (("status",), ("why", job_id), ("queue", "pause", "mail"), ("worker", "stop"), ("errors",)):
        assert "with --app none, and the url from HOLDFAST_URL, it goes on" in cli.fail(*words, code=78)
        cli.run(*words, "--app", "none")
    assert "--app none" not in cli.fail("enqueue", "work", code=78)


def test_arguments_that_are_no_text_are_refused(cli: Cli) -> None:
    assert "argument 2 is not valid UTF-8" in cli.fail("show", os.fsdecode(b"\xff\xfe"), code=2)


STDIN = [
    (b"\x00\xff\xfe binary", "UTF-8"),
    (b"", "payload"),
    (b"{}" + b" " * 300_000, "262,145 bytes"),
    (b"\xef\xbb\xbf{}", "payload"),
]


@pytest.mark.parametrize(("data", "expected"), STDIN, ids=["binary", "empty", "huge", "byte order mark"])
def test_input_that_is_no_payload_exits_2(data: bytes, expected: str, cli: Cli) -> None:
    assert expected in cli.fail("enqueue", "work", "-", stdin=data, code=2)


def test_no_more_of_stdin_is_read_than_may_be_stored(cli: Cli) -> None:
    with Path("/dev/zero").open("rb") as endless:
        ended = cli.complete("enqueue", "work", "-", stdin=endless)
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["show", "x"], 2, "InvalidId"),
        (["show", "key:none"], 1, "NotFound"),
        (["status", "--url", "mysql://x"], 78, "ConfigError"),
        (["list", "--bogus"], 2, "NoSuchOption"),
    ],
)
def test_error_with_json_option_is_reported_as_json(words: list[str], code: int, kind: str, cli: Cli) -> None:
    cli.run("migrate")
    expected = json.loads(cli.fail(*words, "--json", code=code).splitlines()[-1])["error"]
    assert (expected["type"], expected["exit_code"]) == (kind, code)
    assert expected["message"]


def test_a_file_name_or_a_task_is_no_application(cli: Cli) -> None:
    target = cli.write_jobs()
    module = target.removesuffix(":app")
    assert f"leave out .py: {module}" in cli.fail("worker", "start", "--app", f"{module}.py:app", code=78)
    given = cli.fail("worker", "start", "--app", f"{module}:send", code=78)
    assert f"{module}:send is a task; name the application: {target}" in given


def test_worker_option_is_named_as_written(cli: Cli) -> None:
    given = cli.fail("worker", "start", "--app", "jobs:app", "--concurrency", "lots", code=2)
    assert "holdfast: --concurrency: 'lots' is not valid" in given


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["worker", "start", "--queues", "mail:x"], "holdfast: --queues: mail: 'x' is not valid"),
        (["status", "--url", "own.db"], "holdfast: --url: 'own.db' is not valid; write a store's URL"),
        (["worker", "start", "--app", "tasks"], "holdfast: --app: 'tasks' is not valid; write module:attribute"),
    ],
)
def test_invalid_option_value_names_the_option_and_exits_2(words: list[str], given: str, cli: Cli) -> None:
    assert given in cli.fail(*words, code=2)
