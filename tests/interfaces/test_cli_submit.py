"""enqueue, its streams, and run."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, JobHandle, JobState, Unavailable
from holdfast.cli import run as run_module
from holdfast.cli import submission
from holdfast.core.lifecycle import Failed, Succeeded
from holdfast.core.models import Job, NewJob
from holdfast.core.workers import WorkerHeartbeat
from holdfast.stores.sqlite.queueing import SqliteQueueing
from tests.interfaces.cli import Cli, store_without_answer


def test_first_command_creates_the_store_and_prints_the_id(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", '{"n": 1}').strip()
    document = cli.json("show", job_id)
    assert Path("holdfast.db").exists()
    assert (document["task"], document["payload"], document["state"]) == ("work", {"n": 1}, "queued")


def test_every_option_reaches_the_job(cli: Cli) -> None:
    words = (
        "--queue mail --priority 7 --delay 1h --key k --key-for 2d --max-attempts 3 --timeout 30s --retry 1,5 --tag a"
    )
    job = cli.json("enqueue", "work", *words.split(), "--tag", "b c", "--metadata", '{"x": 1}', "--arg", "n:=2")
    assert job["created"] is True
    assert job["payload"] == {"n": 2}
    assert {name: job[name] for name in ("queue", "priority", "state", "key", "max_attempts", "timeout")} == {
        "queue": "mail",
        "priority": 7,
        "state": "scheduled",
        "key": "k",
        "max_attempts": 3,
        "timeout": 30.0,
    }
    assert (job["tags"], job["metadata"], job["retry"]["delays"]) == (["a", "b c"], {"x": 1}, [1.0, 5.0])


def test_arguments_are_text_unless_declared_json(cli: Cli) -> None:
    job = cli.json("enqueue", "work", "--arg", "zip=01234", "--arg", "tags:=[1,null]", "--arg", "empty=")
    assert job["payload"] == {"zip": "01234", "tags": [1, None], "empty": ""}


def test_a_key_creates_one_job_and_answers_the_same_again(cli: Cli) -> None:
    first = cli.run("enqueue", "work", "--key", "once")
    again = cli.invoke("enqueue", "work", "--key", "once")
    assert again.stdout == first
    assert "already" in again.stderr
    assert cli.json("enqueue", "work", "--key", "once")["created"] is False
    assert len(cli.json("list")["jobs"]) == 1


def test_same_work_is_stored_once(cli: Cli) -> None:
    first = cli.run("enqueue", "work", '{"n": 1}', "--unique", "active", "--delay", "1h").strip()
    again = cli.invoke("enqueue", "work", '{"n": 1}', "--unique", "active")
    assert again.stdout.strip() == first
    assert "for the same work; nothing new was stored" in again.stderr
    policy = '{"during": "active", "by": ["task", "queue", "args"], "on_conflict": "reschedule"}'
    moved = cli.invoke("enqueue", "work", '{"n": 1}', "--unique", policy)
    assert "it was rescheduled" in moved.stderr
    assert cli.json("show", first)["state"] == "queued"
    assert "while active" in cli.run("show", first)
    cli.run("cancel", first)
    second = cli.run("enqueue", "work", '{"n": 1}', "--unique", "active").strip()
    refused = cli.invoke("replay", first)
    assert (refused.exit_code, "another job has its unique key" in refused.stderr) == (1, True)
    assert second in cli.run("why", first)
    assert "unique.during" in cli.invoke("enqueue", "work", "--unique", "activ").stderr


def test_a_payload_can_come_from_stdin(cli: Cli) -> None:
    assert cli.json("enqueue", "work", "-", stdin='{"text": "grüezi"}')["payload"] == {"text": "grüezi"}


def test_a_registered_task_checks_its_payload_and_gives_its_options(cli: Cli) -> None:
    target = cli.write_jobs()
    assert "copies" in cli.fail("enqueue", "mail.send", "--arg", "to=a", "--arg", "copies=x", "--app", target, code=2)
    job = cli.json("enqueue", "mail.send", "--arg", "to=a", "--app", target)
    assert (job["queue"], job["max_attempts"]) == ("mail", 3)


@pytest.mark.parametrize("more", [(), ("--json",), ("--wait-for", "0.1")], ids=str)
def test_a_task_the_application_does_not_have_is_remarked_on(more: tuple[str, ...], cli: Cli) -> None:
    result = cli.invoke("enqueue", "mail.sent", *more, "--app", cli.write_jobs())
    assert result.exit_code == (75 if "--wait-for" in more else 0)
    assert "did you mean mail.send?" in result.stderr


def test_waiting_prints_the_result(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", "--key", "k").strip()
    cli.end(job_id, Succeeded('{"total": 3}'))
    assert cli.run("enqueue", "work", "--key", "k", "--wait") == '{"total": 3}\n'
    assert cli.json("enqueue", "work", "--key", "k", "--wait")["result"] == {"total": 3}


def test_waiting_for_a_job_that_dies_exits_1(cli: Cli) -> None:
    cli.dead("--key", "k", error="no luck")
    assert "no luck" in cli.fail("enqueue", "work", "--key", "k", "--wait", code=1)


def test_waiting_ends_with_its_limit(cli: Cli) -> None:
    assert "it goes on" in cli.fail("enqueue", "work", "--wait-for", "10ms", code=75)


def test_waiting_warns_once_that_no_worker_serves_the_queue(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_QUIET", 0.01)
    given = cli.fail("enqueue", "work", "--queue", "mail", "--wait-for", "100ms", "--json", code=75)
    assert given.count("no living worker serves queue mail; start one with `holdfast worker start`") == 1
    assert "after 0.1 s; it goes on" in given


def test_waiting_says_which_attempt_failed_and_when_the_next_is(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_QUIET", 0.01)
    job_id = cli.run("enqueue", "work", "--key", "k").strip()
    cli.end(job_id, Failed(error="no luck\nat all"))
    app = Holdfast()

    async def be_there() -> None:
        heartbeat = WorkerHeartbeat(worker="w-1", host="here", pid=1, queues="*", concurrency=2)
        await (await app.open_store()).queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=1))

    app.run_blocking(be_there())
    app.sync.close()
    given = cli.fail("enqueue", "work", "--key", "k", "--wait-for", "100ms", code=75)
    assert given.count("attempt 1 failed: no luck; next at 20") == 1


@pytest.mark.parametrize("stored", [True, False])
def test_ctrl_c_while_submitting_leaves_no_doubt(stored: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Holdfast.submit

    async def interrupted(self: Holdfast, job: NewJob, **options: Any) -> Any:
        if stored:
            await submit(self, job, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Holdfast, "submit", interrupted)
    given = cli.fail("enqueue", "work", "--key", "k", code=130)
    assert ("is stored" in given.split("known whether")[0]) is stored
    assert ("repeating it with --key k is harmless" in given) is not stored
    assert len(cli.json("list")["jobs"]) == stored


def test_ctrl_c_while_waiting_says_that_the_job_is_stored(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(self: JobHandle[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(JobHandle, "result", interrupted)
    assert "is stored and goes on" in cli.fail("enqueue", "work", "--wait", code=130)


async def _lose_store(*_: Any, **__: Any) -> Any:
    raise Unavailable("the store is away")


def test_outage_after_the_submission_names_the_stored_job(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = cli.run("enqueue", "work", "--key", "k").strip()
    monkeypatch.setattr(JobHandle, "result", _lose_store)
    assert f"job {job_id} is stored" in cli.fail("enqueue", "work", "--key", "k", "--wait", code=1)
    monkeypatch.setattr(Holdfast, "get", _lose_store)
    assert cli.json("enqueue", "work", "--key", "k") == {"id": job_id, "created": False}


@pytest.mark.parametrize("words", [("enqueue", "work"), ("run", "--", "ls")])
def test_outage_after_the_end_of_the_job_names_it(
    words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(self: JobHandle[Any], timeout: float | None = None) -> None:
        return None

    cli.run("config", "set", "commands", "argv")
    with monkeypatch.context() as patched:
        patched.setattr(JobHandle, "result", ended)
        patched.setattr(Holdfast, "get", _lose_store)
        stderr = cli.fail(words[0], "--wait", *words[1:], code=1)
    (job,) = cli.json("list")["jobs"]
    assert f"job {job['id']} is stored, but its end could not be read: the store is away" in stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [(("enqueue", "work"), "--id"), (("enqueue", "work", "--key", "k"), "--key"), (("run", "--", "ls"), "--id")],
)
def test_lost_answer_names_what_makes_a_second_submission_harmless(
    words: tuple[str, ...], option: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run("config", "set", "commands", "argv")
    with monkeypatch.context() as patched:
        patched.setattr(SqliteQueueing, "submit", store_without_answer)
        stderr = cli.fail(*words, code=75)
    (job,) = cli.json("list")["jobs"]
    named = stderr.strip().rpartition(" is ")[2]
    assert named == ("k" if option == "--key" else job["id"])
    again = json.loads(cli.run(words[0], "--json", option, named, *words[1:]))
    assert (again["id"], again["created"]) == (job["id"], False)
    assert len(cli.json("list")["jobs"]) == 1


def test_interrupt_message_names_the_id_without_a_key(cli: Cli) -> None:
    app = Holdfast()
    job = app.draft_job("work", {})
    assert f"--id {job.id}" in submission._describe_interrupted(app, job)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _lines(*lines: object) -> str:
    return "\n".join(json.dumps(line) for line in lines) + "\n"


def test_a_stream_stores_every_line_with_its_options(cli: Cli) -> None:
    Path("jobs.jsonl").write_text(
        _lines({"task": "a", "payload": {"n": 1}, "queue": "q", "delay": "1h", "tags": ["x"]}, {"priority": 3}) + "\n"
    )
    assert "2 jobs stored" in cli.run("enqueue", "b", "--key-for", "1d", "--stream", "jobs.jsonl")
    second, first = cli.json("list")["jobs"]
    assert (first["task"], first["payload"], first["queue"], first["state"]) == ("a", {"n": 1}, "q", "scheduled")
    assert (second["task"], second["priority"]) == ("b", 3)


def test_a_stream_prints_json_lines(cli: Cli) -> None:
    given = cli.run("enqueue", "a", "--stream", "-", "--json", stdin=_lines({"key": "k"}, {"key": "k"}))
    first, second = map(json.loads, given.splitlines())
    assert (first["line"], first["created"]) == (1, True)
    assert second == {"line": 2, "id": first["id"], "created": False}


BAD_LINES = [
    ("{", "JSON"),
    ("[]", "JSON object"),
    ('{"payload": {}}', "task"),
    ('{"task": "a", "payload": []}', "payload"),
    ('{"task": "a", "quue": "x"}', "did you mean queue?"),
    ('{"task": "a", "delay": -1}', "delay"),
    ('{"task": "a", "tags": "x"}', "tags"),
    ('{"task": "a", "priority": "1"}', "priority"),
    ('{"task": "a", "retry": {"base": "x"}}', "retry"),
    ('{"task": "a", "task": "b"}', "line 4"),
    ('{"task": "a", "payload": {"x": "' + "y" * 400_000 + '"}}', "bytes"),
]


@pytest.mark.parametrize(("line", "expected"), BAD_LINES, ids=lambda value: value[:30])
def test_invalid_line_is_named_and_its_batch_not_stored(line: str, expected: str, cli: Cli) -> None:
    cli.run("migrate")
    stream = _lines({"task": "a"}, {"task": "a"}, {"task": "a"}) + line + "\n" + _lines({"task": "a"})
    given = cli.fail("enqueue", "--stream", "-", "--batch-size", "2", code=2, stdin=stream)
    assert given.startswith("holdfast: line 4: ")
    assert expected in given
    assert "the jobs of lines 1 to 2 are stored, and none after them" in given
    assert len(cli.json("list")["jobs"]) == 2


UNCERTAIN = [
    (Unavailable("the answer is lost", outcome="the job may be stored all the same"), 75),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("problem", "code"), UNCERTAIN)
def test_batch_without_an_answer_may_be_stored(
    problem: BaseException, code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run("migrate")
    enqueue_many: Any = inspect.unwrap(Holdfast.enqueue_many)

    async def lose_second(self: Holdfast, jobs: list[NewJob], **options: Any) -> Any:
        handles = await enqueue_many(self, jobs, **options)
        if len(jobs) == 1:
            raise problem
        return handles

    monkeypatch.setattr(Holdfast, "enqueue_many", lose_second)
    stream = _lines(*[{"task": "a"}] * 3)
    given = cli.fail("enqueue", "--stream", "-", "--batch-size", "2", code=code, stdin=stream)
    assert "the jobs of lines 1 to 2 are stored, and those of lines 3 to 3 may be stored" in given


def test_an_empty_stream_stores_nothing(cli: Cli) -> None:
    assert cli.run("enqueue", "--stream", "-", stdin="\n") == "0 jobs stored\n"


# ── run ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_run_explains_how_to_enable_commands(cli: Cli) -> None:
    cli.run("migrate")
    given = cli.fail("run", "--", "ls", code=78)
    assert "config set commands argv" in given
    assert "HOLDFAST_COMMANDS=argv" in given
    assert cli.json("status")["queues"] == []


def test_run_submits_arguments_as_they_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    words = ["--cwd", "/tmp", "--env", "A=b=c", "--dead-code", "3", "--stdin", "-", "--", "echo", "a; b", "--json"]
    job_id = cli.run("run", *words, stdin="text").strip()
    assert cli.json("show", job_id)["payload"] == {
        "argv": ["echo", "a; b", "--json"],
        "cwd": "/tmp",
        "env": {"A": "b=c"},
        "dead_codes": [3],
        "stdin": "text",
    }


def test_run_submits_limits_and_sandbox(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    monkeypatch.setenv("HOLDFAST_SANDBOX_NETWORK", "true")
    words = ["--memory", "512M", "--cpu", "5m", "--open-files", "64", "--file-size", "1GiB", "--max-processes", "8"]
    job_id = cli.run("run", *words, "--sandbox", "strict", "--network", "--", "ls").strip()
    assert cli.json("show", job_id)["payload"] == {
        "argv": ["ls"],
        "resources": {"memory": 512 << 20, "cpu": 300.0, "open_files": 64, "file_size": 1 << 30, "processes": 8},
        "sandbox": "strict",
        "network": True,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "resources.memory: 'lots' is not valid"),
        (["--memory", "-1"], "resources.memory: '-1' is not valid"),
        (["--memory", "9G"], "resources.memory: '9GiB' is above what the settings allow; give at most 1GiB"),
        (["--sandbox", "tight"], "sandbox: 'tight' is not valid; give none or strict"),
        (["--sandbox", "strict", "--network"], "network: True is not valid; the setting sandbox_network"),
    ],
)
def test_run_refuses_bad_limits(words: list[str], message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    monkeypatch.setenv("HOLDFAST_JOB_MEMORY", "1GiB")
    assert message in cli.fail("run", *words, "--", "ls", code=2)


@pytest.mark.parametrize(
    ("mode", "words", "code"),
    [
        ("argv", ["--shell", "ls | wc"], 78),
        ("shell", ["--shell", "ls | wc"], 0),
        ("argv", ["--env", "x", "--", "ls"], 2),
    ],
)
def test_run_respects_the_mode(
    mode: str, words: list[str], code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", mode)
    assert cli.invoke("run", *words).exit_code == code


def test_run_refuses_what_the_allow_list_does_not_name(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    monkeypatch.setenv("HOLDFAST_COMMAND_ALLOW", "ls,gzip")
    assert "ls, gzip" in cli.fail("run", "--", "rm", "-rf", "x", code=2)


def test_waiting_for_a_command_prints_its_output(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    job_id = cli.run("run", "--key", "k", "--", "ls").strip()
    cli.end(job_id, Succeeded(json.dumps({"exit_code": 0, "stdout": "out\n", "stderr": "err\n"})))
    result = cli.invoke("run", "--key", "k", "--wait", "--", "ls")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


@pytest.mark.parametrize(
    ("error", "code"), [("exit code 7: no such file", 7), ("exit code 255", 255), ("killed by SIGKILL", 1), ("", 1)]
)
def test_waiting_for_a_command_exits_as_it_did(
    error: str, code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_COMMANDS", "argv")
    job_id = cli.run("run", "--key", "k", "--", "ls").strip()
    cli.end(job_id, Failed(error=error, retryable=False))
    assert cli.invoke("run", "--key", "k", "--wait", "--", "ls").exit_code == code


def test_only_a_job_that_succeeded_counts_as_success() -> None:
    fields: dict[str, Any] = dict.fromkeys(Job.__struct_fields__)
    assert run_module.exit_code(Job(**{**fields, "state": JobState.CANCELLED, "error": "cancelled"})) == 1


def test_text_for_a_non_text_argument_suggests_json_syntax(cli: Cli) -> None:
    target = cli.write_jobs()
    given = cli.fail("enqueue", "mail.send", "--arg", "to=ann", "--arg", "copies=3", "--app", target, code=2)
    assert "argument 'copies'" in given
    assert "write --arg copies:=3" in given
    given = cli.fail("enqueue", "mail.send", "--arg", "to=ann", "--arg", "copies=three", "--app", target, code=2)
    assert ":=" not in given
    assert ":=" not in cli.fail("enqueue", "mail.send", '{"to": "ann", "copies": "3"}', "--app", target, code=2)


@pytest.mark.parametrize("words", [["enqueue", "work"], ["enqueue", "--stream", "-"]], ids=" ".join)
def test_creating_a_database_is_reported_once(words: list[str], cli: Cli) -> None:
    stdin = '{"task": "work"}\n'
    first, second = (cli.invoke(*words, stdin=stdin) for _ in range(2))
    assert f"made a new database: sqlite:///{cli.folder}/holdfast.db (url from default)\n" == first.stderr
    assert (first.exit_code, second.exit_code, second.stderr) == (0, 0, "")
