"""Options of submissions and filters; submission that reports after Ctrl-C if the job is stored."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, BinaryIO, TypeVar

import click

from holdfast import Holdfast, JobFilter, JobHandle, JobState, Retry
from holdfast.app.workflows import parse_dependencies, read_dependency
from holdfast.cli.base import task_names
from holdfast.cli.context import Session, note_if_created
from holdfast.cli.output import print_json, print_note
from holdfast.core.dependencies import Dependency
from holdfast.core.errors import HoldfastError, Invalid, JobCancelled, JobFailed, ResultTimeout, Unavailable
from holdfast.core.lifecycle import deferral_of, describe_outlook
from holdfast.core.limits import Limit
from holdfast.core.models import BulkResult, Job, NewJob, Reason
from holdfast.core.redaction import Redaction
from holdfast.core.schedule import Schedule
from holdfast.core.unique import as_unique
from holdfast.core.validation import did_you_mean, parse_duration, parse_instant, parse_timeout
from holdfast.core.workers import serves_queue
from holdfast.tasks import decode_payload
from holdfast.views.documents import job_document, to_builtins
from holdfast.views.formatting import Filters, clip_text, count_noun, format_moment

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = (
    "id",
    "queue",
    "priority",
    "delay",
    "run_at",
    "key",
    "key_for",
    "unique",
    "expires",
    "max_attempts",
    "timeout",
    "retry",
    "tags",
    "metadata",
    "after",
    "batch",
)
"""Options of a job, in addition to its task and payload."""


class Interrupted(click.ClickException):
    """Ctrl-C during a submission; the message says if the job is stored."""

    exit_code = 130


_ATTEMPTS = "Attempts it may have: a number, or unlimited."
_OF_ONE = frozenset({"delay", "run_at", "key", "key_for", "id", "after", "batch"})
"""Options of single jobs; a schedule sets them for each of its jobs."""
_DECORATORS: dict[str, Callable[[Any], Any]] = {
    "queue": click.option("--queue", "-Q", metavar="NAME", help="The queue it waits in [the task's, else default]."),
    "priority": click.option("--priority", type=int, metavar="N", help="From -100 to 100; higher runs first."),
    "delay": click.option("--delay", metavar="SPAN", help="Not before this long from now: 90, 5m, 2h."),
    "run_at": click.option("--run-at", metavar="INSTANT", help="Not before this instant: 2030-01-31T08:00:00Z."),
    "key": click.option("--key", metavar="TEXT", help="Idempotency key: at most one job exists for it."),
    "key_for": click.option("--key-for", metavar="SPAN", help="How long the key lives at least."),
    "unique": click.option(
        "--unique",
        metavar="POLICY",
        help='At most one job for the same work: active, unstarted, 10m, or JSON: {"during": …}.',
    ),
    "expires": click.option(
        "--expires", metavar="WHEN", help="Cancelled unless a worker takes it within a span (10m) or by an instant."
    ),
    "max_attempts": click.option("--max-attempts", metavar="N", help=_ATTEMPTS),
    "timeout": click.option("--timeout", metavar="SPAN", help="How long one attempt may take."),
    "retry": click.option(
        "--retry", metavar="POLICY", help='When to try again: fixed:10, "1,5,25", exponential:base=5.'
    ),
    "tags": click.option("--tag", "tags", metavar="TEXT", multiple=True, help="A tag to find it by."),
    "metadata": click.option("--metadata", metavar="JSON", help="An object of your own, kept with the job."),
    "after": click.option(
        "--after",
        metavar="ID[:END]",
        multiple=True,
        help="A job that must have ended first. END: success (the default), failure, end.",
    ),
    "batch": click.option(
        "--in-batch", "batch", metavar="ID", help="The batch of which it is a member; it must not have ended."
    ),
    "id": click.option("--id", metavar="UUID", help="The job's id; the same id again is harmless."),
}


def job_options(function: F) -> F:
    """Adds the options of a submission; the command receives the given ones as ``options``."""
    return _add_options(function, OPTIONS)


def template_options(function: F) -> F:
    """Adds the options of a schedule's jobs."""
    return _add_options(function, [name for name in OPTIONS if name not in _OF_ONE])


def _add_options(function: F, names: Sequence[str]) -> F:
    @functools.wraps(function)
    def collect_options(*args: Any, **provided: Any) -> Any:
        given = {name: provided.pop(name) for name in names}
        return function(
            *args, options={name: value for name, value in given.items() if value not in (None, ())}, **provided
        )

    decorated: Any = collect_options
    for name in reversed(list(_DECORATORS)):
        if name in names:
            decorated = _DECORATORS[name](decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators hand the function through


def wait_options(function: F) -> F:
    """Adds ``--wait`` and ``--wait-for``."""
    wait = click.option("--wait", is_flag=True, help="Wait for the job to end, and print its result.")
    limit = click.option("--wait-for", metavar="SPAN", help="The same, but at most this long; then exit 75.")
    return wait(limit(function))


def parse_options(provided: Mapping[str, Any]) -> dict[str, Any]:
    """Parses options, from text or JSON, for ``app.draft_job``; Invalid names the one that is wrong."""
    options: dict[str, Any] = {}
    for name, value in provided.items():
        if name not in OPTIONS:
            raise Invalid("option", name, f"there are {', '.join(OPTIONS)}{did_you_mean(name, OPTIONS)}")
        options[name] = _parse_option(name, value)
    return options


def _parse_option(name: str, value: Any) -> Any:
    match name:
        case "timeout":
            return parse_timeout(value)
        case "delay" | "key_for":
            return parse_duration(value, name)
        case "run_at":
            return parse_instant(value, name)
        case "expires":
            return parse_expiry_text(value)
        case "retry":
            return Retry.parse(value) if isinstance(value, str) else Retry.from_builtins(value)
        case "max_attempts" if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            return int(value)
        case "unique":
            return as_unique(parse_object("unique", value) if isinstance(value, str) and value[:1] == "{" else value)
        case "metadata" if isinstance(value, str):
            return parse_object("metadata", value)
        case "after":
            return parse_dependencies([_parse_after(each) for each in value] if isinstance(value, Sequence) else value)
        case _:
            return value


def _parse_after(value: Any) -> Any:
    """A dependency from the command line, or from a line of JSON."""
    if isinstance(value, str) and ":" in value:
        job_id, _, on = value.partition(":")
        return Dependency(job_id, on)
    return read_dependency(value)


def parse_expiry_text(value: Any) -> Any:
    """Parses an expiry from the command line: a bare number is seconds."""
    return float(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else value


def parse_object(field: str, text: str) -> dict[str, Any]:
    """Parses a JSON object from the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(field, text, f"give a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(field, text, 'give a JSON object, such as {"name": "value"}')
    return value


def read_payload(text: str | None, limit: int) -> dict[str, Any]:
    """Decodes the payload given as an argument; ``-`` reads stdin."""
    if text == "-":
        return decode_payload(read_input(limit), limit)
    return {} if text is None else decode_payload(text, limit)


def read_input(limit: int) -> bytes:
    """Reads at most one byte more than the limit from stdin, so endless input is refused."""
    return standard_input().read(limit + 1)


def standard_input() -> BinaryIO:
    """Returns stdin as bytes; raises Invalid if it is a terminal."""
    if sys.stdin is None or sys.stdin.closed:
        raise Invalid("-", "stdin", "it is closed; pipe the input in, or name a file")
    if sys.stdin.isatty():
        raise Invalid("-", "stdin", "this is a terminal; pipe the input in, as in: cat payload.json | holdfast ...")
    return sys.stdin.buffer


def submit_one(app: Holdfast, job: NewJob) -> JobHandle[Any]:
    """Submits one job. After Ctrl-C a message says if it is stored."""
    try:
        with note_if_created(app):
            handle = app.run_blocking(app.submit(job))
    except KeyboardInterrupt:
        raise Interrupted(_describe_interrupted(app, job)) from None
    warn_of_unknown_task(app, job.task)
    return handle


def warn_of_unknown_task(app: Holdfast, task: str) -> None:
    """Prints a warning if the application has tasks, but not this one."""
    registered = app.registry.task_names()
    if registered and task not in registered and task != "command":
        print_note(f"warning: the application has no task {task}{did_you_mean(task, registered)}")


def note_declared(removed: Iterable[Limit | Schedule]) -> None:
    """Prints a remark about removed limits or schedules that are declared in code."""
    names = [each.name for each in removed if each.owner is not None]
    if names:
        print_note(
            f"note: {', '.join(names)}: declared in code or settings; a worker that starts with them adds it again"
        )


def _describe_interrupted(app: Holdfast, job: NewJob) -> str:
    again = f"--key {job.key}" if job.key is not None else f"--id {job.id}"
    fresh = Holdfast(settings=app.settings)
    try:
        fresh.sync.get(job.id)
    except Exception:
        return f"interrupted: it is not known whether job {job.id} is stored; repeating it with {again} is harmless"
    finally:
        fresh.sync.close()
    return f"interrupted, but job {job.id} is stored"


def print_submitted(session: Session, app: Holdfast, job: NewJob, handle: JobHandle[Any]) -> None:
    """Prints the id to stdout, and a remark to stderr if the job existed."""
    if session.json:
        print_json(submitted_document(app, handle) | {"created": handle.created})
        return
    click.echo(handle.id)
    if not handle.created:
        under = f", under the key {job.key}" if job.key else ", for the same work" if job.unique else ""
        outcome = f"it was {job.unique.on_conflict}d" if job.unique and handle.changed else "nothing new was stored"
        print_note(f"this job was there already{under}; {outcome}")


def submitted_document(app: Holdfast, handle: JobHandle[Any], redacted: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a job that was just stored; returns only its id if the store is away."""
    try:
        document: dict[str, Any] = to_builtins(job_document(Redaction(redacted).redact_job(app.sync.get(handle.id))))
    except Unavailable as error:  # no failure: its exit code would ask for a second submission
        print_note(f"job {handle.id} is stored; {error}")
        return {"id": handle.id}
    return document


def await_end(app: Holdfast, handle: JobHandle[Any], timeout: str | None) -> Job:
    """Waits for the job and returns it. ResultTimeout if it has not ended."""
    limit = None if timeout is None else parse_duration(timeout, "wait-for").total_seconds()
    try:
        try:
            await_result(app, handle, limit)
        except (JobFailed, JobCancelled) as outcome:
            print_note(f"holdfast: {outcome}")
        return app.sync.get(handle.id)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted, but job {handle.id} is stored and goes on") from None
    except Unavailable as error:  # exit code 1: that of the error would ask for a second submission
        raise click.ClickException(f"job {handle.id} is stored, but its end could not be read: {error}") from error


_QUIET = 2.0  # seconds between checks of what delays the job; a job that ends sooner gets no remark


def await_result(app: Holdfast, handle: JobHandle[Any], limit: float | None) -> None:
    """Returns when the job has succeeded; JobFailed, JobCancelled, or ResultTimeout after ``limit`` seconds.

    A remark is printed when it begins to apply.
    """
    until = None if limit is None else time.monotonic() + limit
    made = None
    while True:
        left = _QUIET if until is None else max(0.0, until - time.monotonic())
        try:
            handle.sync.result(min(left, _QUIET))
        except ResultTimeout:
            job = app.sync.get(handle.id)
            if left <= _QUIET and until is not None:
                outlook = describe_outlook(job)
                raise ResultTimeout(job.id, f"job {job.id} is {job.state} after {limit:g} s; {outlook}") from None
            remark = _remark(app, job)
            if remark is not None and remark != made:
                print_note(f"holdfast: {remark}")
            made = remark
        else:
            return


def _remark(app: Holdfast, job: Job) -> str | None:
    """Returns the obstacle of a job that has not started; None if it only waits for its turn."""
    if job.state is JobState.RUNNING:
        return None
    if not any(each.alive and serves_queue(each, job.queue) for each in app.sync.workers()):
        return f"no living worker serves queue {job.queue}; start one with `holdfast worker start`"
    if deferral := deferral_of(job):
        return (
            f"deferred: worker {job.worker} cannot run it: {clip_text(deferral.cause, 500)}; see: holdfast why {job.id}"
        )
    if job.error is None or not job.attempts:
        return None
    error = (job.error.splitlines() or [""])[0]
    return f"attempt {job.attempts} failed: {error}; next at {format_moment(job.run_at_us)}"


# ── filters ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def server_time_us(app: Holdfast) -> int:
    """Reads the store's clock."""

    async def read_time() -> int:
        return await (await app.open_store()).health.server_time_us()

    return app.run_blocking(read_time())


class NearChoice(click.Choice[str]):
    """A choice that suggests the nearest word for a misspelt one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Returns the message of a refused word."""
        return super().get_invalid_choice_message(value, ctx) + did_you_mean(value, self.choices)


def filter_options(*, states: bool = True) -> Callable[[F], F]:
    """Adds the filter options; the command receives them as ``filters``."""
    names = [state.value for state in JobState]
    options = [
        click.option("--queue", "-Q", metavar="NAME", help="Jobs of this queue."),
        click.option(
            "--task",
            metavar="NAME",
            multiple=True,
            shell_complete=task_names,
            help="Jobs of this task; several: of any of them.",
        ),
        click.option("--tag", metavar="TEXT", help="Jobs that carry this tag."),
        click.option(
            "--reason",
            type=NearChoice([reason.value for reason in Reason]),
            metavar="REASON",
            help="Jobs whose latest failure, not followed by a success, has this reason: "
            + ", ".join(reason.value for reason in Reason)
            + ".",
        ),
        click.option("--worker", metavar="ID", help="Jobs this worker took last."),
        click.option("--error", metavar="TEXT", help="Jobs whose error contains this text."),
        click.option("--error-group", metavar="ID", help="Jobs whose error is in this group (`holdfast errors`)."),
        click.option("--since", metavar="WHEN", help="Submitted after: an instant, or how long ago (2h)."),
        click.option("--until", metavar="WHEN", help="Submitted before: an instant, or how long ago (7d)."),
    ]
    if states:
        text = f"Jobs in this state; several: in any of them. {', '.join(names)}."
        options.insert(0, click.option("--state", type=NearChoice(names), metavar="STATE", multiple=True, help=text))

    def add_options(function: F) -> F:
        @functools.wraps(function)
        def collect_filters(*args: Any, **provided: Any) -> Any:
            fields = {name: provided.pop(name) for name in Filters.__struct_fields__ if name in provided}
            return function(*args, filters=Filters(**fields), **provided)

        decorated: Any = collect_filters
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]  # click's decorators hand the function through

    return add_options


def check_choice(ids: tuple[str, ...], filters: Filters, everything: bool) -> None:
    """Raises UsageError unless exactly one of ids, filters and ``--all`` selects the jobs."""
    ways = [bool(ids), filters.given or everything]
    if sum(ways) == 2:
        raise click.UsageError("give ids or filters, not both")
    if not any(ways):
        raise click.UsageError("say which jobs: ids, filters such as --queue mail, or --all")


def operate_on_all(operation: Callable[[JobFilter], BulkResult], filters: list[JobFilter], done: str) -> BulkResult:
    """Repeats a bounded operation until no job matches a filter. An error says how many jobs were ``done`` before."""
    changed: dict[str, JobState] = {}
    try:
        for where in filters:
            while True:
                answer = operation(where)
                fresh = {job_id: state for job_id, state in answer.changed if job_id not in changed}
                changed |= fresh
                # A running job that was asked to stop still matches: stop once a call changes no new job.
                if not answer.more or not fresh:
                    break
    except HoldfastError as error:
        if changed:
            error.args = (f"{error}; before it, {count_noun(len(changed), 'job')} {done}; repeating it takes the rest",)
        raise
    return BulkResult(changed=list(changed.items()), refused=[])


def time_ago(us: int | None, now: int) -> timedelta | None:
    """Returns the time since an instant."""
    return None if us is None else timedelta(microseconds=now - us)
