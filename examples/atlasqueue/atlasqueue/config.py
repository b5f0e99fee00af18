"""AtlasQueue's environment variables, and the settings of Holdfast that each of them stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast import ConfigError, Settings
from holdfast.core.validation import parse_duration
from holdfast.settings.settings import SETTINGS

FILE = Path(__file__).parents[1] / "holdfast.toml"

VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DATABASE_URL": ("url",),
        "REDIS_URL": ("transport_url",),
        "JOB_QUEUE_KEY": ("transport_key",),
        "DLQ_KEY": ("transport_dead_key",),
        "WORKER_LEASE_SECONDS": ("lease",),
        "WORKER_POLL_TIMEOUT": ("poll", "sweep"),
        "WORKER_METRICS_PORT": ("metrics_port",),
        "LOG_LEVEL": ("log_level",),
    }
)
DELAYS: Mapping[str, str] = MappingProxyType({"RETRY_BASE_DELAY_SECONDS": "5", "RETRY_JITTER_MAX_SECONDS": "2"})
"""Variables of the retry policy, which is one setting, with their defaults."""
_OF_RETRY = dict(zip(DELAYS, ("base", "jitter"), strict=True))

HANDLER_MODULES = "HANDLER_MODULES"
"""Names modules with handlers, commas between; a worker imports them when it starts."""


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the file, those of HOLDFAST_… before them, AtlasQueue's own before all.

    Invalid and ConfigError name the variable that cannot be right, and so does ``name_variables`` for what is found
    out later.
    """
    given: dict[str, Any] = {}
    for variable, names in VARIABLES.items():
        if text := environ.get(variable, "").strip():
            given |= {name: SETTINGS[name].kind.parse(variable, text) for name in names}
    if "url" in given:
        given["url"] = given["url"].replace("postgresql+asyncpg://", "postgresql://", 1)  # as SQLAlchemy writes it
        if not given["url"].startswith(("postgresql://", "postgres://")):
            raise ConfigError(
                "DATABASE_URL: AtlasQueue keeps its jobs in PostgreSQL; write postgresql://user@host/database"
            )
    if any(environ.get(variable) for variable in DELAYS):
        base, jitter = (_seconds(variable, environ.get(variable) or default) for variable, default in DELAYS.items())
        given["retry"] = f"exponential:base={base},factor=2,offset=0,cap=none,jitter=add:{jitter}"
    try:
        return Settings.load(path=FILE, environ=environ, **given)
    except ConfigError as error:
        raise ConfigError(name_variables(str(error), environ)) from None


def handler_modules(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The modules that HANDLER_MODULES names."""
    return [name.strip() for name in environ.get(HANDLER_MODULES, "").split(",") if name.strip()]


def name_variables(problem: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text of an error of Holdfast with AtlasQueue's variables in place of the settings' names.

    A setting that only a variable of Holdfast gives keeps its name.
    """
    for variable, names in VARIABLES.items():
        for name in names:
            if f"HOLDFAST_{name.upper()}" in environ and not environ.get(variable, "").strip():
                continue
            problem = re.sub(rf"^(?:argument: )?{name}:", f"{variable}:", problem, flags=re.MULTILINE)
            if "_" in name:  # no word of a sentence: an error of one may name another, too
                problem = re.sub(rf"\b{name}\b", variable, problem)
    for variable, name in _OF_RETRY.items():
        problem = re.sub(rf"^argument: retry\.{name}:", f"{variable}:", problem, flags=re.MULTILINE)
    return problem


def _seconds(variable: str, text: str) -> str:
    """Returns the number, exact to the microsecond."""
    return f"{parse_duration(text, variable).total_seconds():f}".rstrip("0").rstrip(".")
