"""Bad values, bad words, bad files, bad programs: every row of the table of bad inputs, B48 to B82, at its door.

A row's id begins with its number there. What is refused is refused whole: the class of the error (or the exit code),
the field or word of its message, and a store with no job in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import Holdfast, Job, JobState, Retry
from holdfast.core.errors import ConfigError, HoldfastError, Invalid, TooLarge
from holdfast.worker import Worker
from tests.interfaces.cli import Cli

NUMBERS = (48, 49, 50, 52, 53, 54, 56, 57, 58, 60, 61, 62, 64, 65, 66, 68, 69, 70, 72, 73, 74, 76, 77, 78, 80, 81, 82)
"""The rows there are; the numbers between them were never given."""

ELSEWHERE = {
    56: "unique states do not exist: a key stands for its job as long as the job's row lives, whatever its state",
    60: "cron schedules are not built yet",
    61: "time zones belong to schedules",
    62: "daylight saving belongs to schedules",
    64: "editing a schedule while it ticks belongs to schedules",
    68: "an interrupted submission is tested in test_cli_submit.py",
    72: "there is no pid file: a worker is known by its row in the store and its supervisor's pipe",
    73: "a second worker of one name is tested in tests/worker/test_names.py",
    76: "command templates do not exist: a command's words are its submitter's own and no shell reads them",
}
"""Why a row has no line in the table below."""


# ── at the client's door ──────────────────────────────────────────────────────────────────────────────────────────
class Refused(NamedTuple):
    """What a caller may not submit."""

    id: str
    options: dict[str, Any]
    error: type[HoldfastError]
    field: str


def _run_at(value: object) -> tuple[dict[str, Any], type[HoldfastError], str]:
    return {"run_at": value}, Invalid, "run_at"


REFUSED = [
    *(
        Refused(f"B48-run-at-{value}", *_run_at(value))
        for value in (
            "9999-12-31T23:59:59-01:00",
            "10000-01-01T00:00:00Z",
            "294277-01-01T00:00:00Z",
            "0001-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "1999-12-31T23:59:59Z",
            "2200-01-01T00:00:00Z",
            "infinity",
            "now",
            1_924_992_000_000,
            True,
        )
    ),
    *(
        Refused(f"B49-run-at-{value}", *_run_at(value))
        for value in (
            datetime(2030, 1, 1),  # noqa: DTZ001 - that it has no zone is what is wrong with it
            "2030-01-01T00:00:00",
            "2030-01-01T00:00:00+25:00",
            "2030-12-31T23:59:60Z",
            "2024-02-30T00:00:00Z",
            "2030-W01-1T00:00:00Z",
            "2030-01-01",
        )
    ),
    *(
        Refused(f"B50-delay-{value!r}", {"delay": value}, Invalid, "delay")
        for value in (-1, -1e-6, 1e18, 1e308, float("nan"), float("inf"), "5", True, timedelta(days=-1))
    ),
    *(
        Refused(f"B53-timeout-{value!r}", {"timeout": value}, Invalid, "timeout")
        for value in (0, -1, 30 * 86_400 + 1, float("nan"), "5")
    ),
    *(
        Refused(f"B54-priority-{value!r}", {"priority": value}, Invalid, "priority")
        for value in (2**31, -(2**31), 101, -101, 1.5, "5", True)
    ),
    Refused("B57-key-of-100-KB", {"key": "k" * 100_000}, TooLarge, "key"),
    Refused("B58-1001-tags", {"tags": [f"tag-{number}" for number in range(1001)]}, Invalid, "tags"),
    Refused("B58-empty-tag", {"tags": [""]}, Invalid, "tags"),
    Refused("B58-tag-of-10-KB", {"tags": ["t" * 10_240]}, TooLarge, "tags"),
    Refused("B58-tags-are-text", {"tags": "abc"}, Invalid, "tags"),
    Refused("B82-path", {"task": "../x"}, Invalid, "task"),
    Refused("B82-call", {"task": "os.system('id')"}, Invalid, "task"),
]


@pytest.fixture
def app(tmp_path: Path) -> Any:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", commands="argv", defer_for="0s")
    yield app
    app.sync.close()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.id[:60])
def test_a_value_is_refused_and_nothing_is_stored(row: Refused, app: Holdfast) -> None:
    with pytest.raises(row.error) as caught:
        app.sync.enqueue(**{"task": "work", **row.options})
    assert isinstance(caught.value, Invalid)
    assert caught.value.field == row.field
    assert str(caught.value).startswith(f"{row.field}: ")
    assert len(str(caught.value)) < 400
    assert app.sync.count() == 0


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("B48-first-instant", {"run_at": "2000-01-01T00:00:00Z"}),
    ("B48-last-instant", {"run_at": "2199-12-31T23:59:59Z"}),
    ("B49-lower-case", {"run_at": "2030-01-01t00:00:00z"}),
    ("B50-delay-0", {"delay": 0}),
    ("B50-delay-tiny", {"delay": 1e-9}),
    ("B50-delay-of-a-lifetime", {"delay": 86_400 * 365 * 170}),
    ("B52-base-0", {"retry": Retry.exponential(base=0)}),
    ("B53-timeout-30-days", {"timeout": 30 * 86_400}),
    ("B54-priority-lowest", {"priority": -100}),
    ("B54-priority-highest", {"priority": 100}),
    ("B57-key-at-the-limit", {"key": "k" * 512}),
    ("B58-100-tags", {"tags": [f"tag-{number}" for number in range(100)]}),
]


@pytest.mark.parametrize(("name", "options"), ACCEPTED, ids=[name for name, _ in ACCEPTED])
def test_the_value_at_the_edge_is_stored(name: str, options: dict[str, Any], app: Holdfast) -> None:
    handle = app.sync.enqueue("work", **options)
    assert app.sync.get(handle.id).id == handle.id


POLICIES: list[tuple[str, dict[str, Any], str]] = [
    ("B52-base-negative", {"base": -1}, "retry.base"),
    ("B52-base-nan", {"base": float("nan")}, "retry.base"),
    ("B52-factor-0", {"factor": 0}, "retry.factor"),
    ("B52-factor-1e308", {"factor": 1e308}, "retry.factor"),
    ("B52-cap-below-base", {"base": 60, "cap": 5}, "retry.cap"),
    ("B52-cap-infinite", {"cap": float("inf")}, "retry.cap"),
    ("B52-jitter-unknown", {"jitter": "some"}, "retry.jitter"),
]


@pytest.mark.parametrize(("name", "parameters", "field"), POLICIES, ids=[name for name, *_ in POLICIES])
def test_a_policy_is_refused_where_it_is_made(name: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        Retry.exponential(**parameters)
    assert caught.value.field == field


# ── at the command line's door ────────────────────────────────────────────────────────────────────────────────────
class RawText(NamedTuple):
    """A command that ends with an exit code and a message with this in it."""

    id: str
    words: list[str]
    message: str
    code: int = 2
    stdin: bytes | None = None


WORDS = [
    RawText("B65-unknown-flag", ["enqueue", "work", "--nonsense"], "--nonsense"),
    RawText("B65-missing-value", ["enqueue", "work", "--key"], "--key"),
    RawText("B65-dashes-alone", ["--"], "Missing command"),
    RawText("B65-empty-word", [""], "There is no command"),
    RawText("B65-nul", ["enqueue", "work", "--key", "a\0b"], "U+0000"),
    RawText("B65-no-utf-8", ["enqueue", "work", "--key", "a\udcffb"], "argument 4 is not valid UTF-8"),
    RawText("B66-binary", ["enqueue", "work", "-"], "UTF-8", stdin=b"\x00\xff\xfe"),
    RawText("B66-nothing", ["enqueue", "work", "-"], "payload", stdin=b""),
    RawText("B66-too-much", ["enqueue", "work", "-"], "262,145 bytes", stdin=b" " * 1_000_000),
    RawText("B66-no-object", ["enqueue", "work", "-"], "JSON object", stdin=b"[1, 2]"),
    RawText("B69-missing", ["enqueue", "work", "--config", "missing.toml"], "missing.toml: no such file", 78),
    RawText("B69-directory", ["enqueue", "work", "--config", "."], "directory", 78),
    RawText("B70-unknown-scheme", ["enqueue", "work", "--url", "mongodb://host/x"], "mongodb", 78),
    RawText("B70-memory", ["enqueue", "work", "--url", "sqlite:///:memory:"], "memory", 78),
    RawText("B70-host", ["enqueue", "work", "--url", "sqlite://jobs.db"], "three slashes", 78),
    RawText("B70-directory", ["enqueue", "work", "--url", "sqlite:///."], "is a directory", 78),
    RawText("B70-parameters", ["enqueue", "work", "--url", "sqlite:///a.db?mode=ro"], "parameters", 78),
    RawText("B70-nul", ["enqueue", "work", "--url", "sqlite:///a%00b.db"], "NUL", 78),
    RawText("B70-full-or-missing", ["enqueue", "work", "--url", "sqlite:////nowhere/at/all.db"], "does not exist", 78),
    RawText("B82-path-by-command", ["enqueue", "../x"], "task: '../x'"),
]


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row.id)
def test_a_command_is_refused_and_nothing_is_stored(row: RawText, cli: Cli) -> None:
    cli.run("migrate")
    assert row.message in cli.fail(*row.words, code=row.code, stdin=row.stdin)
    assert cli.json("status")["queues"] == []


@pytest.mark.rows("B65")
def test_command_without_arguments_prints_the_usage(cli: Cli) -> None:
    result = cli.invoke()
    assert (result.exit_code, "Usage: " in result.output) == (2, True)


@pytest.mark.rows("B70")
@pytest.mark.parametrize("password", ["p@ss", "pa:ss", "pa/ss", "pa?ss", "pa#ss", "pa%41ss", "pässwörd"])
def test_password_is_never_echoed(password: str, cli: Cli) -> None:
    given = cli.fail("enqueue", "work", "--url", f"mongodb://me:{password}@host/db", code=78)
    assert password not in given


# ── in the settings file ──────────────────────────────────────────────────────────────────────────────────────────
FILES: list[tuple[str, bytes, list[str]]] = [
    ("B69-yaml-bomb", b"a: &a [*a,*a]\n", ["holdfast.toml"]),
    ("B69-twice", b'lease = "30s"\nlease = "60s"\n', ["holdfast.toml:2", "it stands twice"]),
    ("B69-unknown-key", b'leese = "30s"\n', ["holdfast.toml:1", "did you mean lease?"]),
    ("B69-wrong-type", b"\nconcurrency = []\n", ["holdfast.toml:2", "concurrency"]),
    ("B69-no-utf-8", b'lease = "\xff"\n', ["holdfast.toml"]),
    ("B69-nul", b'lease = "\x00"\n', ["holdfast.toml"]),
    ("B69-all-at-once", b'lease = "x"\r\n\r\npoll = -1\r\n', ["holdfast.toml:1", "holdfast.toml:3"]),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[name for name, *_ in FILES])
def test_a_settings_file_is_refused_with_its_line(name: str, content: bytes, message: list[str], cli: Cli) -> None:
    Path("holdfast.toml").write_bytes(content)
    given = cli.fail("enqueue", "work", code=78)
    for word in message:
        assert word in given
    assert not Path("holdfast.db").exists()


@pytest.mark.parametrize("content", [b"", b"\r\n", b'lease\t=\t"60s"\r\n'], ids=["B69-empty", "B69-crlf", "B69-tabs"])
def test_a_settings_file_that_only_looks_odd_is_read(content: bytes, cli: Cli) -> None:
    Path("holdfast.toml").write_bytes(content)
    assert cli.json("config", "get", "lease")["value"] == ("1m" if b"lease" in content else "30s")


@pytest.mark.rows("B69")
def test_invalid_environment_value_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LEASE", "soon")
    assert "HOLDFAST_LEASE" in cli.fail("enqueue", "work", code=78)
    assert not Path("holdfast.db").exists()


# ── in the user's module ──────────────────────────────────────────────────────────────────────────────────────────
_APP = "from holdfast import Context, Holdfast\napp = Holdfast()\n"

MODULES: list[tuple[str, str, str]] = [
    ("B74-import-error", "import no_such_thing_at_all", "ModuleNotFoundError"),
    ("B74-syntax-error", "def (:", "SyntaxError"),
    ("B74-exits", "raise SystemExit(0)", "SystemExit"),
    ("B74-not-an-application", "app = 1", "not Holdfast"),
    ("B74-twice", _APP + "@app.task('a')\ndef a(): ...\n@app.task('a')\ndef b(): ...", "registered twice"),
    ("B74-bad-name", _APP + "@app.task('no spaces')\ndef a(): ...", "task: 'no spaces'"),
    ("B74-lambda", _APP + "app.task()(lambda: None)", "<lambda>"),
    ("B74-signature-positional", _APP + "@app.task('a')\ndef a(*numbers: int): ...", "numbers"),
    ("B74-signature-late-context", _APP + "@app.task('a')\ndef a(x: int, ctx: Context): ...", "ctx"),
]


@pytest.mark.parametrize(("name", "source", "message"), MODULES, ids=[name for name, *_ in MODULES])
def test_a_worker_does_not_start_with_a_broken_module(name: str, source: str, message: str, cli: Cli) -> None:
    target = cli.write_jobs(source)
    result = cli.invoke("worker", "start", "--drain", "--app", target)
    assert (result.exit_code, message in result.stderr) == (78, True), result.stderr
    assert "holdfast/cli" not in result.stderr


@pytest.mark.rows("B74")
def test_missing_module_is_reported(cli: Cli) -> None:
    given = cli.fail("worker", "start", "--drain", "--app", "no_such_module_here:app", code=78)
    assert "there is no module no_such_module_here" in given


# ── command jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
COMMANDS: list[tuple[str, dict[str, Any], type[Invalid], str]] = [
    *(
        (f"B77-{name!r}", {"argv": ["true"], "env": {name: "x"}}, Invalid, "env")
        for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "BASH_ENV", "IFS", "A=B", "A\0B", "")
    ),
    ("B77-value-with-nul", {"argv": ["true"], "env": {"A": "\0"}}, Invalid, "env.A"),
    ("B78-relative", {"argv": ["true"], "cwd": "../.."}, Invalid, "cwd"),
    ("B81-one-argument", {"argv": ["echo", "x" * 100_000]}, TooLarge, "argv"),
    ("B81-many-arguments", {"argv": ["echo", *["x"] * 20_000]}, TooLarge, "argv"),
    ("B81-environment", {"argv": ["true"], "env": {"A": "x" * 100_000}}, TooLarge, "argv"),
]


@pytest.mark.parametrize(("name", "payload", "error", "field"), COMMANDS, ids=[name for name, *_ in COMMANDS])
def test_a_command_job_is_refused_at_submission(
    name: str, payload: dict[str, Any], error: type[Invalid], field: str, app: Holdfast
) -> None:
    with pytest.raises(error) as caught:
        app.sync.enqueue("command", payload)
    assert caught.value.field == field
    assert app.sync.count() == 0


@pytest.mark.rows("B78")
def test_link_out_of_the_roots_is_followed_and_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("/")
    policy = Holdfast(commands="argv", command_roots=str(root)).command_policy()
    assert policy.resolve_directory(str(root)) == str(root.resolve())
    for outside in ("/", f"{root}/..", f"{root}/out", f"{root}/out/etc"):
        with pytest.raises(Invalid, match="must lie under"):
            policy.resolve_directory(outside)


def drained(app: Holdfast, task: str, payload: dict[str, Any]) -> tuple[Job, Job]:
    """The job after a worker has emptied the queue, and an innocent neighbour that was submitted after it."""

    @app.task("neighbour")
    async def neighbour() -> None: ...

    async def run() -> tuple[Job, Job]:
        async with app:
            bad, good = await app.enqueue(task, payload, max_attempts=1), await neighbour.enqueue()
            async with asyncio.timeout(60):
                await Worker(app, drain=True).run()
            return await bad.job(), await good.job()

    return asyncio.run(run())


def _script(folder: Path, text: str, mode: int = 0o755) -> list[str]:
    path = folder / "program"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return [str(path)]


PROGRAMS: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("B78-cwd-missing", lambda folder: {"argv": ["true"], "cwd": f"{folder}/missing"}, "missing"),
    ("B80-missing", lambda _: {"argv": ["/no/such/program"]}, "/no/such/program"),
    ("B80-not-executable", lambda folder: {"argv": _script(folder, "#!/bin/sh\n", 0o644)}, "program"),
    ("B80-no-shebang", lambda folder: {"argv": _script(folder, "exit 0\n")}, "program"),
    ("B80-exit-126", lambda _: {"argv": ["/bin/sh", "-c", "exit 126"]}, "exit code 126"),
    ("B80-exit-127", lambda _: {"argv": ["/bin/sh", "-c", "exit 127"]}, "exit code 127"),
    ("B80-exit-255", lambda _: {"argv": ["/bin/sh", "-c", "exit 255"]}, "exit code 255"),
    ("B80-killed", lambda _: {"argv": ["/bin/sh", "-c", "kill -9 $$"]}, "SIGKILL"),
]


@pytest.mark.parametrize(("name", "payload", "message"), PROGRAMS, ids=[name for name, *_ in PROGRAMS])
def test_failing_program_makes_only_its_own_job_dead(
    name: str, payload: Callable[[Path], dict[str, Any]], message: str, app: Holdfast, tmp_path: Path
) -> None:
    job, neighbour = drained(app, "command", payload(tmp_path))
    assert (job.state, neighbour.state) == (JobState.DEAD, JobState.SUCCEEDED)
    assert message in (job.error or "")


@pytest.mark.parametrize("task", ["os.system", "__import__", "builtins:eval"], ids=lambda task: f"B82-{task}")
def test_a_task_is_looked_up_and_never_imported(task: str, app: Holdfast, tmp_path: Path) -> None:
    job, neighbour = drained(app, task, {"command": f"touch {tmp_path}/made", "name": "antigravity"})
    assert (job.state, job.reason, neighbour.state) == (JobState.DEAD, "no_handler", JobState.SUCCEEDED)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "url", ["sqlite:///", "sqlite:", "", "jobs.db", "sqlite:///a.db#x"], ids=lambda url: f"B70-{url!r}"
)
def test_a_url_is_refused_with_what_to_give(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Holdfast(url).sync.count()


# ── the table itself ──────────────────────────────────────────────────────────────────────────────────────────────
def test_every_row_has_its_lines_here_or_a_reason() -> None:
    ids = [
        *(row.id for row in REFUSED),
        *(row.id for row in WORDS),
        *(row[0] for row in (*ACCEPTED, *POLICIES)),
        *(row[0] for row in (*FILES, *MODULES)),
        *(row[0] for row in COMMANDS),
        *(row[0] for row in PROGRAMS),
    ]
    tested = {int(name[1:3]) for name in ids}
    assert len(ids) == len(set(ids))
    assert tested | set(ELSEWHERE) == set(NUMBERS)
    assert not tested & set(ELSEWHERE)
