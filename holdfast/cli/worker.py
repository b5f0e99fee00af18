"""``worker``: the processes that run jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import Any

import click

from holdfast import Holdfast
from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.inspect import WORKER_COLUMNS, worker_rows
from holdfast.cli.output import print_json, print_note, print_table
from holdfast.cli.submission import server_time_us
from holdfast.core.errors import NotFound, Unavailable
from holdfast.core.events import Event, WorkerStopping
from holdfast.core.validation import parse_duration
from holdfast.views.documents import worker_document
from holdfast.views.formatting import count_noun, format_span

_POLL = 0.2  # seconds between checks while waiting for workers to end


@add_group("worker")
def worker() -> None:
    """Start, stop and list workers."""


@worker.command(
    "start",
    examples=[
        "holdfast worker start --app shop.jobs:app",
        "holdfast worker start -A shop.jobs:app -Q mail:10,default -c 20",
        "holdfast worker start --queues mail:10,default --concurrency 20 --processes 4",
        "holdfast worker start --drain",
    ],
)
@click.option(
    "--queues", "-Q", metavar="LIST", help="Which queues, and how many of their jobs at once: mail:10,default [*]."
)
@click.option("--concurrency", "-c", metavar="N", help="Jobs one process runs at once [10].")
@click.option("--processes", metavar="N", help="Processes to start; those that die are restarted [1].")
@click.option("--drain", is_flag=True, help="Stop when nothing is ready to run; limits and retries are not waited for.")
@click.option("--role", metavar="ROLE", help="auto, leader or follower; a follower does no maintenance [auto].")
@click.option("--grace", metavar="SPAN", help="How long running jobs may go on when the worker is stopped [30s].")
@click.option("--metrics-port", metavar="N", help="Tell metrics and health on this port of 127.0.0.1 [none].")
@click.pass_obj
def worker_start(session: Session, /, *, drain: bool, **given: str | None) -> int:
    """Run jobs until stopped.

    SIGTERM, Ctrl-C or `holdfast worker stop` let running jobs finish within the grace, then cancel them and give
    them back; a second signal more than a second later cancels them at once. The settings give the defaults of all
    options.
    """
    from holdfast.cli.loading import startup_explained
    from holdfast.telemetry.logs import configure_logs
    from holdfast.worker import run_worker, supervise
    from holdfast.worker.supervisor import is_supervised

    app = session.with_tasks("a worker", **given)
    settings = app.settings
    for warning in settings.warnings:
        print_note(f"warning: {warning}")
    if settings.commands == "off" and not app.registry:
        print_note("warning: the application has no tasks, so no job can run; import the modules of its tasks in it")
    finish_logs = configure_logs(settings, app.events)
    if sys.stderr.isatty():
        app.events.subscribe(_tell_waiting, WorkerStopping)
    try:
        # One process that is to be recycled also needs a supervisor that starts the next one.
        if not is_supervised() and (settings.processes > 1 or settings.recycles):
            return supervise(child_arguments(session, given, drain=drain), settings, app.events)
        with startup_explained():
            return run_worker(app, settings, drain=drain)
    finally:
        finish_logs()


def _tell_waiting(event: Event) -> None:
    """Prints a note that explains the wait after Ctrl-C."""
    if isinstance(event, WorkerStopping) and event.running and event.grace:
        print_note(
            f"waiting up to {format_span(event.grace)} for {count_noun(event.running, 'running job')}; "
            "Ctrl-C again gives them back to the queue"
        )


def child_arguments(session: Session, given: dict[str, str | None], *, drain: bool) -> list[str]:
    """Returns the arguments of a child process beside ``worker start``."""
    passed = {"app": session.app, "url": session.url, "config": session.config, **given}
    passed.pop("processes", None)
    options = {f"--{name.replace('_', '-')}": value for name, value in passed.items() if value is not None}
    arguments = [word for option in options.items() for word in option]
    return [*arguments, *(["--drain"] if drain else [])]


@worker.command("list", examples=["holdfast worker list"])
@click.pass_obj
def worker_list(session: Session) -> None:
    """List the worker processes. Shows what they serve and do, and whether they are alive."""
    with session.open_jobs() as app:
        workers, now = app.sync.workers(), server_time_us(app)
    if session.json:
        print_json({"workers": [worker_document(each) for each in workers]})
    else:
        print_table(WORKER_COLUMNS, worker_rows(workers, now), empty="no workers")


@worker.command(
    "stop", examples=["holdfast worker stop", "holdfast worker stop --drain --wait", "holdfast worker stop w-7c1f"]
)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--drain", is_flag=True, help="Let them empty their queues first.")
@click.option("--wait", is_flag=True, help="Return when they have ended.")
@click.option("--wait-for", metavar="SPAN", help="The same, but at most this long; then exit 75.")
@click.pass_obj
def worker_stop(session: Session, *, ids: tuple[str, ...], drain: bool, wait: bool, wait_for: str | None) -> None:
    """Ask workers to stop, wherever they run. Without an ID: every living one."""
    timeout = None if wait_for is None else parse_duration(wait_for, "wait-for").total_seconds()
    with session.open_jobs() as app:
        asked: list[str] = app.sync.stop_workers(list(ids) or None, drain=drain)
        _check_all_asked(ids, asked)
        if wait or timeout is not None:
            _await_stopped(app, asked, timeout)
    if session.json:
        print_json({"asked": asked, "drain": drain})
    else:
        click.echo(
            f"{count_noun(len(asked), 'worker')} asked to {'drain' if drain else 'stop'}" if asked else "no workers"
        )


def _check_all_asked(ids: Collection[str], asked: Collection[str]) -> None:
    missing = [each for each in ids if each not in asked]
    if missing:
        also = f" ({', '.join(asked)} was asked)" if asked else ""
        raise NotFound(f"there is no living worker {', '.join(missing)}{also}; see `holdfast worker list`")


def _await_stopped(app: Holdfast, asked: list[str], timeout: float | None) -> None:
    until = None if timeout is None else time.monotonic() + timeout
    while left := _still_there(app, asked):
        if until is not None and time.monotonic() >= until:
            raise Unavailable(f"{', '.join(left)} still at work after {timeout:g} s; it goes on stopping")
        time.sleep(_POLL)


def _still_there(app: Holdfast, asked: list[str]) -> list[str]:
    workers: list[Any] = app.sync.workers()
    return [each.heartbeat.worker for each in workers if each.alive and each.heartbeat.worker in asked]
