"""What may be run as a command: ``tasks/command_policy.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import Invalid, TooLarge
from holdfast.tasks.command_policy import CommandPayload, CommandPolicy

ARGV = CommandPolicy(mode="argv")
SHELL = CommandPolicy(mode="shell")


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({}, "payload"),
        ({"argv": ["ls"], "shell": "ls"}, "payload"),
        ({"argv": "ls"}, "payload"),
        ({"argv": ["ls", 5]}, "payload"),
        ({"argv": ["ls"], "colour": "red"}, "payload"),
        ("[1]", "payload"),
        ("{", "payload"),
        ({"argv": []}, "argv"),
        ({"argv": [" "]}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": ["a\ud800"]}, "argv"),
        ({"shell": "  "}, "shell"),
        ({"argv": ["ls"], "env": {"A": "\0"}}, "env.A"),
        ({"argv": ["ls"], "cwd": "relative"}, "cwd"),
        ({"argv": ["ls", "x" * 100_000]}, "argv"),
        ({"argv": ["ls"], "env": {"A": "x" * 100_000}}, "argv"),
    ],
)
def test_what_is_no_command_is_refused(payload: Any, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        SHELL.parse_command(payload)
    assert caught.value.field == field


def test_a_command_is_read_from_text_or_object() -> None:
    expected = CommandPayload(argv=("ls", "-l"), dead_codes=(3,))
    assert ARGV.parse_command('{"argv": ["ls", "-l"], "dead_codes": [3]}') == expected
    assert ARGV.parse_command({"argv": ["ls", "-l"], "dead_codes": [3]}) == expected


def test_modes() -> None:
    with pytest.raises(Invalid, match="jobs are off"):
        CommandPolicy().parse_command({"argv": ["ls"]})
    with pytest.raises(Invalid, match="shells are switched off"):
        ARGV.parse_command({"shell": "ls"})
    assert SHELL.parse_command({"shell": "echo a && echo b"}).words == ("/bin/sh", "-c", "echo a && echo b")
    assert SHELL.parse_command({"argv": ["ls"]}).words == ("ls",)


@pytest.mark.parametrize("field", ["retry_codes", "dead_codes"])
@pytest.mark.parametrize("code", [-1, 0, 256, 4000])
def test_codes_that_no_failed_command_exits_with_are_refused(field: str, code: int) -> None:
    ARGV.parse_command({"argv": ["ls"], field: [1, 255]})
    with pytest.raises(Invalid, match="from 1 to 255") as refused:
        ARGV.parse_command({"argv": ["ls"], field: [3, code]})
    assert (refused.value.field, refused.value.value) == (field, code)


def test_too_many_arguments_are_too_large() -> None:
    with pytest.raises(TooLarge, match="stdin"):
        ARGV.parse_command({"argv": ["echo", *["x" * 100] * 1000]})


@pytest.mark.parametrize(
    ("payload", "allowed"),
    [
        ({"argv": ["echo", "; rm -rf /"]}, True),
        ({"argv": ["/bin/echo"]}, False),
        ({"argv": ["rm"]}, False),
        ({"shell": "echo hello 'two words' --x=1"}, True),
        ({"shell": "make all && make install"}, True),
        ({"shell": "rm x"}, False),
        ({"shell": "echo a; rm x"}, False),
        ({"shell": "echo a\nrm x"}, False),
        ({"shell": "echo $(rm x)"}, False),
        ({"shell": "echo `rm x`"}, False),
        ({"shell": "echo a | sh"}, False),
        ({"shell": "echo a > /etc/passwd"}, False),
        ({"shell": "PATH=/tmp echo"}, False),
        ({"shell": "echo 'unbalanced"}, False),
        ({"shell": "''"}, False),
    ],
)
def test_an_allow_list_holds_in_both_modes(payload: dict[str, Any], allowed: bool) -> None:
    policy = CommandPolicy(mode="shell", allow=("echo", "make all && make install"))
    if allowed:
        policy.parse_command(payload)
    else:
        with pytest.raises(Invalid, match="allowed are: echo"):
            policy.parse_command(payload)


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "PYTHONPATH", "PATH", "BASH_ENV", "ENV", "IFS", "NODE_OPTIONS", "PERL5OPT"],
)
def test_names_that_change_which_code_runs_are_refused_unless_allowed(name: str) -> None:
    with pytest.raises(Invalid, match=name):
        ARGV.parse_command({"argv": ["ls"], "env": {name: "x"}})
    CommandPolicy(mode="argv", environment=(name,)).parse_command({"argv": ["ls"], "env": {name: "x"}})


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", "A B", "1A", "é", "A\n"])
def test_what_is_no_name_is_refused_always(name: str) -> None:
    with pytest.raises(Invalid, match="a name is letters"):
        CommandPolicy(mode="argv", environment=(name,)).parse_command({"argv": ["ls"], "env": {name: "x"}})


def test_harmless_names_pass() -> None:
    ARGV.parse_command({"argv": ["ls"], "env": {"ENVIRONMENT": "test", "PATHS": "x", "_x1": "y", "LDFLAGS": "z"}})


def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/h", "SECRET": "s", "WANTED": "w", "LD_PRELOAD": "evil.so"})
    policy = CommandPolicy(mode="argv", environment=("WANTED", "ABSENT"))
    command = policy.parse_command({"argv": ["ls"], "env": {"MINE": "m", "HOME": "/mine"}})
    assert policy.environment_for(command) == {"PATH": os.defpath, "HOME": "/mine", "WANTED": "w", "MINE": "m"}


def test_a_directory_must_lie_under_a_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "way_out").symlink_to(tmp_path)
    policy = CommandPolicy(mode="argv", roots=(str(root),))
    for good in (root, root / "inside", root / "not_there_yet"):
        policy.parse_command({"argv": ["ls"], "cwd": str(good)})
    for bad in (tmp_path, root / "..", root / "way_out", f"{root}_of_another", "/"):
        with pytest.raises(Invalid, match="must lie under"):
            policy.parse_command({"argv": ["ls"], "cwd": str(bad)})


def test_the_policy_itself_is_checked() -> None:
    with pytest.raises(Invalid, match="output_limit"):
        CommandPolicy(output_limit=10**9)
    with pytest.raises(Invalid, match="roots"):
        CommandPolicy(roots=("relative",))
