"""``errors``: failed jobs in groups with the same cause."""

from __future__ import annotations

import click

from holdfast import Holdfast
from holdfast.cli.base import add_command
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_block, print_facts, print_json, print_note, print_table
from holdfast.core.error_groups import check_error_group
from holdfast.core.errors import NotFound
from holdfast.core.redaction import Redaction
from holdfast.views.documents import to_builtins
from holdfast.views.error_groups import ErrorGroupDetails, ErrorGroupDocument, describe_group, describe_groups
from holdfast.views.formatting import Filters, clip_text

_COLUMNS = [
    Column("GROUP", "id"),
    Column("DEAD", "number"),
    Column("RETRYING", "number"),
    Column("LAST SEEN"),
    Column("LATEST JOB", "id", spare=True),
    Column("TASK", spare=True),
    Column("ERROR"),
]


@add_command("errors", examples=["holdfast errors", "holdfast errors 5f0c9a41d2be", "holdfast errors --limit 5 --json"])
@click.argument("group", required=False)
@click.option("--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="Groups to list.")
@click.pass_obj
def list_errors(session: Session, *, group: str | None, limit: int) -> None:
    """List errors with their numbers of failed jobs, or show one.

    Of the dead jobs, and of those that wait for their next attempt, the 10,000 are looked at that failed last.
    Everything in a group is chosen by --error-group: holdfast replay --error-group ID --rate 10/s
    """
    if group is not None:
        check_error_group(group, "group")
    with session.open_jobs() as app:
        redaction = Redaction(app.settings.redacted)
        groups, store = app.sync.find_error_groups(), app.run_blocking(app.open_store())
        if group is None:
            documents = app.run_blocking(describe_groups(store, groups[:limit], redaction))
            _print_groups(session, documents, len(groups))
            return
        found = next((each for each in groups if each.id == group), None)
        if found is None:
            raise NotFound(f"no failed job is in error group {group}")
        _print_group(session, app.run_blocking(describe_group(store, found, redaction)))


def print_error_groups(session: Session, app: Holdfast, filters: Filters, limit: int) -> None:
    """Prints the groups of errors of all failed jobs that match, the latest failure first."""
    where = app.run_blocking(filters.build_filter(app))
    groups, store = app.sync.find_error_groups(where=where), app.run_blocking(app.open_store())
    redaction = Redaction(app.settings.redacted)
    _print_groups(session, app.run_blocking(describe_groups(store, groups[:limit], redaction)), len(groups))


def _print_groups(session: Session, documents: list[ErrorGroupDocument], total: int) -> None:
    if session.json:
        print_json({"groups": to_builtins(documents), "total": total})
        return
    print_table(_COLUMNS, [_row(each) for each in documents], empty="no job has failed")
    if total > len(documents):
        print_note(f"{total - len(documents):,} more groups: --limit shows more")


def _row(document: ErrorGroupDocument) -> list[object]:
    error = clip_text(document.error or "", 80)
    seen = _moment(document.last_seen)
    return [document.id, document.dead, document.retrying, seen, document.latest_job, document.tasks[0], error]


def _moment(instant: str) -> str:
    return instant.partition(".")[0].replace("T", " ") + "Z"


def _print_group(session: Session, document: ErrorGroupDetails) -> None:
    if session.json:
        print_json(to_builtins(document))
        return
    print_facts(
        [
            ("group", document.id),
            ("dead", document.dead),
            ("retrying", document.retrying),
            ("first seen", _moment(document.first_seen)),
            ("last seen", f"{_moment(document.last_seen)} in job {document.latest_job}"),
            ("place", document.place),
            ("tasks", ", ".join(document.tasks)),
            ("queues", ", ".join(document.queues)),
        ]
    )
    print_block(document.traceback or document.error or "the job that failed last is gone")
    print_note(f"replay its dead jobs: holdfast replay --error-group {document.id} --state dead --rate 10/s --dry-run")
