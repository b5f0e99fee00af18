"""The settings: a JSON file with QueueCTL's names, and what each of them means in Holdfast.

The file holds only what was set. Running workers follow it: to Holdfast it is the settings file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from holdfast import ConfigError, Invalid, Settings
from holdfast.settings import toml_file
from holdfast.settings.settings import SETTINGS, Loaded

DEFAULTS = Path(__file__).with_name("holdfast.toml")


@dataclass(frozen=True)
class Option:
    """One setting: its default, what it may be, and the Holdfast settings it stands for."""

    default: Any
    check: Callable[[str, Any], Any]
    mapped: Callable[[Any], dict[str, Any]]
    meaning: str


def _number(least: float, most: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Invalid(name, value, f"give a number from {least:g} to {most:g}")
        return value

    return check


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Invalid(name, value, f"give a whole number from {least} to {most}")
        return value

    return check


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Invalid(name, value, "give a program and its arguments: /usr/local/bin/page --team mail")
    return value


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise Invalid(name, value, f"give {' or '.join(choices)}")
        return str(value)

    return check


def _programs(name: str, value: Any) -> list[str]:
    listed = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, str) and each and "," not in each for each in listed):
        raise Invalid(name, value, "give programs with commas between: echo,sleep; nothing allows all")
    return listed


def _lock(seconds: float) -> dict[str, Any]:
    beat = min(10.0, math.floor(seconds * 1000 / 3) / 1000)
    return {"lease": f"{seconds}s", "heartbeat": f"{beat}s"}


RESOURCES = (
    ("max_memory", "job_memory", "memory that a job may use with all its processes: 512MiB; null: no limit"),
    ("max_cpu", "job_cpu", "CPU time that a job may use: 90, 5m; null: no limit"),
    ("max_processes", "job_processes", "processes that a job may have at once; null: no limit"),
    ("max_open_files", "job_open_files", "files that each of its processes may have open; null: no limit"),
    ("max_file_size", "job_file_size", "size of each file that a job writes: 10MiB; null: no limit"),
)
"""Quotas of each job: name, the setting of Holdfast, meaning. A job that exceeds one is killed, and has failed."""


def _resource(name: str, setting: str, meaning: str) -> Option:
    def check(_: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        SETTINGS[setting].kind.parse(name, text)
        return text

    return Option(None, _optional(check), lambda text: {setting: text}, meaning)


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "backoff_base": Option(
            2,
            _number(1, 1000),
            lambda base: {"retry": f"exponential:base=1,factor={base},offset=0,cap=none,jitter=none"},
            "a job that failed n times waits this to the power of n, in seconds",
        ),
        "max_retries": Option(
            3,
            _whole(0, 1000),
            lambda retries: {"max_attempts": retries + 1},
            "retries of a job that does not say; then it is dead",
        ),
        "timeout": Option(
            300, _number(0.1, 86400), lambda seconds: {"command_timeout": f"{seconds}s"}, "seconds a job may run"
        ),
        "lock_timeout": Option(
            300, _number(0.1, 86400), _lock, "seconds after which the lock of a vanished worker is void"
        ),
        "check_interval": Option(
            1,
            _number(0.01, 3600),
            lambda seconds: {"poll": f"{seconds}s", "sweep": f"{seconds}s"},
            "seconds between two looks of an idle worker",
        ),
        "stop_timeout": Option(
            300,
            _number(0, 86400),
            lambda seconds: {"grace": f"{seconds}s"},
            "seconds a worker that is stopping may go on with its job",
        ),
        "execution": Option(
            "shell",
            _choice("shell", "argv"),
            lambda mode: {"commands": mode},
            "shell, or argv: programs without a shell",
        ),
        "allowed_commands": Option(
            [], _programs, lambda programs: {"command_allow": programs}, "programs that may run; none named: all"
        ),
        **{name: _resource(name, setting, meaning) for name, setting, meaning in RESOURCES},
        "sandbox": Option(
            "none",
            _choice("none", "strict"),
            lambda mode: {"sandbox": mode},
            "strict: commands write in a directory of their own only, and have no network",
        ),
        "alert_dead": Option(
            None,
            _optional(_whole(0, 50_000)),
            lambda most: {"alerts": {} if most is None else {"dead": {"dead_over": most}}},
            "dead jobs beyond which an alert is sent, once; null: none is",
        ),
        "alert_command": Option(
            None,
            _optional(_text),
            lambda command: {"alert_command": command},
            "program that gets alerts, as JSON on its input; null: alerts are lines of the log",
        ),
    }
)


def option(name: str) -> Option:
    """The setting of that name; Invalid if there is none."""
    if name not in OPTIONS:
        raise Invalid("setting", name, f"there are these: {', '.join(OPTIONS)}")
    return OPTIONS[name]


@dataclass(frozen=True)
class Place:
    """Where one queue lives: its database and its settings file."""

    database: Path
    config: Path

    @classmethod
    def here(cls) -> Place:
        """In the working directory, unless the environment says otherwise."""
        environ = os.environ
        database = Path(environ.get("QUEUECTL_DB") or "queuectl.db")
        return cls(database.absolute(), Path(environ.get("QUEUECTL_CONFIG") or "queuectl.json").absolute())

    def read(self) -> dict[str, Any]:
        """What the file says; ConfigError, naming the file, where it makes no sense."""
        try:
            provided = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.config.name}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{self.config.name}: not valid JSON: {error}; correct it, or delete it") from None
        if not isinstance(provided, dict):
            raise ConfigError(f"{self.config.name}: give a JSON object: {{}} says nothing")
        try:
            return {name: option(name).check(name, value) for name, value in provided.items()}
        except Invalid as error:
            raise ConfigError(f"{self.config.name}: {error}") from None

    def values(self) -> dict[str, Any]:
        """Every setting: as the file says, or by default."""
        return {name: each.default for name, each in OPTIONS.items()} | self.read()

    def set(self, name: str, text: str) -> Any:
        """Write one setting into the file; Invalid, and nothing is written, where it is no good. The value it has.

        ConfigError: the file cannot be read or written.
        """
        try:
            given = json.loads(text)
        except ValueError:
            given = text
        if isinstance(given, bool):
            given = text  # no setting is a truth value, and `true` is a program
        value = option(name).check(name, given)
        try:
            with self._locked():
                provided = self.read() | {name: value}
                self._load(provided)
                fresh = self.config.with_name(f".{self.config.name}.{os.getpid()}")
                fresh.write_text(json.dumps(provided, indent=2) + "\n", encoding="utf-8")
                fresh.replace(self.config)
        except OSError as error:
            raise ConfigError(f"{self.config}: cannot be written: {error.strerror}") from None
        return value

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two commands at once do not undo each other."""
        descriptor = os.open(self.config.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def settings(self) -> Settings:
        """What Holdfast runs by. Its settings file is the JSON file, so running workers follow that."""
        stamp = toml_file.file_stamp(self.config)
        loaded = self._load(self.read())
        return Settings(
            Loaded(
                values={name: loaded.get_value(name) for name in SETTINGS},
                sources={name: loaded.source_of(name) for name in SETTINGS},
                file=self.config,
                stamp=stamp,
                warnings=loaded.warnings,
                reload=self.settings,
            )
        )

    def _load(self, provided: Mapping[str, Any]) -> Settings:
        mapped: dict[str, Any] = {}
        for name, value in provided.items():
            mapped |= OPTIONS[name].mapped(value)
        return Settings.load(path=DEFAULTS, environ={}, url=f"sqlite:///{quote(str(self.database))}", **mapped)
