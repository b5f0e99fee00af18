"""``schedule``: recurring jobs."""

from __future__ import annotations

from typing import Any

import click

from holdfast.app.schedules import upcoming_runs
from holdfast.cli.base import add_group, task_names
from holdfast.cli.context import Session
from holdfast.cli.enqueue import parse_arguments
from holdfast.cli.output import Column, pretty_json, print_block, print_facts, print_heading, print_json, print_table
from holdfast.cli.submission import (
    note_declared,
    parse_options,
    read_payload,
    submitted_document,
    template_options,
    warn_of_unknown_task,
)
from holdfast.core.redaction import Redaction
from holdfast.core.schedule import Overlap, Schedule
from holdfast.core.validation import parse_duration, parse_instant
from holdfast.views.documents import to_builtins
from holdfast.views.formatting import count_noun, format_moment
from holdfast.views.schedules import SHOWN_RUNS, schedule_document, schedule_state

_COLUMNS = [
    Column("NAME", "id"),
    Column("TASK"),
    Column("WHEN"),
    Column("NEXT"),
    Column("LAST", spare=True),
    Column("RUNS", "number", spare=True),
    Column("MISSED", "number", spare=True),
    Column("SKIPPED", "number", spare=True),
    Column("STATE"),
    Column("OWNER", spare=True),
]


@add_group("schedule")
def schedule() -> None:
    """List, add, pause and run schedules: jobs that recur."""


@schedule.command("list", examples=["holdfast schedule list", "holdfast schedule list --json"])
@click.pass_obj
def schedule_list(session: Session) -> None:
    """List every schedule, with its next run in its own time zone."""
    with session.open_jobs() as app:
        schedules = app.schedules.sync.find_all()
        redaction = Redaction(app.settings.redacted)
    if session.json:
        print_json({"schedules": [to_builtins(schedule_document(each, redaction)) for each in schedules]})
    else:
        print_table(_COLUMNS, map(_row, schedules), empty="no schedules: add one with `holdfast schedule add`")


def _row(each: Schedule) -> list[object]:
    upcoming = upcoming_runs(each, 1)
    return [
        each.name,
        each.job.task,
        each.describe_timing(),
        f"{upcoming[0]:%Y-%m-%d %H:%M:%S %Z}" if upcoming else "-",
        format_moment(each.last_us),
        each.runs,
        each.missed or "-",
        each.skipped or "-",
        schedule_state(each),
        each.owner or "operator",
    ]


@schedule.command("show", examples=["holdfast schedule show nightly-report"])
@click.argument("name", metavar="NAME")
@click.pass_obj
def schedule_show(session: Session, *, name: str) -> None:
    """Show a schedule: its times, its job, and its next runs."""
    with session.open_jobs() as app:
        _print_schedule(session, app.schedules.sync.get(name), Redaction(app.settings.redacted))


def _print_schedule(session: Session, each: Schedule, redaction: Redaction) -> None:
    document = schedule_document(each, redaction)
    if session.json:
        print_json(to_builtins(document))
        return
    print_facts(
        [
            ("schedule", each.name),
            ("state", document.state),
            ("when", each.describe_timing()),
            ("task", each.job.task),
            ("queue", each.job.queue),
            ("catch up", each.catch_up),
            ("overlap", each.overlap),
            ("jitter", f"{document.jitter:g} s" if document.jitter else None),
            ("max runs", each.max_runs),
            ("owner", each.owner or "operator"),
            ("runs", each.runs),
            ("missed", each.missed),
            ("skipped", each.skipped),
            ("last run", format_moment(each.last_us)),
            ("last job", each.last_job),
        ]
    )
    print_heading("payload")
    print_block(pretty_json(bytes(document.payload).decode()))
    if document.next_runs:
        print_heading("next runs")
        print_block("\n".join(document.next_runs))


@schedule.command(
    "add",
    examples=[
        "holdfast schedule add nightly report.send '{\"team\": \"all\"}' --cron '0 3 * * *' --zone Europe/Zurich",
        "holdfast schedule add sweep files.clean --every 10m --overlap skip --jitter 30s",
        "holdfast schedule add once report.send --arg team=all --at 2030-01-31T08:00:00Z",
    ],
)
@click.argument("name", metavar="NAME")
@click.argument("task", shell_complete=task_names)
@click.argument("payload", required=False)
@click.option("--arg", "arguments", metavar="NAME=TEXT", multiple=True, help="One argument; NAME:=JSON for no text.")
@click.option("--cron", metavar="EXPR", help="Five fields: minute, hour, day, month, weekday.")
@click.option("--zone", metavar="NAME", help="The IANA time zone of --cron [UTC].")
@click.option("--every", metavar="SPAN", help="An interval: 90, 5m, 2h.")
@click.option("--at", metavar="INSTANT", help="Once: 2030-01-31T08:00:00Z.")
@click.option("--catch-up", type=int, metavar="N", help="Missed runs to make up for, the latest ones [1].")
@click.option("--overlap", metavar="POLICY", help=f"While the job before has not ended: {', '.join(Overlap)}.")
@click.option("--jitter", metavar="SPAN", help="Start each run up to so much later.")
@click.option("--max-runs", type=int, metavar="N", help="End after so many runs.")
@click.option("--replace", is_flag=True, help="Replace a schedule of this name, and keep its count.")
@template_options
@click.pass_obj
def schedule_add(
    session: Session,
    /,
    *,
    name: str,
    task: str,
    payload: str | None,
    arguments: tuple[str, ...],
    options: dict[str, Any],
    replace: bool,
    **timing: Any,
) -> None:
    """Add a schedule that submits jobs of TASK.

    PAYLOAD is a JSON object of the task's arguments by name. Give exactly one of --cron, --every and --at.
    """
    if payload is not None and arguments:
        raise click.UsageError("give a payload or --arg, not both")
    given = {field: value for field, value in timing.items() if value is not None}
    for field in ("every", "jitter"):
        if field in given:
            given[field] = parse_duration(given[field], field)
    if "at" in given:
        given["at"] = parse_instant(given["at"], "at")
    with session.open_target(creating=True) as app:
        values = parse_arguments(arguments) if arguments else read_payload(payload, app.settings.payload_limit)
        job = app.draft_job(task, values, **parse_options(options))
        added = app.schedules.sync.add(name, job, replace_existing=replace, **given)
        warn_of_unknown_task(app, task)
        _print_schedule(session, added, Redaction(app.settings.redacted))


@schedule.command("pause", examples=["holdfast schedule pause nightly"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def schedule_pause(session: Session, *, names: tuple[str, ...]) -> None:
    """Make no jobs of these schedules; the runs in between are left out."""
    _set_paused(session, names, paused=True)


@schedule.command("resume", examples=["holdfast schedule resume nightly"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def schedule_resume(session: Session, *, names: tuple[str, ...]) -> None:
    """Go on with the next run from now."""
    _set_paused(session, names, paused=False)


def _set_paused(session: Session, names: tuple[str, ...], *, paused: bool) -> None:
    with session.open_jobs() as app:
        schedules = app.schedules.sync
        for name in names:
            schedules.get(name)  # all of them or none
        for name in names:
            (schedules.pause if paused else schedules.resume)(name)
    _print_done(session, names, "paused" if paused else "resumed")


def _print_done(session: Session, names: tuple[str, ...], done: str) -> None:
    if session.json:
        print_json({"schedules": list(names), "done": done})
    else:
        click.echo(f"{', '.join(names)}: {done}")


@schedule.command("remove", examples=["holdfast schedule remove nightly"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def schedule_remove(session: Session, *, names: tuple[str, ...]) -> None:
    """Remove schedules; their jobs stay. One that code declares returns when a worker starts."""
    with session.open_jobs() as app:
        schedules = app.schedules.sync
        found = [schedules.get(name) for name in names]  # all of them or none
        for name in names:
            schedules.remove(name)
    note_declared(found)
    _print_done(session, names, "removed")


@schedule.command("run", examples=["holdfast schedule run nightly"])
@click.argument("name", metavar="NAME")
@click.pass_obj
def schedule_run(session: Session, *, name: str) -> None:
    """Submit a job of the schedule now; prints the job's id."""
    with session.open_jobs() as app:
        handle = app.schedules.sync.run(name)
        if session.json:
            print_json(submitted_document(app, handle, app.settings.redacted))
        else:
            click.echo(handle.id)


@schedule.command("next", examples=["holdfast schedule next nightly --count 10"])
@click.argument("name", metavar="NAME")
@click.option("--count", type=click.IntRange(1, 100), default=SHOWN_RUNS, help="Number of runs.")
@click.pass_obj
def schedule_next(session: Session, *, name: str, count: int) -> None:
    """Print the next runs, in the schedule's own time zone."""
    with session.open_jobs() as app:
        runs = [each.isoformat() for each in app.schedules.sync.next_runs(name, count)]
    if session.json:
        print_json({"runs": runs})
    else:
        click.echo("\n".join(runs) if runs else "no run: the schedule is paused, or has ended")


@schedule.command(
    "backfill", examples=["holdfast schedule backfill nightly --from 2025-01-01T00:00:00Z --to 2025-01-31T00:00:00Z"]
)
@click.argument("name", metavar="NAME")
@click.option("--from", "start", metavar="INSTANT", required=True, help="The first instant.")
@click.option("--to", "end", metavar="INSTANT", required=True, help="The instant behind the last.")
@click.option("--dry-run", is_flag=True, help="Submit nothing; say how many jobs would be submitted.")
@click.pass_obj
def schedule_backfill(session: Session, *, name: str, start: str, end: str, dry_run: bool) -> None:
    """Submit the jobs of all runs in a range, at most 10,000.

    A run whose job is still in the store is not repeated.
    """
    with session.open_jobs() as app:
        handles = app.schedules.sync.backfill(name, start, end, dry_run=dry_run)
    created = [handle.id for handle in handles if handle.created]
    if session.json:
        print_json({"created": created, "existing": [handle.id for handle in handles if not handle.created]})
    else:
        existing = len(handles) - len(created)
        done = "would be submitted" if dry_run else "submitted"
        click.echo(f"{count_noun(len(created), 'job')} {done}" + (f", {existing} there already" if existing else ""))
