"""Every command there is: help, examples that parse, a place in the reference; and a quick start."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from holdfast.cli import main
from holdfast.settings.settings import SETTINGS
from tests.interfaces.cli import JOBS, ROOT, Cli
from tests.support.cli_page import list_commands, page

COMMANDS = dict(list_commands())

EXPECTED = """
    worker start|worker stop|worker list|enqueue|run|status|stats|list|count|show|watch|edit|cancel|fork|replay|delete
    |dlq list|dlq show|dlq replay|dlq purge|queue list|queue pause|queue resume|queue purge|config list|config get
    |config set|config path|retry-schedule|backup|migrate|doctor|why|dev|api|completion
    |schedule list|schedule show|schedule add|schedule pause|schedule resume|schedule remove|schedule run|schedule next
    |errors|alerts list|alerts test|chaos run|chaos start|chaos show|chaos stop
    |limit list|limit show|limit add|limit set|limit reset|limit remove|limit pause|limit resume
    |signal send|signal list|schedule backfill|keys create|keys list|keys rotate|keys revoke|audit verify
    |encryption new-key|encryption keys
    |import celery|import rq
"""


def test_the_commands_of_the_contract_are_there() -> None:
    asked = {f"holdfast {' '.join(name.split())}" for name in EXPECTED.split("|")}
    assert set(COMMANDS) == asked


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, cli: Cli) -> None:
    text = cli.run(*name.split()[1:], "--help")
    command = COMMANDS[name]
    assert command.help
    assert command.help.split("\n")[0] in " ".join(text.split())
    assert command.examples
    assert all(example in text for example in command.examples)
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_a_command_that_would_run(name: str) -> None:
    for example in COMMANDS[name].examples:
        program, *words = itertools.takewhile(lambda word: word not in (">", ">>"), shlex.split(example))
        assert program == "holdfast"
        command: click.Command | None = main
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None
        assert command is COMMANDS[name]
        with command.make_context(name, words):
            pass


def printed_commands() -> Iterator[tuple[str, str]]:
    """Texts of the package and of the documentation that begin with a command, each with its file."""
    package, texts = ROOT / "holdfast", []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [str(each.value) if isinstance(each, ast.Constant) else "X" for each in parts]
            texts.append((path, "".join(words)))
    for path in (*package.rglob("*.html"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.*")):
        if path.suffix != ".json":
            found = re.findall(r"(?:`|\$ |<code>)(holdfast [^`<\n]*)", path.read_text(encoding="utf-8"))
            texts += [(path, each) for each in found]
    for path, text in texts:
        for each in re.findall(r"(?<!from )\bholdfast ([a-z][^`\n;|]*)", text):
            yield str(path.relative_to(ROOT)), each


def test_every_printed_command_exists_with_its_options() -> None:
    wrong, number = [], 0
    for place, text in printed_commands():
        words = re.findall(r"[\w-]+", text)
        command: click.Command | None = main
        while words and isinstance(command, click.Group) and not words[0].startswith("-"):
            command = command.get_command(click.Context(command), words.pop(0))
        options = re.findall(r"(?<=\s)--[a-z][a-z-]*", text.partition(" -- ")[0])
        number += 1
        parameters = command.params if command is not None else []
        known = {each for parameter in parameters for each in (*parameter.opts, *parameter.secondary_opts)}
        if command is None or not set(options) <= {*known, "--help"}:
            wrong.append((place, text))
    assert number > 300
    assert not wrong


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name: str) -> None:
    options = {opt for parameter in COMMANDS[name].params for opt in parameter.opts}
    assert {"--json", "--app", "--url", "--config"} <= options


@pytest.mark.parametrize("words", ["--json queue list", "queue --json list", "queue list --json"])
def test_common_options_stand_before_or_after_any_name(words: str, cli: Cli) -> None:
    cli.run("migrate")
    assert json.loads(cli.run(*words.split())) == cli.json("queue", "list")


def test_the_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m tests.support.cli_page > docs/cli.md"
    assert all(f"## {name}\n" in written for name in COMMANDS)


def test_groups_list_their_commands(cli: Cli) -> None:
    assert all(name in cli.run("worker", "--help") for name in ("start", "stop", "list"))
    assert all(name in cli.run("dlq", "--help") for name in ("list", "show", "replay", "purge"))


def _loaded(program: str, names: tuple[str, ...]) -> list[str]:
    """Returns which of these modules a program loads."""
    shows = f"import sys\n{program}\nprint(*[name for name in {names} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", shows], cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()[-1].split()


def test_help_loads_nothing_heavy(cli: Cli) -> None:
    program = "from holdfast.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert _loaded(program, ("rich", "tomlkit", "structlog", "uvloop", "holdfast.worker", "click")) == ["click"]


def test_program_keeps_its_modules_out_of_collections() -> None:
    program = "import gc, sys; from holdfast.cli import main; sys.argv[1:] = ['--version']"
    ended = f"{program}\ntry: main()\nexcept SystemExit: print(gc.get_freeze_count() > 10_000)"
    assert subprocess.check_output([sys.executable, "-c", ended], cwd=ROOT, text=True).splitlines()[-1] == "True"


def test_worker_that_writes_json_lines_loads_no_renderer_for_people() -> None:
    program = (
        "from holdfast.cli.worker import worker; import holdfast.worker.worker, holdfast.telemetry.logs\n"
        "from holdfast.core.events import Events; from holdfast.settings.settings import Settings\n"
        "holdfast.telemetry.logs.configure_logs(Settings.load(), Events())()"
    )
    assert _loaded(program, ("rich", "structlog", "tomlkit", "click")) == ["click"]


def test_version_is_printed(cli: Cli) -> None:
    assert cli.run("--version").startswith("holdfast ")


def _offered(*words: str) -> list[str]:
    """What a shell would offer for the last word."""
    completing = ShellComplete(main, {}, "holdfast", "_HOLDFAST_COMPLETE")
    return [each.value for each in completing.get_completions(list(words[:-1]), words[-1])]


def test_settings_and_their_words_are_completed(cli: Cli) -> None:
    assert _offered("config", "get", "") == list(SETTINGS)
    assert _offered("config", "set", "command_") == [name for name in SETTINGS if name.startswith("command_")]
    assert _offered("config", "set", "commands", "") == ["off", "argv", "shell"]
    assert _offered("config", "set", "log_level", "w") == ["WARNING"]
    assert _offered("config", "set", "timeout", "n") == ["none"]
    assert _offered("config", "set", "lease", "") == _offered("config", "set", "leese", "") == []


def test_tasks_are_completed_quietly_from_the_application_there_is(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    assert _offered("enqueue", "") == []
    target = cli.write_jobs(f"print('loud')\n{JOBS}")
    assert _offered("--app", target, "enqueue", "m") == ["mail.send"]
    assert _offered("list", "--app", target, "--task", "") == ["break", "mail.send"]
    cli.run("config", "set", "app", cli.write_jobs("print('loud')\n1 / 0"))
    assert _offered("retry-schedule", "--task", "") == []
    assert capfd.readouterr() == ("", "")
    assert not Path("holdfast.db").exists()


def test_completion_comes_for_each_shell(cli: Cli) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_HOLDFAST_COMPLETE" in cli.run("completion", shell)
    cli.fail("completion", "powershell", code=2)


@pytest.mark.parametrize("words", [(), ("worker",)])
def test_a_bare_group_prints_its_help_once(words: tuple[str, ...], cli: Cli) -> None:
    given = cli.fail(*words, code=2)
    assert given.startswith("Usage: ")
    assert given.count("Usage:") == 1
    assert "Commands:" in given


def test_options_of_a_program_belong_behind_dashes(cli: Cli) -> None:
    assert "put -- before the program" in cli.fail("run", "--wait", "ls", "-l", code=2)
    assert "put -- before the program" not in cli.fail("schedule", "run", "nightly", "-l", code=2)
    assert "put --" not in cli.fail("status", "-l", code=2)
