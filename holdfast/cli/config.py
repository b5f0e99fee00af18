"""``config``: the settings, the source of each, and changing them."""

from __future__ import annotations

from typing import Any

import click

from holdfast import Settings
from holdfast.cli.base import add_group, setting_names, setting_values
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_note, print_table
from holdfast.settings.service_settings import HttpSettings
from holdfast.settings.settings import SETTINGS, ConfigEntry, file_for, set_value
from holdfast.views.formatting import safe_text

_COLUMNS = [Column("SETTING", "id"), Column("VALUE", "text"), Column("FROM"), Column("MEANING", "text", spare=True)]


@add_group("config")
def config() -> None:
    """Show and change settings."""


def _document(entry: ConfigEntry) -> dict[str, Any]:
    return {"name": entry.name, "value": entry.text, "source": entry.source, "form": entry.form, "meaning": entry.doc}


@config.command("list", examples=["holdfast config list", "holdfast config list --json"])
@click.pass_obj
def config_list(session: Session) -> None:
    """List every setting with its value and where that was said."""
    settings = session.settings()
    if session.json:
        print_json({"file": str(settings.file), "settings": [_document(entry) for entry in settings.items()]})
        return
    print_table(_COLUMNS, [[entry.name, entry.text, entry.source, entry.doc] for entry in settings.items()])
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
