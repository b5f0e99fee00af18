"""``edit``, ``cancel``, ``replay`` and ``delete``, by ids or filter; and the dead letters, ``dlq``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click
import msgspec

from holdfast import Holdfast, JobState
from holdfast.cli.base import add_command, add_group
from holdfast.cli.context import Session
from holdfast.cli.inspect import print_page, print_story
from holdfast.cli.output import print_json, print_note
from holdfast.cli.submission import check_choice, filter_options, operate_on_all, parse_options, read_payload
from holdfast.core.errors import Conflict
from holdfast.core.lifecycle import REPLAYABLE
from holdfast.core.models import BulkResult, JobFilter
from holdfast.core.redaction import Redaction
from holdfast.views.bulk_operations import (
    CANCEL,
    DELETE,
    BulkOperation,
    PacedCalls,
    batches_left_alone,
    by_state,
    replay_operation,
)
from holdfast.views.documents import job_document, operated_document, to_builtins
from holdfast.views.formatting import Filters, count_noun, format_span

F = TypeVar("F", bound=Callable[..., Any])


def selection_options(function: F) -> F:
    """Adds the ids, ``--all`` and ``--dry-run``."""
    ids = click.argument("ids", metavar="[ID]...", nargs=-1)
    everything = click.option("--all", "everything", is_flag=True, help="Every job there is; needed without a filter.")
    dry_run = click.option("--dry-run", is_flag=True, help="Only count what would be done.")
    return ids(everything(dry_run(function)))


def rate_option(function: F) -> F:
    """Adds ``--rate``."""
    text = 'At most so many become ready: "10/s", "90/m", "500/h"; else all at once.'
    return click.option("--rate", metavar="N/UNIT", help=text)(function)


@add_command(
    "cancel", examples=["holdfast cancel key:welcome-42", "holdfast cancel --queue mail --state queued --dry-run"]
)
@selection_options
@filter_options()
@click.pass_obj
def cancel(session: Session, *, ids: tuple[str, ...], filters: Filters, everything: bool, dry_run: bool) -> int:
    """Cancel jobs that wait, and ask those that run to stop.

    Exits 1 if one of the ids could not be cancelled.
    """
    return run_bulk(session, CANCEL, ids, filters, everything=everything, dry_run=dry_run)


@add_command("fork", examples=["holdfast fork 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77 --from-step charge"])
@click.argument("job_id", metavar="ID")
@click.option("--from-step", metavar="NAME", help="Keep the steps before this one [none].")
@click.option("--payload", metavar="JSON", help="Other arguments; - reads them from stdin.")
@click.option("--id", "new_job_id", metavar="UUID", help="The new job's id; the same id again is harmless.")
@click.pass_obj
def fork_job(
    session: Session, *, job_id: str, from_step: str | None, payload: str | None, new_job_id: str | None
) -> None:
    """Submit a copy of a job that has ended.

    It keeps the steps before --from-step, and takes the others anew; the first job stays as it is. It has neither the
    key, the unique key nor the batch of that job, and so may run beside others like it. Prints its id.
    """
    edited = None if payload is None else read_payload(payload, session.settings().payload_limit)
    with session.open_target() if payload is not None else session.open_jobs() as app:
        handle = app.sync.fork_job(job_id, from_step=from_step, payload=edited, id=new_job_id)
    if session.json:
        print_json({"id": handle.id, "created": handle.created})
    else:
        click.echo(handle.id)


@add_command(
    "replay",
    examples=[
        "holdfast replay --state dead --task email.send --since 1d",
        """holdfast replay key:invoice-7 --payload '{"number": 7}'""",
    ],
)
@selection_options
@filter_options()
@click.option("--force", is_flag=True, help="Also what has succeeded.")
@click.option("--payload", metavar="JSON", help="Edited arguments for one job; - reads them from stdin.")
@click.option(
    "--from-step", metavar="NAME", help="Forget this step of one job and those behind it, and take them again."
)
@rate_option
@click.pass_obj
def replay(
    session: Session,
    *,
    ids: tuple[str, ...],
    filters: Filters,
    everything: bool,
    dry_run: bool,
    force: bool,
    payload: str | None,
    from_step: str | None,
    rate: str | None,
) -> int:
    """Queue dead, failed and cancelled jobs again.

    Each has all its attempts again. At a --rate they become ready one after the other, without any process that sees
    to it; until then they are scheduled, and can be cancelled. Their history stays. Exits 1 if one of the ids could not
    be replayed.
    """
    if from_step is not None and len(ids) != 1:
        raise click.UsageError("--from-step is for one job: name its id")
    return replay_jobs(
        session,
        ids,
        filters,
        everything=everything,
        dry_run=dry_run,
        force=force,
        payload=payload,
        from_step=from_step,
        rate=rate,
    )


def replay_jobs(
    session: Session,
    ids: tuple[str, ...],
    filters: Filters,
    *,
    everything: bool,
    dry_run: bool,
    force: bool = False,
    payload: str | None = None,
    from_step: str | None = None,
    rate: str | None = None,
    states: Collection[JobState] = REPLAYABLE,
) -> int:
    """Runs ``replay``, or ``dlq replay`` with fewer states."""
    if payload is not None and len(ids) != 1:
        raise click.UsageError("--payload goes to one job: name its id")
    edited: dict[str, Any] = (
        {} if payload is None else {"payload": read_payload(payload, session.settings().payload_limit)}
    )
    edited |= {} if from_step is None else {"from_step": from_step}
    change = replay_operation(force=force, states=states, rate=rate, **edited)
    return run_bulk(session, change, ids, filters, everything=everything, dry_run=dry_run)


@add_command(
    "delete", examples=["holdfast delete --state succeeded --until 1d --dry-run", "holdfast delete key:welcome-42"]
)
@selection_options
@filter_options()
@click.pass_obj
def delete(session: Session, *, ids: tuple[str, ...], filters: Filters, everything: bool, dry_run: bool) -> int:
    """Delete jobs that are not running, with their history.

    Their keys are free again. Exits 1 if one of the ids could not be deleted.
    """
    return run_bulk(session, DELETE, ids, filters, everything=everything, dry_run=dry_run)


@add_command(
    "edit",
    examples=[
        "holdfast edit key:invoice-7 --priority 5 --queue urgent",
        "holdfast edit 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77 --delay 10m --expires 1h",
        """holdfast edit key:invoice-7 --payload '{"number": 7}'""",
    ],
)
@click.argument("job_id", metavar="ID")
@click.option("--payload", metavar="JSON", help="All arguments by name; - reads them from stdin.")
@click.option("--priority", type=int, metavar="N", help="From -100 to 100; higher runs first.")
@click.option("--delay", metavar="SPAN", help="Not before this long from now: 90, 5m, 2h; 0: at once.")
@click.option("--run-at", metavar="INSTANT", help="Not before this instant: 2030-01-31T08:00:00Z.")
@click.option("--queue", "-Q", metavar="NAME", help="Move it to this queue.")
@click.option("--tag", "tags", metavar="TEXT", multiple=True, help="A tag; those that are given replace all it has.")
@click.option("--no-tags", is_flag=True, help="Take all its tags off.")
@click.option(
    "--expires", metavar="WHEN", help="Cancelled unless a worker takes it within a span or by an instant; never."
)
@click.pass_obj
def edit(
    session: Session, /, *, job_id: str, payload: str | None, tags: tuple[str, ...], no_tags: bool, **given: Any
) -> None:
    """Change a job that waits.

    That is one that is queued, scheduled, or failed and waiting for its retry. A job that runs or has ended stays as it
    is. What is not given stays, too.
    """
    if tags and no_tags:
        raise click.UsageError("give --tag or --no-tags, not both")
    changes = parse_options({name: value for name, value in given.items() if value is not None})
    if tags or no_tags:
        changes["tags"] = tags
    if payload is not None:
        changes["payload"] = read_payload(payload, session.settings().payload_limit)
    with session.open_target() if payload is not None else session.open_jobs() as app:
        job = app.sync.edit(job_id, **changes)
    if session.json:
        print_json(to_builtins(job_document(Redaction(app.settings.redacted).redact_job(job))))
    else:
        click.echo(f"job {job.id} edited: {job.state}, queue {job.queue}, priority {job.priority}")


def run_bulk(
    session: Session, change: BulkOperation, ids: tuple[str, ...], filters: Filters, *, everything: bool, dry_run: bool
) -> int:
    """Runs an operation and prints its result; returns 1 if an id was refused."""
    check_choice(ids, filters, everything)
    with session.open_target() if "payload" in change.options else session.open_jobs() as app:
        if dry_run:
            return _count(session, app, change, ids, filters)
        operation, pace = getattr(app.sync, change.name), PacedCalls(change)

        def next_slice(where: JobFilter | list[str], **limit: int) -> BulkResult:
            operated: BulkResult = operation(where, **limit, **pace.batch_options())
            pace.pace_batch(len(operated.changed))
            return operated

        if ids:
            operated = next_slice(list(ids), limit=len(ids))
        else:
            if change.name == "replay":  # a job that ends again while the calls go on is not chosen again
                filters = msgspec.structs.replace(filters, not_started_after="0s")
            chosen = by_state(app.run_blocking(filters.build_filter(app)), change.legal)
            operated = operate_on_all(next_slice, chosen, change.done)
            if not operated.changed:
                _note_unused(app, filters.queue)
        return print_operated(session, operated, change, pace)


def _note_unused(app: Holdfast, queue: str | None) -> None:
    if queue is not None and not app.sync.count(JobFilter(queue=queue)):
        print_note(f"no job is kept of queue {queue}; see `holdfast queue list` if the name should be another")


def _count(session: Session, app: Holdfast, change: BulkOperation, ids: tuple[str, ...], filters: Filters) -> int:
    if ids:
        number = sum(change.can_change(app.sync.get(each)) for each in ids)
    else:
        chosen = by_state(app.run_blocking(filters.build_filter(app)), change.legal)
        number = sum(map(app.sync.count, chosen)) - sum(map(app.sync.count, batches_left_alone(change, chosen)))
        if not number:
            _note_unused(app, filters.queue)
    pace = PacedCalls(change)
    pace.pace_batch(number)
    if session.json:
        print_json({"dry_run": True, "count": number, **_lasting(pace)})
    else:
        click.echo(f"{count_noun(number, 'job')} would be {change.done}{_over(pace)}")
    return 0


def _lasting(pace: PacedCalls) -> dict[str, float]:
    return {"seconds": pace.after.total_seconds()} if pace.after else {}


def _over(pace: PacedCalls) -> str:
    return f", one after the other over {format_span(pace.after)}" if pace.after else ""


def print_operated(session: Session, operated: BulkResult, change: BulkOperation, pace: PacedCalls) -> int:
    """Prints the result of an operation; returns 1 if something was refused."""
    if session.json:
        document = {"dry_run": False, "count": len(operated.changed), **_lasting(pace)}
        print_json(document | to_builtins(operated_document(operated)))
    else:
        asked = sum(state is JobState.RUNNING for _, state in operated.changed)
        also = f", {asked} of them run and were asked to stop" if asked else ""
        click.echo(f"{count_noun(len(operated.changed), 'job')} {change.done}{also}{_over(pace)}")
        for job_id, state in operated.refused:
            why = "there is no such job" if state is None else change.describe_refusal(job_id, state)
            click.echo(f"holdfast: job {job_id} was not {change.done}: {why}", err=True)
    return 1 if operated.refused else 0


_DEAD = (JobState.DEAD,)


@add_group("dlq")
def dlq() -> None:
    """List, replay and purge dead letters."""


@dlq.command("list", examples=["holdfast dlq list --reason max_attempts", "holdfast dlq list --since 1d --json"])
@filter_options(states=False)
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="Jobs on this page.")
@click.option("--cursor", metavar="TEXT", help="Continue where an earlier page ended.")
@click.pass_obj
def dlq_list(session: Session, *, filters: Filters, limit: int, cursor: str | None) -> None:
    """List dead letters, newest first."""
    with session.open_jobs() as app:
        print_page(session, app, filters, limit=limit, cursor=cursor, states=_DEAD)


@dlq.command("show", examples=["holdfast dlq show 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"])
@click.argument("job_id", metavar="ID")
@click.pass_obj
def dlq_show(session: Session, *, job_id: str) -> None:
    """Show everything about a dead letter."""
    with session.open_jobs() as app:
        job = app.sync.get(job_id)
        if job.state is not JobState.DEAD:
            raise Conflict(f"job {job.id} is no dead letter: it is {job.state}; see `holdfast show {job.id}`")
        print_story(session, app, job)


@dlq.command(
    "replay", examples=["holdfast dlq replay --task email.send --rate 10/s", "holdfast dlq replay --all --dry-run"]
)
@selection_options
@filter_options(states=False)
@click.option("--payload", metavar="JSON", help="Edited arguments for one job; - reads them from stdin.")
@rate_option
@click.pass_obj
def dlq_replay(
    session: Session,
    *,
    ids: tuple[str, ...],
    filters: Filters,
    everything: bool,
    dry_run: bool,
    payload: str | None,
    rate: str | None,
) -> int:
    """Queue dead letters again, at once or at a rate.

    Each has all its attempts again. At a --rate they become ready one after the other, without any process that sees
    to it; until then they are scheduled, and can be cancelled.
    """
    _check_dead(session, ids, "`holdfast replay` takes failed and cancelled jobs too, and with --force succeeded ones")
    return replay_jobs(
        session, ids, filters, everything=everything, dry_run=dry_run, payload=payload, rate=rate, states=_DEAD
    )


@dlq.command("purge", examples=["holdfast dlq purge --until 30d", "holdfast dlq purge --all --dry-run"])
@selection_options
@filter_options(states=False)
@click.pass_obj
def dlq_purge(session: Session, *, ids: tuple[str, ...], filters: Filters, everything: bool, dry_run: bool) -> int:
    """Delete dead letters for good."""
    advice = "`holdfast delete` takes any job"
    _check_dead(session, ids, advice)
    change = msgspec.structs.replace(DELETE, legal=frozenset(_DEAD), advice=advice, options={"states": _DEAD})
    return run_bulk(session, change, ids, filters, everything=everything, dry_run=dry_run)


def _check_dead(session: Session, ids: tuple[str, ...], advice: str) -> None:
    """Raises Conflict if one of the jobs is no dead letter."""
    with session.open_jobs() as app:
        for job_id in ids:
            if (state := app.sync.get(job_id).state) is not JobState.DEAD:
                raise Conflict(f"job {job_id} is no dead letter: it is {state}; {advice}")
