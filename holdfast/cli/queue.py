"""``queue``: list, pause, resume and purge queues."""

from __future__ import annotations

import click
import msgspec

from holdfast import JobFilter
from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.inspect import print_queues
from holdfast.cli.operations import run_bulk
from holdfast.cli.output import print_json, print_note
from holdfast.core.models import NOT_STARTED
from holdfast.core.validation import check_name
from holdfast.views.bulk_operations import DELETE
from holdfast.views.documents import queue_document
from holdfast.views.formatting import Filters


@add_group("queue")
def queue() -> None:
    """List queues, stop and start them, empty them."""


@queue.command("list", examples=["holdfast queue list"])
@click.pass_obj
def queue_list(session: Session) -> None:
    """List every queue that has jobs or is paused. Jobs are counted as by `holdfast status`."""
    with session.open_jobs() as app:
        queues = app.sync.queues()
    if session.json:
        print_json({"queues": [queue_document(each) for each in queues]})
    else:
        print_queues(queues, empty="no queues")


@queue.command("pause", examples=["holdfast queue pause mail"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def queue_pause(session: Session, *, names: tuple[str, ...]) -> None:
    """Let no worker take a job of these queues; what runs goes on."""
    _set_paused(session, names, paused=True)


@queue.command("resume", examples=["holdfast queue resume mail"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def queue_resume(session: Session, *, names: tuple[str, ...]) -> None:
    """Let workers take jobs of these queues again."""
    _set_paused(session, names, paused=False)


def _set_paused(session: Session, names: tuple[str, ...], *, paused: bool) -> None:
    for name in names:
        check_name("queue", name)
    with session.open_jobs(creating=True) as app:  # a queue may be paused before its first job
        for name in names:
            (app.sync.pause if paused else app.sync.resume)(name)
        unused = [name for name in names if not app.sync.count(JobFilter(queue=name))] if paused else []
    if session.json:
        print_json({"queues": [{"name": name, "paused": paused} for name in names]})
    else:
        click.echo(f"{', '.join(names)}: {'paused' if paused else 'resumed'}")
    for name in unused:
        print_note(f"no job is kept of queue {name} so far; see `holdfast queue list` if the name should be another")


@queue.command("purge", examples=["holdfast queue purge mail --dry-run", "holdfast queue purge mail"])
@click.argument("name", metavar="NAME")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.pass_obj
def queue_purge(session: Session, *, name: str, dry_run: bool) -> int:
    """Delete the jobs of a queue that have yet to run.

    They are queued, scheduled, waiting, or failed and to be retried. What runs and what has ended stays; `holdfast
    delete --queue NAME` deletes that too.
    """
    change = msgspec.structs.replace(DELETE, legal=NOT_STARTED)
    return run_bulk(session, change, (), Filters(queue=name), everything=False, dry_run=dry_run)
