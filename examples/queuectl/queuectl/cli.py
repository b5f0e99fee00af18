"""The command ``queuectl``: each command parses, asks the application, prints."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

from holdfast import Conflict, Holdfast, HoldfastError, Invalid, Job, JobFilter, NotFound
from queuectl.config import OPTIONS, Place, option
from queuectl.models import STATES, Submission, counts, document, draft_all, parse, shown_id

COLUMNS = ("id", "state", "attempts", "max_retries", "priority", "next_retry_at", "locked_by", "command", "error")
_PAGE = 500
_LOOK = 0.1  # seconds between looks while waiting for workers to end


class Program(click.Group):
    """The root: errors end in one line and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HoldfastError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=Program)
@click.option("--db", type=click.Path(path_type=Path, dir_okay=False), help="The database [queuectl.db; QUEUECTL_DB].")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The settings [queuectl.json; QUEUECTL_CONFIG].",
)
@click.pass_context
def main(context: click.Context, db: Path | None, config_file: Path | None) -> None:
    """A job queue for shell commands: they run in the background, are retried, and none is lost."""
    place = context.obj or Place.here()
    context.obj = Place(
        place.database if db is None else db.absolute(), place.config if config_file is None else config_file.absolute()
    )


@contextmanager
def _opened(place: Place) -> Iterator[Holdfast]:
    from queuectl.app import open_app

    app = open_app(place)
    try:
        yield app
    finally:
        app.sync.close()


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@main.command()
@click.argument("job", metavar="JSON")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON.")
@click.pass_obj
def enqueue(place: Place, job: str, as_json: bool) -> None:
    """Submit a job: '{"id": "job1", "command": "sleep 1", "max_retries": 3}'.

    Beside these it may have priority, run_at, timeout, user and depends_on (ids of jobs that must complete first);
    only command must be there. A dash reads many jobs from stdin, one a line, and stores them in one go.
    """
    if job == "-":
        _enqueue_lines(place, sys.stdin.buffer)
        return
    submission = parse(job)
    with _opened(place) as app:
        [job] = draft_all(app, [submission])
        handle = app.sync.submit(job)
        if not handle.created:
            raise Conflict(f"job {submission.id} is there already; give the new one an id of its own")
        stored = _document(app, app.sync.get(handle.id))
    click.echo(json.dumps(stored) if as_json else stored["id"])


def _enqueue_lines(place: Place, lines: BinaryIO) -> None:
    submissions = [parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    with _opened(place) as app:
        handles = app.sync.enqueue_many(draft_all(app, submissions))
    repeated = [each for each, handle in zip(submissions, handles, strict=True) if not handle.created]
    click.echo(f"{len(handles) - len(repeated)} jobs enqueued")
    if repeated:
        raise Conflict(f"{len(repeated)} jobs were there already: {_named(repeated)}")


def _named(submissions: Sequence[Submission]) -> str:
    names = [str(each.id) for each in submissions]
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def status(place: Place, as_json: bool) -> None:
    """Show how many jobs are in each state, and the workers."""
    with _opened(place) as app:
        counted = counts(queue.states for queue in app.sync.queues(most=1_000_000))
        workers = [_worker(each.heartbeat) for each in app.sync.workers() if each.alive]
    if as_json:
        click.echo(json.dumps({"jobs": counted, "total": sum(counted.values()), "workers": workers}))
        return
    for state, count in counted.items():
        click.echo(f"{state:<12}{count:>8}")
    click.echo(f"{'workers':<12}{len(workers):>8}")
    for worker in workers:
        click.echo(f"  {worker['id']}  pid {worker['pid']}  {'at work' if worker['running'] else 'idle'}")


def _worker(heartbeat: Any) -> dict[str, Any]:
    return {"id": heartbeat.worker, "host": heartbeat.host, "pid": heartbeat.pid, "running": heartbeat.running}


@main.command("list")
@click.option("--state", type=click.Choice(tuple(STATES)), help="Only jobs in this state.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many, newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_jobs(place: Place, state: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    _print_jobs(place, () if state is None else STATES[state], limit, as_json)


@main.command()
@click.argument("job_id", metavar="ID")
@click.pass_obj
def show(place: Place, job_id: str) -> None:
    """Print all there is to know of a job, as JSON."""
    with _opened(place) as app:
        job = _job(app, job_id)
        failures = [
            {"attempt": each.attempt, "reason": each.reason, "error": each.error} for each in app.sync.attempts(job.id)
        ]
        shown = _document(app, job)
    click.echo(json.dumps({**shown, "failures": failures}, indent=2))


def _job(app: Holdfast, job_id: str) -> Job:
    """Returns the job of that id, or of that id of Holdfast, which log lines and errors have."""
    for reference in (f"key:{job_id}", job_id):
        with suppress(NotFound, Invalid):
            job: Job = app.sync.get(reference)
            return job
    raise NotFound(f"there is no job {job_id}")


def _document(app: Holdfast, job: Job) -> dict[str, Any]:
    dependencies = app.sync.read_waits(job.id).dependencies
    return document(job, [_id_of(app, each.job_id) for each in dependencies if not each.is_child])


def _id_of(app: Holdfast, job_id: str) -> str:
    try:
        return shown_id(app.sync.get(job_id))
    except NotFound:
        return job_id


def _print_jobs(place: Place, states: tuple[Any, ...], limit: int, as_json: bool) -> None:
    with _opened(place) as app:
        jobs = _found(app, JobFilter(states=states), limit)
        documents = [_document(app, job) if as_json else document(job) for job in jobs]
    if as_json:
        click.echo(json.dumps(documents))
    else:
        _print_table([[each[column] for column in COLUMNS] for each in documents])


def _found(app: Holdfast, where: JobFilter, limit: int) -> Iterator[Job]:
    cursor, left = None, limit
    while left:
        page = app.sync.find(where, limit=min(left, _PAGE), cursor=cursor)
        yield from page.jobs
        left -= len(page.jobs)
        cursor = page.cursor
        if cursor is None:
            return


def _print_table(rows: Sequence[Sequence[object]]) -> None:
    texts = [[_cell(cell) for cell in row] for row in [[name.upper() for name in COLUMNS], *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    """One line, nothing in it that a terminal would obey."""
    text = "-" if value is None else str(value)
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return shown if len(shown) <= 60 else shown[:59] + "…"


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────
@main.group()
def worker() -> None:
    """Start and stop worker processes."""


@worker.command()
@click.option("--count", type=click.IntRange(1, 256), default=1, show_default=True, help="How many worker processes.")
@click.pass_obj
def start(place: Place, count: int) -> None:
    """Run jobs until stopped: SIGTERM, Ctrl-C or `queuectl worker stop` let the jobs at hand be finished."""
    from holdfast.telemetry.logs import configure_logs
    from holdfast.worker.supervisor import Supervisor
    from queuectl.app import open_app

    app = open_app(place)
    app.sync.migrate()  # the first command makes the database
    app.sync.close()
    command = [sys.executable, "-m", "queuectl", "--db", str(place.database), "--config", str(place.config)]
    finish_logs = configure_logs(app.settings, app.events)
    try:
        supervisor = Supervisor([*command, "worker", "run"], count, app.settings, app.events)
        code = asyncio.run(supervisor.run())
    finally:
        finish_logs()
    sys.exit(code)


@worker.command(hidden=True)
@click.pass_obj
def run(place: Place) -> None:
    """Be one worker process."""
    from holdfast.telemetry.logs import configure_logs
    from holdfast.worker import run_worker
    from queuectl.app import open_app

    app = open_app(place)
    finish_logs = configure_logs(app.settings, app.events)
    try:
        code = run_worker(app, app.settings)
    finally:
        finish_logs()
    sys.exit(code)


@worker.command()
@click.option("--wait", is_flag=True, help="Return when they have ended.")
@click.pass_obj
def stop(place: Place, wait: bool) -> None:
    """Tell every worker to finish its job and end."""
    with _opened(place) as app:
        commanded = app.sync.stop_workers()
        while wait and any(each.alive and each.heartbeat.worker in commanded for each in app.sync.workers()):
            time.sleep(_LOOK)
    click.echo(f"{len(commanded)} workers asked to stop")


# ── dashboard ─────────────────────────────────────────────────────────────────────────────────────────────────────
@main.command()
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8000, show_default=True, help="Its port; 0: a free one."
)
@click.pass_obj
def dashboard(place: Place, port: int) -> None:
    """Serve the dashboard on this host until stopped: jobs, workers, history, alerts.

    It asks for no key, so every user of this host can use it, and what it can do.
    """
    from holdfast.core.events import ApiStarted, Event
    from holdfast.telemetry.logs import configure_logs
    from holdfast.web.server import serve
    from queuectl.app import open_app

    def tell(started: Event) -> None:
        assert isinstance(started, ApiStarted)
        click.echo(f"dashboard: {started.address}/console")

    app = open_app(place)
    app.settings = app.settings.replace_values(api_host="127.0.0.1", api_port=port)
    app.events.subscribe(tell, ApiStarted)
    finish_logs = configure_logs(app.settings, app.events)
    try:
        code = serve(app, app.settings, local_console=True)
    finally:
        finish_logs()
    sys.exit(code)


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────────────────────
@main.group()
def dlq() -> None:
    """Look at the dead letter queue, and retry from it."""


@dlq.command("list")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many, newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def dlq_list(place: Place, limit: int, as_json: bool) -> None:
    """List the jobs whose retries are used up."""
    _print_jobs(place, STATES["dead"], limit, as_json)


@dlq.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.pass_obj
def retry(place: Place, job_ids: tuple[str, ...]) -> None:
    """Run dead jobs again, with all their retries; jobs that were cancelled because of them wait for them again."""
    with _opened(place) as app:
        jobs = [_job(app, each) for each in job_ids]
        for job in jobs:
            if job.state not in STATES["dead"]:
                remedy = "only dead jobs are retried, and with each the jobs that were cancelled because of it"
                raise Conflict(f"job {shown_id(job)} is {document(job)['state']}; {remedy}")
        operated = app.sync.replay([job.id for job in jobs])
    click.echo(f"{len(operated.changed)} jobs pending again")


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────
@main.group()
def config() -> None:
    """Show and change the settings."""


@config.command("get")
@click.argument("name")
@click.pass_obj
def config_get(place: Place, name: str) -> None:
    """Print one setting."""
    option(name)
    click.echo(json.dumps(place.values()[name]))


@config.command("set")
@click.argument("name")
@click.argument("value")
@click.pass_obj
def config_set(place: Place, name: str, value: str) -> None:
    """Change one setting; running workers follow within seconds."""
    click.echo(f"{name} = {json.dumps(place.set(name, value))}")


@config.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def config_list(place: Place, as_json: bool) -> None:
    """Print every setting."""
    values = place.values()
    if as_json:
        click.echo(json.dumps(values))
        return
    for name, each in OPTIONS.items():
        click.echo(f"{name:<18}{json.dumps(values[name]):<12}{each.meaning}")
