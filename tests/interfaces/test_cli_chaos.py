"""holdfast chaos: faults switched on and off, and scenarios, from the command line."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from holdfast.testing.fixtures import RunScenario, chaos
from tests.interfaces.cli import Cli

__all__ = ["chaos"]  # a fixture


@pytest.fixture
def allowed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A store whose settings allow faults."""
    monkeypatch.setenv("HOLDFAST_ALLOW_FAULTS", "true")
    cli.run("migrate")
    return cli


def test_faults_are_switched_on_shown_and_switched_off(allowed: Cli, tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text('[[fault]]\nkind = "latency"\nseconds = 2\n')
    fault = "kind=error,task=mail.send,probability=0.3,attempts=2"
    started = allowed.json("chaos", "start", str(file), "--fault", fault, "--span", "5m", "--seed", "7")
    assert allowed.json("chaos", "show") == started
    assert started["seed"] == 7
    assert [each["kind"] for each in started["faults"]] == ["latency", "error"]
    assert (started["faults"][1]["probability"], started["faults"][1]["attempts"]) == (0.3, 2)
    assert "2 faults until" in allowed.run("chaos", "show")
    findings = {each["name"]: each for each in allowed.json("doctor")["findings"]}
    assert findings["faults"]["level"] == "warning"
    assert "faults are injected until" in findings["faults"]["text"]
    assert "holdfast.faults" not in str(findings["workers"]) + str(findings.get("queues", ""))
    assert "faults are off" in allowed.run("chaos", "stop")
    assert "no faults were on" in allowed.run("chaos", "stop")
    assert allowed.json("chaos", "show") == {"faults": [], "seed": None, "until": None}
    assert "these settings allow it" in allowed.run("doctor")


def test_faults_need_the_setting(cli: Cli) -> None:
    cli.run("migrate")
    message = cli.fail("chaos", "start", "--fault", "kind=error", "--span", "5m", code=1)
    assert "set allow_faults = true" in message
    assert "allow" not in cli.run("doctor")
    cli.write_jobs()
    assert "allow_faults" in cli.fail(
        "chaos",
        "run",
        "retry-storm",
        "--app",
        str(cli.target),
        "--task",
        "mail.send",
        "--payload",
        '{"to": "x"}',
        code=1,
    )
    assert cli.json("count")["count"] == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("start", "--fault", "kind=eror", "--span", "1m"), 2, "kind: 'eror'"),
        (("start", "--fault", "error", "--span", "1m"), 2, "write field=value,field=value"),
        (("start", "--fault", "kind=error,probability=x", "--span", "1m"), 2, "probability: 'x'"),
        (("start", "--fault", "kind=error", "--span", "2d"), 2, "up to 1d"),
        (("start", "--fault", "kind=error", "--span", "soon"), 2, "span: 'soon'"),
        (("start", "--fault", "kind=error"), 2, "--span"),
        (("start", "--span", "1m"), 2, "give 1 to 50"),
        (("start", "none.toml", "--span", "1m"), 78, "none.toml"),
        (("run", "nothing"), 78, "there is no scenario 'nothing'"),
        (("run", "retry-storm"), 78, "give --app module:name"),
        (("run", "retry-storm", "--payload", "x"), 2, "give a JSON object"),
        (("run", "retry-storm", "--payload", "[]"), 2, "give a JSON object"),
        (("run", "retry-storm", "--jobs", "0"), 2, "jobs: 0"),
        (("run", "retry-storm", "--effects", "x"), 2, "give module:function"),
    ],
)
def test_what_makes_no_sense_is_refused(allowed: Cli, words: tuple[str, ...], code: int, text: str) -> None:
    assert text in allowed.fail("chaos", *words, code=code)
    assert allowed.json("count")["count"] == 0


def test_scenario_names_the_tasks_there_are_and_the_effects_it_cannot_import(allowed: Cli) -> None:
    target = allowed.write_jobs()
    run = ("chaos", "run", "retry-storm", "--app", target)
    assert "--task NAME" in allowed.fail(*run, code=78)
    assert "there is no task 'nope' here" in allowed.fail(*run, "--task", "nope", code=78)
    assert "cannot be imported" in allowed.fail(*run, "--task", "mail.send", "--effects", "no_such:count", code=78)
    assert allowed.json("count")["count"] == 0


@pytest.mark.rows("S56")
def test_report_is_shown_with_books_and_retries(allowed: Cli) -> None:
    target = allowed.write_jobs()
    scenario = allowed.folder / "staging.toml"
    scenario.write_text(
        'description = "one error each"\njobs = 5\nworkers = 1\nretry = "immediate"\nspan = "1m"\n'
        '[[fault]]\nkind = "error"\nattempts = 1\n'
    )
    process = allowed.process(
        *("chaos", "run", str(scenario), "--app", target, "--task", "mail.send", "--payload", '{"to": "{n}"}'),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate(timeout=120)
    text = output.decode()
    assert process.returncode == 0, errors.decode()
    assert "staging: one error each" in text
    assert "error      5" in text
    assert "executions      10, 0 of them lost with their workers" in text
    retries = text.partition("Retries over time")[2].partition("Books")[0]
    assert sum(int(line.split()[-1]) for line in retries.split("\n") if "█" in line) == 5
    assert "accepted 5 = succeeded 5 + dead 0 + cancelled 0" in text
    assert text.rstrip().endswith("balanced")


def test_fixture_runs_a_scenario(allowed: Cli, chaos: RunScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    target = allowed.write_jobs()
    monkeypatch.syspath_prepend(allowed.folder)
    app = importlib.import_module(target.partition(":")[0]).app
    report = chaos(app, "partial-execution", target=target, task="mail.send", payload={"to": "x"}, jobs=5, workers=1)
    assert report.balanced, report.problems
    assert (report.accepted, report.succeeded, report.effects) == (5, 5, None)
