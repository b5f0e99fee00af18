"""``dlq``: the dead letters."""

from __future__ import annotations

import click

from holdfast import JobState
from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.filter_options import filter_options
from holdfast.cli.inspect import print_page, print_story
from holdfast.cli.operations import carry_out, rate_option, replay_jobs, selection_options
from holdfast.core.errors import Conflict
from holdfast.views.bulk_operations import BulkOperation
from holdfast.views.filters import Filters

_DEAD = (JobState.DEAD,)


@add_group("dlq")
def dlq() -> None:
    """List, replay and purge dead letters."""


@dlq.command("list", examples=["holdfast dlq list --reason budget", "holdfast dlq list --since 1d --json"])
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

    Each has a new budget of attempts. At a --rate they become ready one after the other, without any process that sees
    to it; until then they are scheduled, and can be cancelled.
    """
    if payload is not None and len(ids) != 1:
        raise click.UsageError("--payload goes to one job: name its id")
    return replay_jobs(
        session,
        ids,
        filters,
        everything=everything,
        dry_run=dry_run,
        payload=payload,
        rate=rate,
        states=frozenset(_DEAD),
    )


@dlq.command("purge", examples=["holdfast dlq purge --until 30d", "holdfast dlq purge --all --dry-run"])
@selection_options
@filter_options(states=False)
@click.pass_obj
def dlq_purge(session: Session, *, ids: tuple[str, ...], filters: Filters, everything: bool, dry_run: bool) -> int:
    """Delete dead letters for good."""
    change = BulkOperation(
        name="delete", done="deleted", legal=frozenset(_DEAD), advice="it is running: cancel it first"
    )
    with session.open_jobs() as app:
        for job_id in ids:
            if (state := app.sync.get(job_id).state) is not JobState.DEAD:
                raise Conflict(f"job {job_id} is no dead letter: it is {state}; `holdfast delete` takes any job")
    return carry_out(session, change, ids, filters, everything=everything, dry_run=dry_run)
