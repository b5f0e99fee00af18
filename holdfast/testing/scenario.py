"""Chaos scenarios: a file that says which faults an application's workers get while they run so many jobs.

A scenario is run with real worker processes on the application's own store; at the end the books must balance.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.faults import Fault, parse_faults
from holdfast.core.retry import as_retry
from holdfast.core.validation import (
    check_name,
    check_options,
    check_span,
    check_task_name,
    did_you_mean,
    parse_boolean,
    parse_count,
)
from holdfast.settings.settings import SETTINGS

MAX_JOBS = 10_000
_FIELDS = (
    "description", "task", "payload", "queue", "jobs", "copies", "workers", "span", "deadline", "seed", "retry",
    "max_attempts", "effects", "exactly_once", "may_die", "settings", "fault",
)  # fmt: skip


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario. Made by ``load_scenario``."""

    name: str
    faults: tuple[Fault, ...]
    description: str = ""
    task: str | None = None
    payload: dict[str, Any] = {}
    """Arguments of each job; the text ``{n}`` in them is its number."""
    queue: str | None = None
    jobs: int = 200
    copies: int = 1
    """Submissions of each job, all with one idempotency key."""
    workers: int = 2
    """Worker processes; one that is killed is replaced."""
    span: float = 15.0
    """Seconds for which the faults are on."""
    deadline: float = 180.0
    """Seconds in which every job must have ended."""
    seed: int | None = None
    retry: str | None = None
    """Policy of these jobs; None: that of the task."""
    max_attempts: int | None = None
    effects: str | None = None
    """``module:function`` that counts the effects of jobs: it takes their ids, and returns a number for each."""
    exactly_once: bool = False
    """True: a repeated effect is a problem. False: each execution of a job may repeat it once."""
    may_die: bool = False
    """True: jobs may be dead without a fault."""
    settings: dict[str, str] = {}
    """Settings of the workers, besides the application's."""

    def with_values(self, **given: Any) -> Scenario:
        """Returns the scenario with these values, as a command or a test gives them; None keeps one."""
        check_options(given, [name for name in _FIELDS if name != "fault"], "value")
        fields = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(self, **_checked(fields))


WORKER_SETTINGS: Mapping[str, object] = {
    "allow_faults": True,
    "processes": 1,
    "worker_id": "minted",
    "metrics_port": "none",
    "log_format": "json",
    "log_level": "WARNING",
}
"""Settings of the workers, whatever the application says."""
RESERVED_SETTINGS = frozenset({"app", "url", *WORKER_SETTINGS})
"""Settings that a scenario cannot set."""


def scenario_names() -> list[str]:
    """Returns the names of the ready scenarios."""
    files = resources.files("holdfast.testing").joinpath("scenarios").iterdir()
    return sorted(each.name.removesuffix(".toml") for each in files if each.name.endswith(".toml"))


def load_scenario(source: str) -> Scenario:
    """Reads a scenario: a ready one by its name, or a file by its path. Raises ConfigError."""
    if source in scenario_names():
        text = resources.files("holdfast.testing").joinpath("scenarios", f"{source}.toml").read_text("utf-8")
        return parse_scenario(source, text)
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        names = scenario_names()
        raise ConfigError(
            f"there is no scenario {source!r}; there are {', '.join(names)}, and your own: give the path of a TOML file"
            f"{did_you_mean(source, names)}"
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}; give a TOML file in UTF-8") from None
    return parse_scenario(source, text)


def parse_scenario(name: str, text: str) -> Scenario:
    """Makes a scenario of the text of its file. Raises ConfigError, naming the file and the field."""
    try:
        given = tomllib.loads(text)
        check_options(given, _FIELDS, "field")
        faults = parse_faults(_tables(given.pop("fault", [])))
        return Scenario(name=Path(name).stem, faults=faults, **_checked(given))
    except (ValueError, RecursionError, Invalid) as error:  # of TOML: also a number of too many digits
        raise ConfigError(f"{name}: {error}") from None


def _tables(given: object) -> list[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise Invalid("fault", given, "write each fault as a table: [[fault]]")
    return given


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks values by their names; those in seconds may be spans."""
    return {name: _CHECKS[name](value, name) for name, value in given.items()}


def _check_text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(field, value, "give text")
    return value


def _check_payload(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Invalid(field, value, "give an object: the arguments by name")
    return dict(value)


def _check_target(value: object, field: str) -> str:
    module, colon, name = str(value).partition(":")
    if not (isinstance(value, str) and module and colon and name):
        raise Invalid(field, value, "give module:function")
    return value


def _check_retry(value: object, field: str) -> str:
    as_retry(_check_text(value, field))
    return str(value)


def _check_settings(value: object, field: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise Invalid(field, value, "write a table of settings: [settings]")
    texts = {str(name): str(each).lower() if isinstance(each, bool) else str(each) for name, each in value.items()}
    for name, text in texts.items():
        if name in RESERVED_SETTINGS:
            raise Invalid(f"{field}.{name}", text, "leave it out: scenarios set it themselves", "is not for a scenario")
        if name not in SETTINGS:
            raise Invalid(f"{field}.{name}", text, f"remove it{did_you_mean(name, SETTINGS)}", "is not a setting")
        SETTINGS[name].kind.parse(f"{field}.{name}", text)
    return texts


def _check_seconds(value: object, field: str, *, least: float = 1) -> float:
    seconds = check_span(value, field).total_seconds()
    if not least <= seconds <= 86_400:
        raise Invalid(field, value, f"give {least:g} seconds to 1d")
    return seconds


_CHECKS: Mapping[str, Any] = {
    "description": _check_text,
    "task": check_task_name,
    "payload": _check_payload,
    "queue": lambda value, field: check_name(field, value),
    "jobs": lambda value, field: parse_count(value, field, least=1, most=MAX_JOBS),
    "copies": lambda value, field: parse_count(value, field, least=1, most=100),
    "workers": lambda value, field: parse_count(value, field, least=1, most=64),
    "span": lambda value, field: _check_seconds(value, field, least=5),
    "deadline": _check_seconds,
    "seed": lambda value, field: parse_count(value, field, least=0, most=2**31),
    "retry": _check_retry,
    "max_attempts": lambda value, field: parse_count(value, field, least=1, most=1000),
    "effects": _check_target,
    "exactly_once": parse_boolean,
    "may_die": parse_boolean,
    "settings": _check_settings,
}
