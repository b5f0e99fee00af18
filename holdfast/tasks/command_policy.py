"""Command jobs: the programs that may run. Checked where a job is submitted and again where it is run.

The payload is ``{"argv": ["program", "argument", …]}`` or ``{"shell": "text"}``, and may carry ``env``, ``cwd``,
``stdin`` (text), ``retry_codes`` (only these exit codes are retried) and ``dead_codes`` (these never are).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from holdfast.core.errors import Invalid, TooLarge

ARGUMENTS_LIMIT = 96 * 1024
"""Bytes that the arguments and the environment of a command may take: every system we know can start that."""
OUTPUT_LIMIT = 64 * 1024
"""Bytes that are kept of stdout and of stderr, each."""

_LARGEST_OUTPUT = 80 * 1024  # Twice this, each byte escaped to \u00XX, still fits a result of 1 MiB.
_BASE = ("PATH", "HOME", "LANG", "TZ")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DANGEROUS = re.compile(
    r"(LD|DYLD|BASH|GCONV|MALLOC|NODE|GIT|JAVA|JDK|HOLDFAST)_\w+|(PYTHON|PERL5|RUBY)\w*"
    r"|PATH|ENV|IFS|PS4|SHELLOPTS|BASHOPTS|CLASSPATH|LOCPATH|NLSPATH|HOSTALIASES"
)
# Characters with which a shell can do nothing but name a program and its arguments.
_PLAIN = re.compile(r"[\w@%+=:,./ \t'\"-]*\Z", re.ASCII)


COMMAND = "command"
"""The task name of command jobs."""


_SWITCHED_OFF = 'command jobs are switched off; set commands = "argv" here and for the workers'


class CommandPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command job's payload."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: str | None = None
    retry_codes: tuple[int, ...] | None = None
    dead_codes: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the executed words."""
        return self.argv if self.argv is not None else ("/bin/sh", "-c", self.shell or "")


class CommandPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which commands may run, and with which environment.

    ``allow``: the programs (``argv[0]``, as written) that may run, or whole shell texts; empty: all. A shell text that
    only names an allowed program and its arguments may run too. ``environment``: names that commands inherit from
    the worker besides PATH, HOME, LANG and TZ, and that a payload may set though they are dangerous. ``roots``:
    absolute directories under which ``cwd`` must lie; empty: anywhere.
    """

    mode: str = "off"
    allow: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    output_limit: int = OUTPUT_LIMIT
    roots: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("off", "argv", "shell"):
            raise Invalid("commands", self.mode, "give off, argv or shell")
        if not 0 <= self.output_limit <= _LARGEST_OUTPUT:
            raise Invalid("output_limit", self.output_limit, f"give 0 to {_LARGEST_OUTPUT} bytes")
        for root in self.roots:
            if not Path(root).is_absolute():
                raise Invalid("roots", root, "give absolute directories")

    def parse_command(self, payload: str | Mapping[str, object]) -> CommandPayload:
        """The command in ``payload`` (JSON text or the object). Invalid, naming the field, where it may not be run."""
        if self.mode == "off":
            raise Invalid("task", "command", _SWITCHED_OFF)
        command = _decoded(payload)
        self._check_words(command)
        self._check_environment(command.env)
        if command.cwd is not None:
            self.resolve_directory(command.cwd)
        size = sum(len(text.encode()) + 9 for text in (*command.words, *command.env, *command.env.values()))
        if size > ARGUMENTS_LIMIT:
            remedy = f"arguments and environment may take {ARGUMENTS_LIMIT} bytes; pass more through stdin"
            raise TooLarge("shell" if command.argv is None else "argv", f"{size} bytes", remedy)
        return command

    def environment_for(self, command: CommandPayload) -> dict[str, str]:
        """The clean environment of ``command``: the basics, the allowed names, its own."""
        inherited = {name: os.environ[name] for name in (*_BASE, *self.environment) if name in os.environ}
        return {"PATH": os.defpath, **inherited, **command.env}

    def resolve_directory(self, cwd: str) -> str:
        """The real path of ``cwd``, symbolic links followed; Invalid unless absolute and under a root."""
        if not Path(cwd).is_absolute():
            raise Invalid("cwd", cwd, "give an absolute directory")
        real = os.path.realpath(cwd)
        if self.roots and not any(Path(real).is_relative_to(os.path.realpath(root)) for root in self.roots):
            raise Invalid("cwd", cwd, f"it must lie under {' or '.join(self.roots)} (command_roots)")
        return real

    def _check_words(self, command: CommandPayload) -> None:
        if (command.argv is None) == (command.shell is None):
            raise Invalid("payload", "argv and shell", 'give either {"argv": ["program", …]} or {"shell": "text"}')
        if command.shell is not None:
            if self.mode != "shell":
                raise Invalid("shell", command.shell, 'shells are switched off; give {"argv": ["program", …]}')
            _check_texts("shell", [command.shell])
            if not command.shell.strip():
                raise Invalid("shell", command.shell, "give a command")
        else:
            words = command.words
            _check_texts("argv", words)
            if not words or not words[0].strip():
                raise Invalid("argv", list(words), "give the program first")
        if self.allow and not self._allows(command):
            field = "argv" if command.shell is None else "shell"
            raise Invalid(field, command.shell or command.words[0], f"allowed are: {', '.join(self.allow)}")

    def _allows(self, command: CommandPayload) -> bool:
        if command.shell is None:
            return command.words[0] in self.allow
        if command.shell.strip() in self.allow:
            return True
        if not _PLAIN.match(command.shell):
            return False
        try:
            words = shlex.split(command.shell)
        except ValueError:
            return False
        return bool(words) and words[0] in self.allow

    def _check_environment(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            if not _NAME.match(name):
                raise Invalid("env", name, "a name is letters, digits and underscores")
            if self.allow and name not in self.environment:
                remedy = "where programs are allowed by name, so are the variables a payload sets: command_environment"
                raise Invalid("env", name, remedy)
            if _DANGEROUS.fullmatch(name) and name not in self.environment:
                remedy = "if that is meant, name it in command_environment, in the settings here and of the workers"
                raise Invalid("env", name, remedy, "changes which code runs")
            _check_texts(f"env.{name}", [value])


def _decoded(payload: str | Mapping[str, object]) -> CommandPayload:
    try:
        if isinstance(payload, str):
            return msgspec.json.decode(payload, type=CommandPayload)
        return msgspec.convert(payload, CommandPayload)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        remedy = f'{error}; give {{"argv": ["program", …]}} or {{"shell": "text"}}'
        raise Invalid("payload", payload, remedy) from None


def _check_texts(field: str, texts: Iterable[str]) -> None:
    for text in texts:
        if "\0" in text:
            raise Invalid(field, text, "no program takes the character NUL in an argument")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Invalid(field, text, "it contains half of a character (a lone surrogate)") from None
