"""holdfast chaos run: what it leaves behind, what it refuses, and books that must not balance."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.interfaces.cli import Cli
from tests.support.servers import until

pytestmark = pytest.mark.timeout(150)

APP = """
import asyncio
import pathlib

from holdfast import Context, Holdfast

app = Holdfast({arguments})
LEDGER = pathlib.Path(__file__).with_name("ledger")


@app.task("work", max_attempts=2)
async def work(context: Context, number: str) -> None:
    if number == "fail":
        raise KeyError("it is broken")
    with LEDGER.open("a") as ledger:
        ledger.write(context.id + "\\n")
    await context.sleep("1s")


@app.task("other")
async def other() -> None: ...


def count_lines(ids):
    lines = LEDGER.read_text().split()
    return {{each: lines.count(each) for each in ids}}


def raises(ids):
    raise LookupError("no such table")


def negative(ids):
    return dict.fromkeys(ids, -1)


def halves(ids):
    return dict.fromkeys(ids, 0.5)


def nothing(ids):
    return None


constant = 7
"""
ONCE = '[[fault]]\nkind = "error"\nattempts = 1\n'
SLOW = '[[fault]]\nkind = "latency"\nseconds = 60\n'


@pytest.fixture
def allowed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A store whose settings allow faults."""
    monkeypatch.setenv("HOLDFAST_ALLOW_FAULTS", "true")
    cli.run("migrate")
    return cli


def scenario(cli: Cli, faults: str = ONCE, **fields: Any) -> list[str]:
    """Writes a scenario of five jobs; returns the command that runs it, but for the application."""
    values = {"task": "work", "jobs": 5, "workers": 1, "retry": "immediate", "span": "1m", "deadline": "60s", **fields}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    file = cli.folder / "small.toml"
    file.write_text("\n".join([*lines, faults]), encoding="utf-8")
    return ["chaos", "run", str(file), "--payload", '{"number": "{n}"}']


def run(cli: Cli, *words: str, arguments: str = "", code: int = 0, **options: Any) -> tuple[str, str]:
    """Runs a scenario as a process; returns what it prints, without the log's folder, and its errors."""
    target = cli.write_jobs(APP.format(arguments=arguments))
    done = cli.process(*words, "--app", target, **options)
    output, errors = (each.decode() for each in done.communicate(timeout=120))
    assert (done.returncode, "Traceback" in errors) == (code, False), output + errors
    return output, errors


def workers_of(pid: int) -> list[int]:
    """Returns the living workers that a runner has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if b"holdfast.testing.chaos_worker" in words and str(pid).encode() in words:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_runner_that_is_ended_leaves_nothing_behind(allowed: Cli, number: signal.Signals, tmp_path: Path) -> None:
    target = allowed.write_jobs(APP.format(arguments=""))
    words = [*scenario(allowed, SLOW), "--app", target]
    process = allowed.process(*words, env={"TMPDIR": str(tmp_path)})
    until(lambda: "latency" in allowed.run("chaos", "show"), "the faults")
    assert workers_of(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    until(lambda: not workers_of(process.pid), "the end of the workers")
    if number is not signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"{number.name}: the workers and the faults are gone" in errors.decode()
        assert "no faults are on" in allowed.run("chaos", "show")
        assert list(tmp_path.glob("holdfast-chaos-*")) == []


def test_frozen_worker_ends_with_its_runner(allowed: Cli) -> None:
    freeze = '[[fault]]\nkind = "freeze"\nseconds = 3600\n'
    process = allowed.process(*scenario(allowed, freeze), "--app", allowed.write_jobs(APP.format(arguments="")))

    def is_frozen() -> bool:
        return any("State:\tT" in Path(f"/proc/{pid}/status").read_text() for pid in workers_of(process.pid))

    until(is_frozen, "a frozen worker")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    until(lambda: not workers_of(process.pid), "the end of the workers")


def test_jobs_that_wait_have_begun_more_often_than_their_attempts(allowed: Cli) -> None:
    """A handler begins again after each sleep: its effect before that is explained."""
    target = allowed.write_jobs(APP.format(arguments=""))
    module = target.partition(":")[0]
    process = allowed.process(*scenario(allowed), "--app", target, "--effects", f"{module}:count_lines")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert b"0 once, 5 repeated, 0 missing" in output


@pytest.mark.parametrize(
    ("effects", "text"),
    [
        ("raises", "raised LookupError: no such table"),
        ("negative", "returned -1 for"),
        ("halves", "returned 0.5 for"),
        ("nothing", "returned NoneType; return a number for each id"),
    ],
)
def test_report_is_there_though_the_effects_cannot_be_counted(allowed: Cli, effects: str, text: str) -> None:
    target = allowed.write_jobs(APP.format(arguments=""))
    words = [*scenario(allowed), "--app", target, "--effects", f"{target.partition(':')[0]}:{effects}"]
    process = allowed.process(*words)
    output, errors = (each.decode() for each in process.communicate(timeout=120))
    assert (process.returncode, "Traceback" in errors) == (1, False), output + errors
    assert "succeeded       5" in output
    assert text in output
    assert output.rstrip().endswith("not balanced")
    (folder,) = [line.split()[-1] for line in output.splitlines() if "the logs of the workers are in" in line]
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert (Path(folder) / "worker-0.log").exists()


def test_effects_must_be_a_function(allowed: Cli) -> None:
    target = allowed.write_jobs(APP.format(arguments=""))
    words = [*scenario(allowed), "--app", target, "--effects", f"{target.partition(':')[0]}:constant"]
    assert "is of type int; give a function" in allowed.fail(*words, code=78)


def test_books_do_not_balance_if_jobs_die_without_a_fault(allowed: Cli) -> None:
    words = scenario(allowed, payload={"number": "fail"})[:3]
    file = allowed.folder / "small.toml"
    text = file.read_text().replace("payload = {'number': 'fail'}", 'payload = { number = "fail" }')
    file.write_text(text)
    output, _ = run(allowed, *words, code=1)
    assert "5 jobs are dead without a fault, 5 of them of: KeyError: 'it is broken'" in output
    file.write_text("may_die = true\n" + text)
    output, _ = run(allowed, *words)
    assert output.rstrip().endswith("balanced")


def test_scenario_is_refused_while_other_faults_are_on(allowed: Cli) -> None:
    allowed.run("chaos", "start", "--fault", "kind=latency,seconds=1,task=other", "--span", "10m")
    before = allowed.json("chaos", "show")
    _, errors = run(allowed, *scenario(allowed), code=1)
    assert "faults are on until" in errors
    assert allowed.json("chaos", "show") == before


def test_settings_of_a_scenario_go_before_those_in_code(allowed: Cli) -> None:
    arguments = '"sqlite:///code.db", log_level="ERROR", lease="60s", heartbeat="20s", processes=2'
    words = scenario(allowed, faults='[settings]\nlease = "3s"\nheartbeat = "1s"\n' + ONCE)
    output, _ = run(allowed, *words, "--url", f"sqlite:///{allowed.folder}/given.db", arguments=arguments)
    assert "error      5" in output
    assert not (allowed.folder / "code.db").exists()


def test_faults_hit_the_scenarios_task_only(allowed: Cli) -> None:
    job_id = allowed.run("enqueue", "other", "{}").strip()
    output, _ = run(allowed, *scenario(allowed))
    assert "error      5" in output
    job = allowed.json("show", job_id)
    assert (job["state"], job["attempts"]) == ("succeeded", 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("nosuch = 1", "settings.nosuch: '1' is not a setting"),
        ('url = "sqlite:///x.db"', "settings.url"),
        ("allow_faults = false", "settings.allow_faults"),
        ('lease = "soon"', "settings.lease: 'soon'"),
        ('"a=b" = 1', "settings.a=b"),
    ],
)
def test_settings_of_a_scenario_are_checked(allowed: Cli, settings: str, text: str) -> None:
    words = scenario(allowed, faults=f"[settings]\n{settings}\n{ONCE}")
    assert text in allowed.fail(*words, "--app", "nothing:app", code=78)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_absurd_files_are_refused(allowed: Cli, value: str) -> None:
    file = allowed.folder / "absurd.toml"
    file.write_text(f"jobs = {value}\n", encoding="utf-8")
    assert "absurd.toml: " in allowed.fail("chaos", "run", str(file), code=78)
    assert "absurd.toml: " in allowed.fail("chaos", "start", str(file), "--span", "1m", code=78)


def test_nothing_is_made_where_faults_are_not_allowed(cli: Cli) -> None:
    target = cli.write_jobs(APP.format(arguments=""))
    url = f"sqlite:///{cli.folder}/none.db"
    assert "allow_faults" in cli.fail(*scenario(cli), "--app", target, "--url", url, code=1)
    assert not (cli.folder / "none.db").exists()


def test_plan_of_faults_cannot_be_edited(allowed: Cli) -> None:
    allowed.run("chaos", "start", "--fault", "kind=error", "--span", "30s")
    (job,) = allowed.json("list", "--task", "holdfast.faults")["jobs"]
    for change in (("--expires", "31d"), ("--delay", "0s")):
        assert "keeps the faults that are on" in allowed.fail("edit", job["id"], *change, code=1)


def test_run_without_a_fault_says_so(allowed: Cli) -> None:
    fault = '[[fault]]\nkind = "error"\nprobability = 0.000001\n'
    _, errors = run(allowed, *scenario(allowed, fault), stderr=subprocess.PIPE)
    assert "no fault happened, so this run has shown nothing" in errors
