"""``alerts``: the rules that are breached now, and a test of the receiver."""

from __future__ import annotations

import asyncio

import click

from holdfast import Holdfast
from holdfast.app.alert_sinks import describe_receiver
from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_note, print_table
from holdfast.core.errors import ConfigError
from holdfast.core.validation import format_duration
from holdfast.views.documents import to_builtins
from holdfast.views.findings import alert_document
from holdfast.views.formatting import count_noun, format_timestamp, safe_text


@add_group("alerts")
def alerts_group() -> None:
    """Show alerts, and test where they are sent.

    Rules and receiver are settings: alerts, alert_webhook, alert_command. Workers and the API look at the rules.
    """


@alerts_group.command("list", examples=["holdfast alerts list", "holdfast alerts list --json"])
@click.pass_obj
def alerts_list(session: Session) -> None:
    """Show the alerts that have not cleared, the earliest first."""
    with session.open_jobs() as app:
        found = app.alerts.sync.find_active()
    if session.json:
        print_json({"alerts": [to_builtins(alert_document(each)) for each in found]})
        return
    rows = [
        [each.rule, each.queue, format_timestamp(each.since_us), "yes" if each.is_sent else "not yet", each.text]
        for each in found
    ]
    columns = [Column("RULE", "id"), Column("QUEUE"), Column("SINCE"), Column("SENT"), Column("ALERT", "text")]
    number, interval = len(app.settings.alerts), format_duration(app.settings.alert_every)
    empty = (
        f"no alert is active; {count_noun(number, 'rule')}, which workers and the API look at every {interval}"
        if number
        else "there are no rules: write [alerts.NAME] in the settings"
    )
    print_table(columns, rows, empty=empty)
    for each in found:
        if each.problem:
            print_note(f"{each.rule}, {each.queue}: {each.problem}")


@alerts_group.command("test", examples=["holdfast alerts test"])
@click.pass_obj
def alerts_test(session: Session) -> None:
    """Send a test alert to the receiver of the settings. Exits 1 if it does not take it."""
    app = session.load()
    settings = app.settings
    if settings.alert_webhook is None and settings.alert_command is None:
        raise ConfigError("alert_webhook, alert_command: neither is set, so alerts are lines of the log alone; set one")
    asyncio.run(_send_test(app))
    if session.json:
        print_json({"sent_to": describe_receiver(settings)})
    else:
        click.echo(safe_text(f"{describe_receiver(settings)} has taken the test alert"))


async def _send_test(app: Holdfast) -> None:
    await app.alerts.send_test()
