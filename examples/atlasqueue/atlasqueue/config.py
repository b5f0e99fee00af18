"""AtlasQueue's environment variables, and the settings of Holdfast that each of them stands for."""

from __future__ import annotations

import os
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

HANDLER_MODULES = "HANDLER_MODULES"
"""Names modules with handlers, commas between; a worker imports them when it starts."""


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the file, those of HOLDFAST_… before them, AtlasQueue's own before all.

    Invalid and ConfigError name the variable that cannot be right.
    """
    given: dict[str, Any] = {}
    for variable, names in VARIABLES.items():
        if text := environ.get(variable, "").strip():
            given |= {name: SETTINGS[name].kind.parse(variable, text) for name in names}
    if "url" in given:
        given["url"] = given["url"].replace("postgresql+asyncpg://", "postgresql://", 1)  # as SQLAlchemy writes it
    if any(environ.get(variable) for variable in DELAYS):
        base, jitter = (_seconds(variable, environ.get(variable) or default) for variable, default in DELAYS.items())
        given["retry"] = f"exponential:base={base:g},factor=2,offset=0,cap=none,jitter=add:{jitter:g}"
    try:
        return Settings.load(path=FILE, environ=environ, **given)
    except ConfigError as error:
        raise ConfigError(_by_variables(str(error))) from None


def handler_modules(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The modules that HANDLER_MODULES names."""
    return [name.strip() for name in environ.get(HANDLER_MODULES, "").split(",") if name.strip()]


def _by_variables(problem: str) -> str:
    """The same, with the variables of the settings."""
    for variable, names in VARIABLES.items():
        for name in names:
            problem = problem.replace(f"argument: {name}:", f"{variable}:")
    for variable in ("JOB_QUEUE_KEY", "DLQ_KEY"):  # an error of one names the other, too
        problem = problem.replace(*VARIABLES[variable], variable)
    return problem


def _seconds(variable: str, text: str) -> float:
    return parse_duration(text, variable).total_seconds()
