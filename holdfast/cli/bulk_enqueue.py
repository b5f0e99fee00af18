"""Submission of a stream of JSON lines: one transaction per batch; a batch with a bad line is not stored."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click

from holdfast import Holdfast
from holdfast.cli.context import Session, note_if_created
from holdfast.cli.output import make_console, print_json_line
from holdfast.cli.submission import Interrupted, parse_options, standard_input
from holdfast.core.errors import HoldfastError, Invalid, TooLarge
from holdfast.core.models import NewJob
from holdfast.tasks import decode_payload
from holdfast.tasks.codec import RawText
from holdfast.views.formatting import count_noun

_BESIDE_PAYLOAD = 64 * 1024  # bytes of a line in addition to the payload
_FORM = 'its task, its payload and its options, as in {"task": "email.send", "payload": {"to": "a@b.c"}}'
Report = Callable[[int, int], None]
"""Callback with the number of stored jobs and of read bytes."""


class StreamLine(NamedTuple):
    """A job of the stream."""

    number: int
    end: int  # bytes of the stream up to here
    job: NewJob


class StreamStopped(HoldfastError):
    """A bad line, or the store, stopped the stream."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Tally:
    """Progress of a stream."""

    def __init__(self) -> None:
        self.created = 0
        self.duplicates = 0
        self.last_line = 0
        self.sent_line = 0  # the last of the batch that was sent last

    def describe_stored(self, *, is_certain: bool) -> str:
        """Returns which lines are stored. ``is_certain``: the answer to the latest batch is known."""
        if self.sent_line > self.last_line and not is_certain:
            before = f"the jobs of lines 1 to {self.last_line} are stored, and " if self.last_line else ""
            return f"{before}those of lines {self.last_line + 1} to {self.sent_line} may be stored"
        if not self.last_line:
            return "nothing is stored"
        return f"the jobs of lines 1 to {self.last_line} are stored, and none after them"


def enqueue_stream(
    session: Session, source: str, *, task: str | None, provided: Mapping[str, Any], batch_size: int
) -> int:
    """Submits every line. Batches before a bad line stay stored; the message says how many jobs."""
    tally = Tally()
    with (
        session.open_target(creating=True) as app,
        _opened(source) as (file, size),
        _progress(session, size) as progress,
    ):
        lines = _lines(file, app, task, parse_options(provided))
        try:
            for jobs in _batches(lines, batch_size):
                _store(session, app, jobs, tally)
                progress(tally.created + tally.duplicates, jobs[-1].end)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {tally.describe_stored(is_certain=False)}; with keys or ids, repeating it is harmless"
            ) from None
        except HoldfastError as error:
            is_certain = not (getattr(error, "outcome", None) or any(getattr(error, "stored", ())))
            raise StreamStopped(f"{error}; {tally.describe_stored(is_certain=is_certain)}", error.exit_code) from error
    if not session.json:
        there = f", {tally.duplicates} were there already" if tally.duplicates else ""
        click.echo(f"{count_noun(tally.created, 'job')} stored{there}")
    return 0


def _store(session: Session, app: Holdfast, lines: list[StreamLine], tally: Tally) -> None:
    tally.sent_line = lines[-1].number
    with nullcontext() if tally.last_line else note_if_created(app):
        handles = app.sync.enqueue_many([line.job for line in lines], batch_size=len(lines))
    tally.created += sum(handle.created for handle in handles)
    tally.duplicates += sum(not handle.created for handle in handles)
    tally.last_line = lines[-1].number
    if session.json:
        for line, handle in zip(lines, handles, strict=True):
            print_json_line({"line": line.number, "id": handle.id, "created": handle.created})


def _batches(lines: Iterator[StreamLine], size: int) -> Iterator[list[StreamLine]]:
    batch: list[StreamLine] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(file: BinaryIO, app: Holdfast, task: str | None, options: Mapping[str, Any]) -> Iterator[StreamLine]:
    limit, number, end = app.settings.payload_limit + _BESIDE_PAYLOAD, 0, 0
    while text := file.readline(limit + 1):
        number, end = number + 1, end + len(text)
        if not text.strip():
            continue
        try:
            job = _job(app, _fields(text, limit), task, options)
        except Invalid as error:
            raise StreamStopped(f"line {number}: {error}", error.exit_code) from error
        yield StreamLine(number, end, job)


def _fields(text: bytes, limit: int) -> dict[str, Any]:
    if len(text) > limit:
        raise TooLarge("job", RawText(f"{len(text):,} bytes or more"), f"a line takes at most {limit:,} bytes here")
    try:
        return decode_payload(text, limit)
    except Invalid as error:
        raise Invalid("job", error.value, error.remedy.replace("the arguments by name", _FORM)) from None


def _job(app: Holdfast, line: dict[str, Any], task: str | None, options: Mapping[str, Any]) -> NewJob:
    name = line.pop("task", task)
    payload = line.pop("payload", {})
    if name is None:
        raise Invalid("task", None, 'name it in the line, {"task": "email.send", ...}, or before --stream')
    if not isinstance(payload, dict):
        raise Invalid("payload", payload, "give a JSON object: the arguments by name")
    return app.draft_job(name, payload, **{**options, **parse_options(line)})


@contextmanager
def _opened(source: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """Yields the stream and its size in bytes, if known."""
    if source == "-":
        yield standard_input(), None
        return
    with _readable(Path(source)) as file:
        status = os.fstat(file.fileno())
        yield file, status.st_size if stat.S_ISREG(status.st_mode) else None


def _readable(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise Invalid("stream", str(path), f"it cannot be read: {error.strerror}") from None


@contextmanager
def _progress(session: Session, size: int | None) -> Iterator[Report]:
    """Shows a progress bar on a terminal."""
    to = make_console(stderr=True)
    if session.json or not to.is_terminal:
        yield lambda jobs, end: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.fields[jobs]} jobs stored"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=to, transient=True) as bar:
        shown = bar.add_task("", total=size, jobs=0)
        yield lambda jobs, end: bar.update(shown, completed=end, jobs=jobs)
