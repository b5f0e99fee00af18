"""``stats``: figures of all jobs, and of the latest events."""

from __future__ import annotations

from collections.abc import Sequence

import click

from holdfast import JobState
from holdfast.cli.base import add_command
from holdfast.cli.context import Session, store_of
from holdfast.cli.output import Column, print_facts, print_heading, print_json, print_note, print_table
from holdfast.views.documents import to_plain
from holdfast.views.formatting import format_span
from holdfast.views.statistics import FiguresDocument, WorkerCounts, figures_document

_SHOWN = [state for state in JobState if state is not JobState.WAITING]


@add_command("stats", examples=["holdfast stats", "holdfast stats --minutes 60 --json"])
@click.option(
    "--minutes", type=click.IntRange(1, 1440), default=5, show_default=True, help="What counts as happened lately."
)
@click.pass_obj
def stats(session: Session, *, minutes: int) -> None:
    """Show jobs by state, worker and attempts, and the latest.

    At a bounded cost: of each state the last 10,000 jobs are looked at, and it says where there are more.
    """
    with session.open_jobs() as app:
        store, figures = store_of(app), app.sync.stats(minutes=minutes)
    document = figures_document(figures, minutes)
    if session.json:
        print_json({"store": store, **to_plain(document)})
        return
    print_facts([("store", store), *_facts(document)])
    print_heading("By worker")
    print_table(_columns("WORKER"), _rows(document.by_worker), empty="no jobs")
    print_heading(f"In the last {minutes} minutes")
    print_facts(_recent_facts(document))
    print_table(_columns("WORKER"), _rows(document.recent.by_worker), empty="nothing happened")
    if document.at_least:
        states = ", ".join(document.at_least)
        print_note(f"at least {document.most:,} jobs are {states}: the last {document.most:,} of them are counted")


def _facts(document: FiguresDocument) -> list[tuple[str, object]]:
    counts = [(name, number) for name, number in document.counts.items() if number]
    attempts = ", ".join(f"{number} had {attempts}" for attempts, number in document.attempts.items())
    return [*counts, ("to be retried", document.scheduled_for_retry or None), ("attempts", attempts or None)]


def _recent_facts(document: FiguresDocument) -> list[tuple[str, object]]:
    recent = document.recent
    took = None
    if recent.mean_seconds is not None and recent.longest_seconds is not None:
        took = f"{format_span(recent.mean_seconds)} on average, {format_span(recent.longest_seconds)} at most"
    return [("ended a second", f"{recent.ended_per_second:.3g}"), ("successes took", took)]


def _columns(first: str) -> list[Column]:
    return [Column(first, "id"), *(Column(state.value.upper(), "number") for state in _SHOWN)]


def _rows(workers: Sequence[WorkerCounts]) -> list[list[object]]:
    return [[each.worker or "none yet", *(each.counts[state.value] or "-" for state in _SHOWN)] for each in workers]
