"""``encryption``: new keys for payloads and results, and the use of those that there are."""

from __future__ import annotations

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_table
from holdfast.core.encryption import new_key
from holdfast.views.documents import to_builtins


@add_group("encryption")
def encryption_group() -> None:
    """Make keys for encrypted payloads, and count what needs each."""


@encryption_group.command("new-key", examples=["holdfast encryption new-key"])
@click.pass_obj
def encryption_new_key(session: Session) -> None:
    """Print a new random key, for a codec of your application. It is stored nowhere."""
    key = new_key()
    if session.json:
        print_json({"key": key})
    else:
        click.echo(key)


@encryption_group.command("keys", examples=["holdfast encryption keys", "holdfast encryption keys --json"])
@click.pass_obj
def encryption_keys(session: Session) -> None:
    """Count the jobs, schedules and signals that need each key. One that nothing needs may be removed.

    Reads every job that has not ended or is dead, and decrypts nothing. The key - stands for what is in the clear.
    """
    with session.open_jobs() as app:
        uses = app.sync.count_encryption_keys()
    if session.json:
        print_json({"keys": [to_builtins(use) for use in uses]})
        return
    columns = [
        Column("KEY", "id"),
        Column("NOT ENDED", "number"),
        Column("DEAD", "number"),
        Column("SCHEDULES", "number"),
        Column("SIGNALS", "number"),
    ]
    rows = [[use.key_id or "-", *map(str, (use.jobs, use.dead, use.schedules, use.signals))] for use in uses]
    print_table(columns, rows, empty="nothing is stored that may still run")
