"""Shell completion of names that are known without a store."""

from __future__ import annotations

import contextlib
import io

import click

from holdfast.cli.context import Session
from holdfast.settings.settings import SETTINGS


def setting_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The settings."""
    return [name for name in SETTINGS if name.startswith(begun)]


def setting_values(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The words the setting that was named may be; none where it may be anything."""
    setting = SETTINGS.get(context.params.get("name") or "")
    words = setting.kind.form.split(" or ") if setting is not None else []
    return [word for word in words if word.isalpha() and word.lower().startswith(begun.lower())]


def task_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The tasks of the application the command would load; whatever its code says or raises meanwhile is kept quiet."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(Exception):
        tasks = context.ensure_object(Session).load().registry.task_names()
        return [name for name in tasks if name.startswith(begun)]
    return []
