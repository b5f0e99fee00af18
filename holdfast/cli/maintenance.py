"""``backup``, ``migrate`` and ``doctor``: maintenance of a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click
from msgspec.structs import replace

from holdfast import Holdfast, Settings
from holdfast.app.limits import merge_limits
from holdfast.cli.base import add_command
from holdfast.cli.context import Session, missing_database, open_application, store_of
from holdfast.cli.output import Column, name_program, print_json, print_table
from holdfast.cli.submission import server_time_us
from holdfast.core.errors import Busy, ConfigError, TooBroad
from holdfast.core.lifecycle import DEFERRALS
from holdfast.core.limits import Limit
from holdfast.core.models import Finding, JobFilter, JobState, to_microseconds
from holdfast.core.resources import MAX_MEMORY, ResourceLimits
from holdfast.core.validation import parse_instant
from holdfast.tasks.command_policy import STRICT, largest_limits
from holdfast.views.documents import finding_document
from holdfast.views.findings import about_alerts, about_dead, about_faults, about_limits, about_pauses, about_workers
from holdfast.views.formatting import count_noun, format_span, format_timestamp, safe_text
from holdfast.views.limits import describe_scope, describe_values

_SKEW = 2.0  # tolerated difference of two clocks in seconds
_RELEASED = to_microseconds(parse_instant("2026-01-01T00:00:00Z"))
"""Earliest instant of a correct clock: the first release."""


@add_command("backup", examples=["holdfast backup backups/holdfast-monday.db"])
@click.argument("file", metavar="FILE")
@click.pass_obj
def backup(session: Session, *, file: str) -> None:
    """Copy the live store to a new file. The copy is consistent, and work goes on meanwhile."""
    with session.open_jobs() as app:
        app.sync.backup(file)
    size = Path(file).stat().st_size
    if session.json:
        print_json({"file": file, "bytes": size})
    else:
        click.echo(safe_text(f"{file}: {size} bytes"))


@add_command("migrate", examples=["holdfast migrate", "holdfast migrate --sql 0..1 > migrations/queue.sql"])
@click.option("--sql", metavar="FROM..TO", help="Print the SQL from one schema number to another; change nothing.")
@click.pass_obj
def migrate(session: Session, *, sql: str | None) -> None:
    """Bring the store's schema up to date. Any other command does so too when it opens an older store.

    Who has a migration tool of their own lets it run what --sql prints, in one transaction; 0 is a store not there yet.
    """
    with session.open_jobs(creating=True) as app:
        if sql is not None:
            print_sql(session, app.new_store().migration_sql(sql))
            return
        applied = app.sync.migrate()
        url = store_of(app)
    if session.json:
        print_json({"url": url, "applied": applied})
    else:
        click.echo(safe_text(f"{url}: {', '.join(applied) or 'the schema is up to date'}"))


def print_sql(session: Session, text: str) -> None:
    """Prints the statements as text, or as a JSON string."""
    if session.json:
        print_json({"sql": text})
    else:
        click.echo(text, nl=False)


@add_command("doctor", examples=["holdfast doctor", "holdfast doctor --json", "holdfast doctor --repair"])
@click.option("--repair", is_flag=True, help="First put right what can be put right without losing a job.")
@click.pass_obj
def doctor(session: Session, *, repair: bool) -> int:
    """Check store, clock, settings, application and workers.

    Each finding has a remedy. Exits 1 if something is an error.
    """
    found = _findings(session, repair=repair)
    findings = [replace(each, remedy=name_program(each.remedy)) for each in found]
    worst = 1 if any(finding.level == "error" for finding in findings) else 0
    if session.json:
        print_json({"healthy": not worst, "findings": [finding_document(each) for each in findings]})
        return worst
    columns = [Column("CHECK", "id"), Column("LEVEL"), Column("FINDING", "text"), Column("REMEDY", "text")]
    print_table(columns, [[each.name, each.level, each.text, each.remedy] for each in findings])
    return worst


def _findings(session: Session, *, repair: bool) -> Iterator[Finding]:
    try:
        settings = session.settings()
    except ConfigError as error:
        yield Finding("settings", "error", str(error), "mend it there; nothing else can be looked at before")
        return
    yield from _about_settings(settings)
    yield from about_isolation(settings)
    is_loaded = settings.app is not None
    try:
        app = session.load()
        if is_loaded:
            text = f"{settings.app} has {count_noun(len(app.registry), 'task')}"
            remedy = "" if app.registry or app.settings.commands != "off" else "import the modules of its tasks in it"
            yield Finding("application", "warning" if remedy else "ok", text, remedy)
    except ConfigError as error:
        yield Finding("application", "error", str(error).split("\n", 1)[0], "mend the application's module")
        app, is_loaded = Holdfast(settings=settings), False
    absent = missing_database(app)
    if absent is not None:
        yield Finding("database", "error", *absent)
        return
    with open_application(app):
        if repair:
            yield from app.sync.repair() or [Finding("repair", "ok", "there was nothing to put right")]
        yield from app.sync.doctor()
        yield from about_faults(app.faults.sync.read(), is_allowed=app.settings.allow_faults)
        yield from _about_clock(app)
        yield from about_alerts(app.alerts.sync.find_active())
        queues, workers = app.sync.queues(), app.sync.workers()
        yield from about_workers(queues, workers)
        yield from about_dead(queues)
        yield from _about_deferrals(app)
        tasks = frozenset(app.registry.task_names()) if is_loaded else frozenset[str]()
        limits = app.limits.sync.find_all()
        yield from about_limits(limits, queues, workers, tasks)
        yield from about_pauses(app.limits.sync.find_paused(), server_time_us(app))
        yield from about_declared_limits(app, limits, is_complete=is_loaded)


def _about_deferrals(app: Holdfast) -> Iterator[Finding]:
    """Yields a finding for each task with jobs that no worker could run."""
    for reason in sorted(DEFERRALS):
        with suppress(TooBroad, Busy):
            deferred = app.sync.find(JobFilter(states=(JobState.SCHEDULED,), reason=reason), limit=100).jobs
            for task, job_id in {job.task: job.id for job in deferred}.items():
                text = f"workers cannot run jobs of task {task}: {reason}"
                yield Finding("jobs", "warning", text, f"holdfast why {job_id}")


def _about_settings(settings: Settings) -> Iterator[Finding]:
    there = "" if settings.stamp else " (there is none; see `holdfast config list`)"
    yield Finding("settings", "ok", f"{settings.file}{there}")
    for warning in settings.warnings:
        yield Finding("settings", "warning", warning, "correct its name or remove it")


def about_isolation(settings: Settings) -> Iterator[Finding]:
    """Yields findings about the resource limits of this host, and about the sandbox of commands."""
    from holdfast.worker.executors.resource_limits import unsupported_limits
    from holdfast.worker.sandbox import NAMESPACES, SANDBOX_REMEDY, describe_host, landlock_version

    limits = largest_limits(settings)
    unsupported = unsupported_limits(limits.restricted_to(ResourceLimits(memory=MAX_MEMORY)))
    if unsupported is None:
        text = "memory, processes and CPU time by a watcher; open files and file size by the kernel"
        yield Finding("resource limits", "ok", text)
    else:
        level = "ok" if limits.memory is None and limits.processes is None else "error"
        text = "CPU time, open files and file size by the kernel; memory and processes cannot be limited"
        yield Finding("resource limits", level, text, "" if level == "ok" else "run the workers on Linux")
    held = describe_host()
    text = "; ".join(f"{name}: {'holds' if cause is None else cause}" for name, cause in held.items())
    if held[NAMESPACES.name] is None and not landlock_version():
        text += "; without landlock a sandboxed command can write into named pipes outside its directory"
    if None in held.values():
        yield Finding("sandbox", "ok", text)
    else:
        refused = settings.sandbox == STRICT
        remedy = f"{'command jobs' if refused else 'command jobs that ask for it'} are refused here; {SANDBOX_REMEDY}"
        level = "error" if refused else "ok" if settings.commands == "off" else "warning"
        yield Finding("sandbox", level, text, remedy)


def _about_clock(app: Holdfast) -> Iterator[Finding]:
    now = server_time_us(app)
    apart = abs(now / 1e6 - time.time())
    newest = app.sync.find(limit=1).jobs
    if now < _RELEASED:
        yield Finding(
            "clock", "error", f"the store's clock shows {format_timestamp(now)}", "set the clock; use a time service"
        )
    elif newest and newest[0].created_at_us > now + _SKEW * 1e6:
        ahead = format_span((newest[0].created_at_us - now) / 1e6)
        remedy = "find out who set the clock back; scheduled jobs run that much later"
        yield Finding("clock", "warning", f"the newest job was submitted {ahead} in the future", remedy)
    elif apart > _SKEW:
        remedy = "nothing breaks (the store's clock counts); use a time service on both"
        yield Finding("clock", "warning", f"this host and the store are {format_span(apart)} apart", remedy)
    else:
        yield Finding("clock", "ok", f"{format_timestamp(now)}")


def about_declared_limits(app: Holdfast, limits: Sequence[Limit], *, is_complete: bool) -> Iterator[Finding]:
    """Yields findings about limits of code and settings that the store does not have, or has otherwise.

    ``is_complete``: the application's code was loaded, so what it does not declare is declared no more.
    """
    declared = merge_limits(app.declared_limits, app.settings)
    for problem in app.limits.declared_problems(declared):
        yield Finding("limits", "error", problem, "correct it: no worker with it starts")
    stored = {limit.name: limit for limit in limits}
    owner = app.settings.schedule_owner or "code"
    for name in sorted(stored.keys() - declared.keys()) if is_complete else ():
        if stored[name].owner == owner:
            text = f"limit {name} is in force, and this application declares it no more"
            yield Finding(
                "limits", "warning", text, f"if no other application declares it: holdfast limit remove {name}"
            )
    for name, draft in declared.items():
        limit = stored.get(name)
        if limit is None:
            text, remedy = f"limit {name} is declared, and not in the store", "a worker writes it when it starts"
        elif limit.owner is None:
            text = f"limit {name} is declared, and has no effect: an operator made one of its name"
            remedy = f"holdfast limit remove {name}, and restart a worker; or give the declared one another name"
        elif (limit.queue, limit.task, limit.by, limit.declared or limit.values) != (
            draft.queue,
            draft.task,
            draft.by,
            draft.values,
        ):
            text = f"limit {name} is declared otherwise here: {describe_scope(draft)}, {describe_values(draft.values)}"
            remedy = "a worker that starts with this code and these settings writes it"
        else:
            continue
        yield Finding("limits", "warning", text, remedy)
