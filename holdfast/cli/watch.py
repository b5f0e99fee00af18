"""``stats``, and ``watch``: a live view of everything, or of one job."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast import Holdfast, JobState
from holdfast.cli.base import add_command
from holdfast.cli.context import Session, store_of
from holdfast.cli.inspect import JOB_COLUMNS, WORKER_COLUMNS, attempts_of, job_rows, queue_table, worker_rows
from holdfast.cli.output import (
    Column,
    make_console,
    make_table,
    print_facts,
    print_heading,
    print_json,
    print_json_line,
    print_note,
    print_table,
)
from holdfast.cli.submission import server_time_us
from holdfast.cli.watch_tag import UNFINISHED, TagWatcher
from holdfast.core.models import TERMINAL, Job
from holdfast.core.redaction import Redaction
from holdfast.core.validation import check_tag, parse_duration
from holdfast.core.workers import WorkerInfo
from holdfast.views.documents import job_document, status_document, to_builtins
from holdfast.views.formatting import clip_text, count_noun, format_decimal, format_moment, format_span, safe_text
from holdfast.views.statistics import FiguresDocument, HistoryEntry, WorkerCounts, figures_document, history_document

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 40  # characters of the longest bar


@add_command(
    "watch",
    examples=["holdfast watch", "holdfast watch key:nightly-report", "holdfast watch --tag run-7 --interval 5s"],
)
@click.argument("job_id", metavar="[ID]", required=False)
@click.option("--tag", metavar="TEXT", help="Watch the jobs that carry this tag until all have ended.")
@click.option("--interval", metavar="SPAN", default="1s", show_default=True, help="How often to look.")
@click.option("--for", "lasting", metavar="SPAN", help="Stop after this long.")
@click.pass_obj
def watch(session: Session, *, job_id: str | None, tag: str | None, interval: str, lasting: str | None) -> int:
    """Watch queues and workers, or a job or a tag until its end. Ctrl-C stops.

    Without a terminal it prints a line for each change. Watching a job, or a tag, exits 1 where one did not succeed,
    75 where --for ended first, and 130 after Ctrl-C.
    """
    if tag is not None and job_id is not None:
        raise click.UsageError("watch one job by its ID, or all jobs of a --tag")
    pause = max(0.02, parse_duration(interval, "interval").total_seconds())
    until = None if lasting is None else time.monotonic() + parse_duration(lasting, "for").total_seconds()
    with session.open_jobs() as app:
        watcher = _Watcher(session, app, pause, until)
        try:
            if tag is not None:
                return TagWatcher(session, app, check_tag(tag), pause, until).watch_tag()
            return watcher.watch_all() if job_id is None else watcher.watch_job(app.sync.get(job_id))
        except KeyboardInterrupt:
            if tag is None and job_id is None:
                return 0
            raise


class _Watcher:
    """Loop of ``watch``: reads a snapshot, shows changes, waits; ends with the job or the time."""

    def __init__(self, session: Session, app: Holdfast, pause: float, until: float | None) -> None:
        self._session = session
        self._app = app
        self._store = store_of(app)
        self._pause = pause
        self._until = until
        self._shown: object = None
        self._redaction = Redaction(app.settings.redacted)

    def watch_all(self) -> int:
        with self._display() as show:
            while True:
                queues, workers = self._app.sync.queues(), self._app.sync.workers()
                document = to_builtins(status_document(self._store, queues, workers))
                show(_steady(document), document, self._summary)
                if not self._wait([]):
                    return 0

    def watch_job(self, job: Job) -> int:
        with self._display() as show:
            while True:
                job = self._redaction.redact_job(job)
                document = to_builtins(job_document(job))
                steady = {name: value for name, value in document.items() if name != "lease_until"}
                show(steady, document, functools.partial(_job_line, job))
                if job.state in TERMINAL:
                    return 0 if job.state is JobState.SUCCEEDED else 1
                if not self._wait([f"job:{job.id}"]):
                    return UNFINISHED
                job = self._app.sync.get(job.id)

    @contextmanager
    def _display(self) -> Iterator[Callable[[object, dict[str, Any], Callable[[dict[str, Any]], str]], None]]:
        """Yields a function that shows a snapshot: redrawn in place on a terminal, else one line per change."""

        def print_line(key: object, document: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
            if key != self._shown:
                self._shown = key
                if self._session.json:
                    print_json_line(document)
                else:
                    click.echo(text(document))
                    sys.stdout.flush()

        if self._session.json or not sys.stdout.isatty():
            yield print_line
            return
        from rich.live import Live

        with Live(console=make_console(), auto_refresh=False) as live:
            yield lambda key, document, text: live.update(self._drawn(document), refresh=True)

    def _drawn(self, document: dict[str, Any]) -> RenderableType:
        from rich.console import Group

        if "queues" not in document:
            return make_table(JOB_COLUMNS, job_rows([self._redaction.redact_job(self._app.sync.get(document["id"]))]))
        workers: list[WorkerInfo] = self._app.sync.workers()
        return Group(
            safe_text(self._store),
            make_table(*queue_table(self._app.sync.queues())),
            make_table(WORKER_COLUMNS, worker_rows(workers, server_time_us(self._app))),
            "Ctrl-C stops watching",
        )

    def _summary(self, document: dict[str, Any]) -> str:
        totals = ", ".join(f"{number} {state}" for state, number in document["totals"].items() if number)
        working = sum(worker["state"] == "working" for worker in document["workers"])
        now = format_moment(server_time_us(self._app))
        return f"{now}  {totals or 'no jobs'}; {count_noun(working, 'worker')} at work"

    def _wait(self, topics: list[str]) -> bool:
        """Waits until the next snapshot; returns False at the end."""
        left = self._pause if self._until is None else min(self._pause, self._until - time.monotonic())
        if left <= 0:
            return False
        if topics:
            self._app.run_blocking(_hear(self._app, topics, timedelta(seconds=left)))
        else:
            time.sleep(left)
        return True


async def _hear(app: Holdfast, topics: list[str], most: timedelta) -> None:
    await (await app.open_store()).queueing.wait(topics, timeout=most.total_seconds())


def _steady(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the part of a status that changes only with events: no ages, no heartbeats."""
    moving = ("seen_at", "oldest_ready_seconds", "ended_per_second")
    parts = [*status["queues"], *status["workers"]]
    return [{name: value for name, value in part.items() if name not in moving} for part in parts]


def _job_line(job: Job, _document: dict[str, Any]) -> str:
    when = max(us for us in (job.created_at_us, job.started_at_us, job.ended_at_us) if us is not None)
    error = f"  {clip_text(job.error)}" if job.error else ""
    return safe_text(f"{format_moment(when)}  {job.id}  {job.task}  {job.state}  attempt {attempts_of(job)}{error}")


@add_command("stats", examples=["holdfast stats", "holdfast stats --minutes 60 --json", "holdfast stats --since 24h"])
@click.option(
    "--minutes", type=click.IntRange(1, 1440), default=5, show_default=True, help="What counts as happened lately."
)
@click.option("--since", metavar="SPAN", help="Show instead how many jobs ended, by minute or hour: 1h, up to 31d.")
@click.pass_obj
def stats(session: Session, *, minutes: int, since: str | None) -> None:
    """Show jobs by state, worker and attempts, and the latest.

    At a bounded cost: of each state the last 10,000 jobs are looked at, and it says where there are more.
    """
    if since is not None:
        _print_history(session, since)
        return
    with session.open_jobs() as app:
        store, figures = store_of(app), app.sync.stats(minutes=minutes)
    document = figures_document(figures, minutes)
    if session.json:
        print_json({"store": store, **to_builtins(document)})
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


def _print_history(session: Session, since: str) -> None:
    with session.open_jobs() as app:
        document = history_document(app.sync.read_history(since))
    if session.json:
        print_json(to_builtins(document))
        return
    most = max((point.succeeded + point.dead + point.cancelled for point in document.points), default=0)
    columns = [
        Column("FROM", "id"),
        *(Column(name, "number") for name in ("SUCCEEDED", "DEAD", "CANCELLED", "MEAN", "LONGEST")),
        Column("", spare=True),
    ]
    print_table(columns, [_history_row(point, most) for point in document.points], empty="nothing ended")


def _history_row(point: HistoryEntry, most: int) -> list[object]:
    ended = point.succeeded + point.dead + point.cancelled
    bar = "█" * max(round(ended * _BAR / max(most, 1)), 1 if ended else 0)
    lengths = ["-" if each is None else format_span(each) for each in (point.mean_seconds, point.longest_seconds)]
    return [
        point.start.removesuffix(":00.000000Z").replace("T", " "),
        point.succeeded,
        point.dead,
        point.cancelled,
        *lengths,
        bar,
    ]


def _facts(document: FiguresDocument) -> list[tuple[str, object]]:
    counts = [(name, number) for name, number in document.counts.items() if number]
    attempts = ", ".join(f"{number} had {attempts}" for attempts, number in document.attempts.items())
    return [*counts, ("to be retried", document.scheduled_for_retry or None), ("attempts", attempts or None)]


def _recent_facts(document: FiguresDocument) -> list[tuple[str, object]]:
    recent = document.recent
    took = None
    if recent.mean_seconds is not None and recent.longest_seconds is not None:
        took = f"{format_span(recent.mean_seconds)} on average, {format_span(recent.longest_seconds)} at most"
    return [("ended a second", format_decimal(recent.ended_per_second)), ("successes took", took)]


def _columns(first: str) -> list[Column]:
    return [
        Column(first, "id"),
        *(Column(state.value.upper(), "number", spare=state is JobState.WAITING) for state in JobState),
    ]


def _rows(workers: Sequence[WorkerCounts]) -> list[list[object]]:
    return [[each.worker or "none yet", *(each.counts[state.value] or "-" for state in JobState)] for each in workers]
