"""Command jobs: the programs that are allowed to run. Checked at submission and again in the worker.

The payload is ``{"argv": ["program", "argument", …]}`` or ``{"shell": "text"}``, with optional ``env``, ``cwd``,
``stdin`` (text), ``retry_codes`` (only these exit codes are retried), ``dead_codes`` (never retried), ``resources``
(limits by name), ``sandbox`` and ``network`` (true: the sandbox needs the network).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import Invalid, TooLarge
from holdfast.core.resources import UNLIMITED, ResourceLimits, as_resources, resource_document
from holdfast.core.validation import did_you_mean
from holdfast.settings.settings import Settings

MAX_ARGUMENTS_BYTES = 96 * 1024
"""Maximum bytes of a command's arguments and environment; every supported system can start that."""
MAX_OUTPUT_BYTES = 64 * 1024
"""Bytes that are stored of stdout and of stderr, each."""

_LARGEST_OUTPUT = 80 * 1024  # Twice this, each byte escaped to \u00XX, still fits a result of 1 MiB.
_BASE = ("PATH", "HOME", "LANG", "TZ")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DANGEROUS = re.compile(
    r"(LD|DYLD|BASH|GCONV|MALLOC|NODE|GIT|JAVA|JDK|HOLDFAST)_\w+|(PYTHON|PERL5|RUBY)\w*"
    r"|PATH|ENV|IFS|PS4|SHELLOPTS|BASHOPTS|CLASSPATH|LOCPATH|NLSPATH|HOSTALIASES"
)
# Text of these characters can only name a program and its arguments.
_PLAIN = re.compile(r"[\w@%+=:,./ \t'\"-]*\Z", re.ASCII)

SANDBOXES = ("none", "strict")
STRICT = "strict"
COMMAND = "command"
"""The task name of command jobs."""


class CommandPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command job's payload."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: str | None = None
    retry_codes: tuple[int, ...] | None = None
    dead_codes: tuple[int, ...] = ()
    resources: dict[str, Any] | None = None
    sandbox: str | None = None
    network: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the executed words."""
        return self.argv if self.argv is not None else ("/bin/sh", "-c", self.shell or "")


class CommandPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy: the commands that are allowed to run, and their environment.

    ``allow``: the programs (``argv[0]``, as written) that may run, or whole shell texts; empty: all. A shell text that
    only names an allowed program and its arguments may run too. ``environment``: names that commands inherit from
    the worker besides PATH, HOME, LANG and TZ, and that a payload may set though they are dangerous. ``roots``:
    absolute directories under which ``cwd`` must lie; empty: anywhere. ``limits``: the most that a command may ask
    for, and has if it does not ask. ``sandbox``: the least that it runs in. ``network``: a sandboxed command may ask
    for the network.
    """

    mode: str = "off"
    allow: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    output_limit: int = MAX_OUTPUT_BYTES
    roots: tuple[str, ...] = ()
    limits: ResourceLimits = UNLIMITED
    sandbox: str = "none"
    network: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("off", "argv", "shell"):
            raise Invalid("commands", self.mode, "give off, argv or shell")
        if not 0 <= self.output_limit <= _LARGEST_OUTPUT:
            raise Invalid("output_limit", self.output_limit, f"give 0 to {_LARGEST_OUTPUT} bytes")
        for root in self.roots:
            if not Path(root).is_absolute():
                raise Invalid("roots", root, "give absolute directories")

    def parse_command(self, payload: str | Mapping[str, object]) -> CommandPayload:
        """Returns the command in ``payload`` (JSON text or object). Invalid names the field that is not allowed."""
        if self.mode == "off":
            raise Invalid("task", COMMAND, 'command jobs are off; set commands = "argv" here and for the workers')
        command = _decoded(payload)
        self._check_words(command)
        self._check_environment(command.env)
        self._check_sandbox(command)
        for field, codes in (("retry_codes", command.retry_codes or ()), ("dead_codes", command.dead_codes)):
            for code in codes:
                if not 1 <= code <= 255:
                    raise Invalid(field, code, "give exit codes from 1 to 255")
        if command.cwd is not None:
            self.resolve_directory(command.cwd)
        self.limits_for(command)
        size = sum(len(text.encode()) + 9 for text in (*command.words, *command.env, *command.env.values()))
        if size > MAX_ARGUMENTS_BYTES:
            remedy = f"arguments and environment may take {MAX_ARGUMENTS_BYTES} bytes; pass more through stdin"
            raise TooLarge("shell" if command.argv is None else "argv", f"{size} bytes", remedy)
        return command

    def environment_for(self, command: CommandPayload) -> dict[str, str]:
        """Returns the environment of ``command``: the basic variables, the allowed ones, its own."""
        inherited = {name: os.environ[name] for name in (*_BASE, *self.environment) if name in os.environ}
        return {"PATH": os.defpath, **inherited, **command.env}

    def limits_for(self, command: CommandPayload) -> ResourceLimits:
        """Returns the limits of ``command``; Invalid if it requests more than the policy allows."""
        asked = UNLIMITED if command.resources is None else as_resources(command.resources).to_limits()
        asked.check_within(self.limits, "resources")
        return asked.restricted_to(self.limits)

    def is_sandboxed(self, command: CommandPayload) -> bool:
        """Returns True if ``command`` runs in the strict sandbox."""
        return STRICT in (command.sandbox, self.sandbox)

    def _check_sandbox(self, command: CommandPayload) -> None:
        if command.sandbox not in (None, *SANDBOXES):
            names = " or ".join(SANDBOXES)
            raise Invalid("sandbox", command.sandbox, f"give {names}{did_you_mean(command.sandbox, SANDBOXES)}")
        if command.sandbox == "none" and self.sandbox == STRICT:
            raise Invalid("sandbox", "none", "leave it out: the setting sandbox is strict", "is less than has to be")
        if not self.is_sandboxed(command):
            return
        if command.network and not self.network:
            raise Invalid("network", True, "the setting sandbox_network does not allow it")
        if command.cwd is not None and not self.roots:
            remedy = "name its directory, or one above it, in command_roots; without cwd it gets a new directory"
            raise Invalid("cwd", command.cwd, remedy, "may be written by a sandboxed command, and nothing allows that")

    def resolve_directory(self, cwd: str) -> str:
        """Returns the real path of ``cwd``, symbolic links resolved; Invalid unless absolute and under a root."""
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
            if name not in self.environment and (self.allow or _DANGEROUS.fullmatch(name)):
                remedy = "if that is meant, name it in command_environment, in the settings here and of the workers"
                raise Invalid("env", name, remedy, "may change which code runs")
            _check_texts(f"env.{name}", [value])


def draft_command(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the payload of a command with these fields; a field that is None is left out."""
    payload = {name: value for name, value in fields.items() if value is not None}
    if "resources" in payload:
        payload["resources"] = resource_document(payload["resources"])
    return payload


def command_policy(settings: Settings) -> CommandPolicy:
    """Returns the policy for command jobs from the settings."""
    return CommandPolicy(
        mode=settings.commands,
        allow=settings.command_allow,
        environment=settings.command_environment,
        output_limit=settings.output_limit,
        roots=settings.command_roots,
        limits=largest_limits(settings),
        sandbox=settings.sandbox,
        network=settings.sandbox_network,
    )


def largest_limits(settings: Settings) -> ResourceLimits:
    """Returns the resource limits of a job from the settings."""
    return ResourceLimits(
        memory=settings.job_memory,
        cpu=None if settings.job_cpu is None else settings.job_cpu.total_seconds(),
        open_files=settings.job_open_files,
        file_size=settings.job_file_size,
        processes=settings.job_processes,
    )


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
