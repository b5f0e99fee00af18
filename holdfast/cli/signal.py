"""``signal``: signals for jobs that wait."""

from __future__ import annotations

import json

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_table
from holdfast.core.errors import Invalid
from holdfast.core.ids import new_id
from holdfast.views.documents import to_builtins
from holdfast.views.formatting import clip_text, format_moment
from holdfast.views.workflows import SentSignalDocument, signal_document

_COLUMNS = [Column("TOPIC"), Column("VALUE"), Column("SENT"), Column("ID", "id", spare=True)]


@add_group("signal")
def signal() -> None:
    """Send signals to waiting jobs, and list kept ones.

    A job waits by `context.wait_for(topic)`.
    """


@signal.command(
    "send",
    examples=[
        "holdfast signal send approved:42 true",
        "holdfast signal send paid:42 '{\"cents\": 1250}' --id stripe-9",
    ],
)
@click.argument("topic", metavar="TOPIC")
@click.argument("value", metavar="[JSON]", default="null")
@click.option("--id", "signal_id", metavar="TEXT", help="A second signal with the same id is ignored.")
@click.pass_obj
def signal_send(session: Session, *, topic: str, value: str, signal_id: str | None) -> None:
    """Send a signal, with a JSON value.

    The job that has waited longest for the topic receives it. If none waits, it is kept until one does.
    """
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Invalid("value", value, f"""give a JSON value, such as true or '"text"': {error}""") from None
    signal_id = new_id() if signal_id is None else signal_id
    with session.open_jobs() as app:
        sent = app.sync.signal(topic, decoded, id=signal_id)
    if session.json:
        print_json(to_builtins(SentSignalDocument(signal_id, sent.is_new, sent.job_id)))
        return
    where = "kept until a job waits for it" if sent.job_id is None else f"received by job {sent.job_id}"
    click.echo(where if sent.is_new else f"sent before, with this id; {where}")


@signal.command("list", examples=["holdfast signal list", "holdfast signal list approved:42 --json"])
@click.argument("topic", metavar="[TOPIC]", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Signals to list.")
@click.pass_obj
def signal_list(session: Session, *, topic: str | None, limit: int) -> None:
    """List signals that no job has received, the oldest first."""
    with session.open_jobs() as app:
        found = app.sync.kept_signals(topic, limit=limit)
    if session.json:
        print_json({"signals": [to_builtins(signal_document(each)) for each in found]})
        return
    rows: list[list[object]] = [
        [each.topic, clip_text(each.value), format_moment(each.sent_at_us), each.id] for each in found
    ]
    print_table(_COLUMNS, rows, empty="no signals: each has been received")
