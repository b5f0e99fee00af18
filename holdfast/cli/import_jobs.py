"""``import``: moves the unstarted jobs of another queue into this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session, note_if_created, open_application
from holdfast.cli.output import Column, print_heading, print_json, print_table
from holdfast.cli.submission import Interrupted
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.validation import check_task_name
from holdfast.views.formatting import count_noun

if TYPE_CHECKING:
    from holdfast.importing import Importer, ImportSummary
    from holdfast.importing.importer import Peer

F = TypeVar("F", bound=Callable[..., Any])

_COUNTS = [Column("TASK"), Column("STATE"), Column("JOBS", "number")]
_ROWS = 20


def parse_names(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[str]:
    """Splits names at their commas, as the command line of Celery has them."""
    return [name for names in given for name in names.split(",") if name]


def import_options(function: F) -> F:
    """Adds the peer's URL and the options that every import has."""
    for decorate in (
        click.option("--dry-run", is_flag=True, help="Only print what would be moved; nothing is changed."),
        click.option("--allow-unknown", is_flag=True, help="Also jobs of tasks that the application does not have."),
        click.option(
            "--map", "pairs", metavar="OLD=NEW", multiple=True, help="The task here for another name there; repeatable."
        ),
        click.option(
            "--queue",
            "-Q",
            "queues",
            callback=parse_names,
            metavar="NAMES",
            multiple=True,
            help="Only these queues: a,b; repeatable.",
        ),
        click.argument("peer", metavar="URL"),
    ):
        function = decorate(function)
    return function


@add_group("import")
def import_group() -> None:
    """Move the unstarted jobs of Celery or RQ into this queue.

    Workers and clients of both may go on meanwhile. An import that was interrupted is run again.
    """


@import_group.command(
    "celery",
    examples=[
        "holdfast import celery redis://localhost:6379/0 --app shop.jobs:app --dry-run",
        "holdfast import celery redis://localhost:6379/0 --app shop.jobs:app --map shop.tasks.send=mail.send",
    ],
)
@import_options
@click.option("--held", is_flag=True, help="Also messages of workers that died. Only if no worker of Celery runs!")
@click.option("--key-prefix", metavar="TEXT", default="", help="global_keyprefix of the broker's transport options.")
@click.option("--separator", metavar="TEXT", help="sep of the broker's transport options.")
@click.option(
    "--zone",
    metavar="ZONE",
    default="UTC",
    show_default=True,
    help="timezone of the application, for instants without an offset.",
)
@click.pass_obj
def import_celery(
    session: Session, /, *, peer: str, held: bool, key_prefix: str, separator: str | None, zone: str, **given: Any
) -> int:
    """Move queued and scheduled messages out of Celery's Redis broker.

    Exits 1 if messages are left in the broker; the output says why.
    """
    from holdfast.core.schedule import find_zone
    from holdfast.importing.celery_broker import SEPARATOR, CeleryBroker

    zone_info = find_zone(zone)

    def make_peer(client: Any) -> Peer:
        return CeleryBroker(
            client,
            queues=given["queues"],
            prefix=key_prefix,
            separator=SEPARATOR if separator is None else separator,
            zone=zone_info,
            take_held=held,
        )

    return run_import(session, "Celery", peer, make_peer, **given)


@import_group.command(
    "rq",
    examples=[
        "holdfast import rq redis://localhost:6379/0 --app shop.jobs:app --dry-run",
        "holdfast import rq redis://localhost:6379/0 --app shop.jobs:app --queue mail --failed",
    ],
)
@import_options
@click.option("--failed", is_flag=True, help="Also failed jobs; they are run here.")
@click.option(
    "--held", is_flag=True, help="Also jobs that a worker has fetched, not started. Only if no worker of RQ runs!"
)
@click.option("--key-prefix", metavar="TEXT", default="rq", show_default=True, help="RQ_KEY_PREFIX of the application.")
@click.pass_obj
def import_rq(session: Session, /, *, peer: str, failed: bool, held: bool, key_prefix: str, **given: Any) -> int:
    """Move queued and scheduled jobs out of RQ.

    Pickles are read without being executed. Exits 1 if jobs other than failed ones are left; the output says why.
    """
    from holdfast.importing.rq_queues import RQQueues

    def make_peer(client: Any) -> Peer:
        return RQQueues(client, queues=given["queues"], prefix=key_prefix, take_failed=failed, take_held=held)

    return run_import(session, "RQ", peer, make_peer, **given)


def run_import(
    session: Session,
    title: str,
    url: str,
    make_peer: Callable[[Any], Peer],
    *,
    queues: Sequence[str],
    pairs: Sequence[str],
    allow_unknown: bool,
    dry_run: bool,
) -> int:
    """Runs an import and prints its summary; returns 1 if jobs are left with the peer."""
    from holdfast.importing import Importer
    from holdfast.importing.importer import open_peer

    names = parse_map(pairs)
    app = session.load() if allow_unknown else session.with_tasks(f"importing jobs of {title}")
    with open_application(app, creating=True), open_peer(url) as client:
        peer = make_peer(client)
        _check_queues(peer, queues, title)
        if not (queues or any(lane.queue for lane in peer.list_lanes()) or peer.read_aside(drops_expired=False)):
            remedy = "correct its database or --key-prefix, or name the queues: --queue"
            raise Invalid("peer", url.rpartition("@")[2], remedy, f"has no queue of {title}")
        importer = Importer(app, peer, names=names, allow_unknown=allow_unknown, dry_run=dry_run)
        with nullcontext() if dry_run else note_if_created(app):
            _run_to_end(importer)
    print_summary(session, title, importer.summary, dry_run=dry_run)
    return 0 if importer.summary.is_complete else 1


def _check_queues(peer: Peer, queues: Sequence[str], title: str) -> None:
    """Raises Invalid for the name of a queue that the peer does not have."""
    known = peer.list_queues()
    for name in queues:
        if known and name not in known:
            raise Invalid("queue", name, f"there are these: {', '.join(known)}", f"is no queue of {title}")


def _run_to_end(importer: Importer) -> None:
    """Runs an import; if it is stopped, the error says how many jobs it has moved."""
    from holdfast.importing.importer import ImportStopped

    try:
        importer.run()
    except KeyboardInterrupt:
        raise Interrupted(str(ImportStopped("interrupted", importer.summary, Interrupted.exit_code))) from None
    except HoldfastError as error:
        raise ImportStopped(error, importer.summary, error.exit_code) from error


def parse_map(pairs: Sequence[str]) -> dict[str, str]:
    """Parses ``OLD=NEW``; the last equals sign divides, since names of tasks here have none."""
    names = {}
    for pair in pairs:
        old, equals, new = pair.rpartition("=")
        if not (old and equals):
            raise Invalid("map", pair, "give the name there and the task here: --map shop.tasks.send=mail.send")
        names[old] = check_task_name(new)
    return names


def print_summary(session: Session, title: str, summary: ImportSummary, *, dry_run: bool) -> None:
    """Prints what was moved and what is left, unknown tasks first."""
    moved, left = sorted(summary.moved.items()), summary.list_left()
    if session.json:
        document = {
            "dry_run": dry_run,
            "moved": [{"task": task, "state": state, "count": count} for (task, state), count in moved],
            "already_moved": summary.already_moved,
            "left": [
                {"task": task, "state": state, "reason": reason, "count": count}
                for (task, state, reason), count in left
            ],
        }
        print_json(document)
        return
    if left:
        print_heading(f"Left in {title}")
        rows = [(task, state, count, reason) for (task, state, reason), count in left]
        print_table([*_COUNTS, Column("REASON", "text")], rows[:_ROWS])
        if len(rows) > _ROWS:
            click.echo(f"… and {count_noun(len(rows) - _ROWS, 'line')} more; --json has all")
    if moved:
        print_heading("Would be moved" if dry_run else "Moved")
        print_table(_COUNTS, [(task, state, count) for (task, state), count in moved])
    verb = "would be moved" if dry_run else "moved"
    before = f", {summary.already_moved} became one with a job that was there" if summary.already_moved else ""
    total = sum(summary.moved.values())
    click.echo(f"\n{count_noun(total, 'job')} {verb}{before}, {sum(summary.left.values())} left in {title}")
