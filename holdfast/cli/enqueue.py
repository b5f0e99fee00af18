"""``enqueue``: one job from arguments, or a stream of jobs from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from holdfast.cli.base import add_command, task_names
from holdfast.cli.bulk_enqueue import enqueue_stream
from holdfast.cli.context import Session
from holdfast.cli.output import print_json
from holdfast.cli.submission import (
    await_end,
    job_options,
    parse_options,
    print_submitted,
    read_payload,
    submit_one,
    wait_options,
)
from holdfast.core.errors import Invalid
from holdfast.core.models import JobState
from holdfast.views.documents import job_document, to_builtins
from holdfast.views.formatting import safe_text


@add_command(
    "enqueue",
    examples=[
        """holdfast enqueue email.send '{"to": "a@b.c", "subject": "hi"}'""",
        "holdfast enqueue email.send --arg to=a@b.c --arg copies:=3 --delay 5m --key welcome-42",
        "holdfast enqueue report.build - --wait",
        "holdfast enqueue --stream jobs.jsonl",
    ],
)
@click.argument("task", required=False, shell_complete=task_names)
@click.argument("payload", required=False)
@click.option("--arg", "arguments", metavar="NAME=TEXT", multiple=True, help="One argument; NAME:=JSON for no text.")
@job_options
@wait_options
@click.option("--stream", metavar="FILE", help="Submit every line of a file of JSON lines; - for stdin.")
@click.option("--batch-size", type=click.IntRange(1, 10_000), default=1000, help="Jobs in one transaction of a stream.")
@click.pass_obj
def enqueue(
    session: Session,
    *,
    task: str | None,
    payload: str | None,
    arguments: tuple[str, ...],
    options: dict[str, Any],
    wait: bool,
    wait_for: str | None,
    stream: str | None,
    batch_size: int,
) -> int:
    """Submit a job for TASK.

    PAYLOAD is a JSON object of its arguments by name; "-" reads it from stdin. Prints the job's id; when it is printed,
    the job is stored.

    A stream has one JSON object a line: {"task": ..., "payload": {...}} and the options by their long names with _ for
    -. TASK and options given here stand for every line that does not say. Each batch is stored whole or not at all.
    """
    if stream is not None:
        if payload is not None or arguments or wait or wait_for:
            raise click.UsageError("--stream takes payloads from its lines, and does not wait")
        return enqueue_stream(session, stream, task=task, provided=options, batch_size=batch_size)
    if task is None:
        raise click.UsageError("name the task, or give --stream FILE")
    return _enqueue_one(session, task, payload, arguments, options, wait or wait_for is not None, wait_for)


def _enqueue_one(
    session: Session,
    task: str,
    payload: str | None,
    arguments: tuple[str, ...],
    options: dict[str, Any],
    waiting: bool,
    limit: str | None,
) -> int:
    if payload is not None and arguments:
        raise click.UsageError("give a payload or --arg, not both")
    with session.open_target(creating=True) as app:
        values = parse_arguments(arguments) if arguments else read_payload(payload, app.settings.payload_limit)
        with _typed(arguments):
            job = app.draft_job(task, values, **parse_options(options))
        handle = submit_one(app, job)
        if not waiting:
            print_submitted(session, app, job, handle)
            return 0
        ended = await_end(app, handle, limit)
        if session.json:
            print_json(to_builtins(job_document(ended)) | {"created": handle.created})
        elif ended.state is JobState.SUCCEEDED:
            click.echo(safe_text(ended.result or "null"))
        return int(ended.state is not JobState.SUCCEEDED)


@contextmanager
def _typed(given: tuple[str, ...]) -> Iterator[None]:
    """Wraps the submission: an error about a text argument explains how to give another type."""
    try:
        yield
    except Invalid as error:
        for each in given:
            name, _, text = each.partition("=")
            if error.value == text and f"'{name}'" in error.field and _is_json(text):
                remedy = f"{error.remedy}; {name}=... gives text, write --arg {name}:={text}"
                raise Invalid(error.field, error.value, remedy) from None
        raise


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def parse_arguments(given: tuple[str, ...]) -> dict[str, Any]:
    """Parses ``NAME=TEXT`` and ``NAME:=JSON`` to a payload."""
    payload: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        as_json = name.endswith(":")
        name = name.removesuffix(":")
        if not equals or not name.isidentifier():
            raise Invalid("arg", each, "write name=text, or name:=JSON for a number, a list, true, null")
        if name in payload:
            raise Invalid("arg", each, f"give {name} once")
        try:
            payload[name] = json.loads(value) if as_json else value
        except (ValueError, RecursionError) as error:
            raise Invalid("arg", each, f"what follows := is JSON: {error}") from None
    return payload
