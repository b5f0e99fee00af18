"""``config``: shows and changes settings. ``retry-schedule``: the delays of a retry policy."""

from __future__ import annotations

import re
from typing import Any

import click
import msgspec

from holdfast import Retry, Settings
from holdfast.cli.base import add_command, add_group, setting_names, setting_values, task_names
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_note, print_table
from holdfast.core.errors import NotFound
from holdfast.core.validation import did_you_mean
from holdfast.settings.service_settings import HttpSettings
from holdfast.settings.settings import SETTINGS, ConfigEntry, file_for, set_value
from holdfast.views.formatting import format_span, safe_text

_COLUMNS = [Column("SETTING", "id"), Column("VALUE", "text"), Column("FROM"), Column("MEANING", "text", spare=True)]


@add_group("config")
def config() -> None:
    """Show and change settings."""


_LINK = re.compile(r"\[([^]]+)]\([^)]+\)")


def _document(entry: ConfigEntry) -> dict[str, Any]:
    meaning = _meaning(entry)
    return {"name": entry.name, "value": entry.text, "source": entry.source, "form": entry.form, "meaning": meaning}


def _meaning(entry: ConfigEntry) -> str:
    """Returns the text about a setting without the links of the reference page."""
    return _LINK.sub(r"\1", entry.doc)


@config.command("list", examples=["holdfast config list", "holdfast config list --json"])
@click.pass_obj
def config_list(session: Session) -> None:
    """List every setting with its value and the source of that value."""
    settings = session.settings()
    if session.json:
        print_json({"file": str(settings.file), "settings": [_document(entry) for entry in settings.items()]})
        return
    print_table(_COLUMNS, [[entry.name, entry.text, entry.source, _meaning(entry)] for entry in settings.items()])
    for warning in settings.warnings:
        print_note(f"warning: {warning}")


@config.command("get", examples=["holdfast config get lease"])
@click.argument("name", metavar="NAME", shell_complete=setting_names)
@click.pass_obj
def config_get(session: Session, *, name: str) -> None:
    """Print the value of one setting."""
    entry = session.settings().describe_setting(name)
    if session.json:
        print_json(_document(entry))
    else:
        click.echo(safe_text(entry.text))


@config.command("set", examples=["holdfast config set lease 60s", "holdfast config set app shop.jobs:app"])
@click.argument("name", metavar="NAME", shell_complete=setting_names)
@click.argument("value", metavar="VALUE", shell_complete=setting_values)
@click.pass_obj
def config_set(session: Session, *, name: str, value: str) -> None:
    """Write one setting into the settings file.

    Everything else in it stays, comments too. The file is made if there is none. Running workers follow most settings
    within seconds; a running `holdfast api` follows none: restart it.
    """
    file = file_for(path=session.config)
    set_value(file, name, value)
    settings = Settings.load(path=file)
    entry = settings.describe_setting(name)
    if session.json:
        print_json(_document(entry) | {"file": str(file)})
    else:
        click.echo(safe_text(f"{name} is set in {file}"))
    if entry.source == SETTINGS[name].variable:
        print_note(f"warning: here {entry.source} says otherwise and wins: {entry.text}")
    if hasattr(HttpSettings, name):
        print_note("restart `holdfast api`: one that runs goes on as it was started")


@config.command("path", examples=["holdfast config path"])
@click.pass_obj
def config_path(session: Session) -> None:
    """Print the settings file that is read, or would be written."""
    file = file_for(path=session.config)
    if session.json:
        print_json({"file": str(file), "exists": file.exists()})
    else:
        click.echo(safe_text(file))


_RETRY_COLUMNS = [
    Column("FAILURE", "number"),
    Column("NOMINAL", "number"),
    Column("LEAST", "number"),
    Column("MOST", "number"),
    Column("IN ALL", "number", spare=True),
]
_SHOWN = 10  # failures shown if attempts are unlimited


@add_command(
    "retry-schedule",
    examples=[
        "holdfast retry-schedule",
        "holdfast retry-schedule exponential:base=5,factor=3,cap=300 --attempts 8",
        "holdfast retry-schedule 1,5,25,125",
    ],
)
@click.argument("policy", required=False)
@click.option("--attempts", type=click.IntRange(1, 10_000), metavar="N", help="Attempts the job may have.")
@click.option(
    "--task",
    metavar="NAME",
    shell_complete=task_names,
    help="The policy and the attempts of this task of the application.",
)
@click.pass_obj
def retry_schedule(session: Session, *, policy: str | None, attempts: int | None, task: str | None) -> None:
    """Print how long a retry policy waits after each failure.

    The waits are nominal, least and most. POLICY is exponential, exponential:base=5,factor=2 and so on, immediate,
    fixed:SPAN, or the delays with commas between. Without one: the policy of the settings.
    """
    if policy is not None and task is not None:
        raise click.UsageError("give a policy or --task, not both")
    retry, max_attempts = _of_task(session, task) if task is not None else _of_settings(session, policy)
    count = attempts or max_attempts or _SHOWN + 1
    rows = _rows(retry, count)
    if session.json:
        print_json({"policy": str(retry), "attempts": attempts or max_attempts, "delays": rows})
        return
    print_note(f"{retry}, {attempts or max_attempts or 'unlimited'} attempts")
    cells = [
        [row["failure"], *(format_span(row[name]) for name in ("nominal", "least", "most", "in_all"))] for row in rows
    ]
    print_table(_RETRY_COLUMNS, cells, empty="one attempt, no retry")


def _rows(retry: Retry, attempts: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    in_all = 0.0
    for failure, nominal in enumerate(retry.schedule(attempts), 1):
        least, most = retry.delay_bounds(failure)
        in_all += nominal.total_seconds()
        rows.append(
            {
                "failure": failure,
                "nominal": nominal.total_seconds(),
                "least": least.total_seconds(),
                "most": most.total_seconds(),
                "in_all": in_all,
            }
        )
    return rows


def _of_settings(session: Session, policy: str | None) -> tuple[Retry, int | None]:
    settings = session.settings()
    return settings.retry if policy is None else Retry.parse(policy), settings.max_attempts


def _of_task(session: Session, name: str) -> tuple[Retry, int | None]:
    app = session.with_tasks("--task")
    registered = app.registry.get(name)
    if registered is None:
        raise NotFound(f"the application has no task {name!r}{did_you_mean(name, app.registry.task_names())}")
    own = registered.max_attempts
    max_attempts = app.settings.max_attempts if isinstance(own, msgspec.UnsetType) else own
    return registered.retry or app.settings.retry, max_attempts
