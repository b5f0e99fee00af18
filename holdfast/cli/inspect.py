"""``status``, ``list``, ``count`` and ``show``: commands that change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import click

from holdfast import Holdfast, JobState
from holdfast.app.workflows import RecordedValues, saved_values
from holdfast.cli.base import add_command
from holdfast.cli.context import Session, store_of
from holdfast.cli.error_groups import print_error_groups
from holdfast.cli.output import (
    Column,
    name_program,
    pretty_json,
    print_block,
    print_facts,
    print_heading,
    print_json,
    print_note,
    print_table,
)
from holdfast.cli.submission import filter_options, server_time_us, time_ago
from holdfast.core.batches import BATCH_TASK
from holdfast.core.dependencies import NEVER_US
from holdfast.core.encryption import describe_encrypted, is_encrypted
from holdfast.core.ids import as_ulid
from holdfast.core.job_logs import LogLine
from holdfast.core.lifecycle import deferral_of
from holdfast.core.models import TERMINAL, Attempt, Job, QueueInfo, Step, UniqueKey
from holdfast.core.redaction import Redaction
from holdfast.core.waits import step_value
from holdfast.core.workers import WorkerInfo
from holdfast.telemetry.trace_context import trace_id_of
from holdfast.views.documents import (
    attempt_document,
    job_document,
    line_document,
    replays_after,
    status_document,
    step_document,
    to_builtins,
    worker_state,
)
from holdfast.views.formatting import (
    Filters,
    clip_text,
    format_decimal,
    format_memory,
    format_moment,
    format_span,
    safe_text,
)
from holdfast.views.workflows import MAX_TREE, Tree, TreeNode, WaitsDocument, read_tree, waits_document

_SPARE_STATES = frozenset({JobState.SCHEDULED, JobState.WAITING, JobState.CANCELLED})
_QUEUE_COLUMNS = [
    Column("QUEUE", "id"),
    *(Column(state.value.upper(), "number", spare=state in _SPARE_STATES) for state in JobState),
    Column("OLDEST", "number", spare=True),
    Column("ENDED/S", "number", spare=True),
]
WORKER_COLUMNS = [
    Column("WORKER", "id"),
    Column("STATE"),
    Column("HOST", spare=True),
    Column("PID", "number", spare=True),
    Column("QUEUES"),
    Column("RUNNING", "number"),
    Column("SUCCEEDED", "number", spare=True),
    Column("FAILED", "number", spare=True),
    Column("MEMORY", "number", spare=True),
    Column("VERSION", spare=True),
    Column("SEEN", "number"),  # age of the last heartbeat
]
JOB_COLUMNS = [
    Column("ID", "id"),
    Column("TASK"),
    Column("QUEUE", spare=True),
    Column("STATE"),
    Column("ATTEMPTS", "number", spare=True),
    Column("CREATED", spare=True),
    Column("ERROR", spare=True),
]


@add_command("status", examples=["holdfast status", "holdfast status --json"])
@click.pass_obj
def status(session: Session) -> None:
    """Show the store, its queues and its workers.

    Jobs are counted by queue and state, at a bounded cost: of each state 10,000 jobs are counted, of ended ones the
    latest, and a number with + is the least there can be. ENDED/S is a queue's throughput in the last five minutes.
    """
    with session.open_jobs() as app:
        store, queues, workers, now = store_of(app), app.sync.queues(), app.sync.workers(), server_time_us(app)
    if session.json:
        print_json(status_document(store, queues, workers))
        return
    print_facts([("store", store)])
    click.echo()
    print_queues(queues, empty="no jobs")
    click.echo()
    no_workers = name_program("no workers: start one with `holdfast worker start`")
    print_table(WORKER_COLUMNS, worker_rows(workers, now), empty=no_workers)


def print_queues(queues: Sequence[QueueInfo], *, empty: str) -> None:
    """Prints one row a queue."""
    print_table(*queue_table(queues), empty=empty)
    if any(each.at_least for each in queues):
        print_note("a number with + is the least there can be: no more jobs were counted")


def queue_table(queues: Sequence[QueueInfo]) -> tuple[list[Column], list[list[object]]]:
    """Returns the columns, and one row a queue. With a transport: the ids in it."""
    announced = any(each.announced is not None for each in queues)
    columns = [*_QUEUE_COLUMNS, Column("ANNOUNCED", "number", spare=True)] if announced else _QUEUE_COLUMNS
    rows: list[list[object]] = []
    for each in queues:
        name = f"{each.name} (paused)" if each.paused else each.name
        numbers = [_counted(each, state, each.states.get(state.value, 0)) for state in JobState]
        age = "-" if each.oldest_ready is None else format_span(each.oldest_ready)
        rate = format_decimal(each.ended_per_second) if each.ended_per_second else "-"
        rows.append([name, *numbers, age, rate, *([each.announced] if announced else [])])
    return columns, rows


def _counted(queue: QueueInfo, state: JobState, number: int) -> str:
    return f"{number}+" if state in queue.at_least else str(number or "-")


def worker_rows(workers: Iterable[WorkerInfo], now: int) -> list[list[object]]:
    """Returns one row a worker."""
    return [
        [
            each.heartbeat.worker,
            worker_state(each),
            each.heartbeat.host,
            each.heartbeat.pid,
            each.heartbeat.queues,
            f"{'-' if worker_state(each) == 'lost' else each.heartbeat.running}/{each.heartbeat.concurrency}",
            each.heartbeat.succeeded,
            each.heartbeat.failed,
            format_memory(each.heartbeat.memory),
            each.heartbeat.version or "-",
            f"{format_span(max(0.0, (now - each.seen_at_us) / 1e6))} ago",
        ]
        for each in workers
    ]


@add_command(
    "list",
    examples=[
        "holdfast list --state dead --queue mail",
        "holdfast list --task email.send --since 2h --limit 100",
        "holdfast list --error 'connection refused' --json",
        "holdfast list --tag run-7 --group-by error",
    ],
)
@filter_options()
@click.option("--group-by", type=click.Choice(["error"]), help="List errors with their numbers of failed jobs instead.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="Rows on this page.")
@click.option("--cursor", metavar="TEXT", help="Continue where an earlier page ended.")
@click.pass_obj
def list_jobs(session: Session, *, filters: Filters, group_by: str | None, limit: int, cursor: str | None) -> None:
    """List jobs, newest first.

    The order is by id. A job of a schedule has an id from the time of its run, so a backfilled one is among older jobs.

    With --group-by error: the errors of all failed jobs that match. --error-group ID chooses the jobs of one.
    """
    if group_by is not None and cursor is not None:
        raise click.UsageError("--cursor continues a list of jobs; a list of errors is whole: raise its --limit")
    with session.open_jobs() as app:
        if group_by is not None:
            print_error_groups(session, app, filters, limit)
        else:
            print_page(session, app, filters, limit=limit, cursor=cursor)


@add_command(
    "count", examples=["holdfast count --state queued --queue mail", "holdfast count --tag run-7 --by-state --json"]
)
@filter_options()
@click.option("--by-state", is_flag=True, help="Count the jobs in each state.")
@click.pass_obj
def count_jobs(session: Session, *, filters: Filters, by_state: bool) -> None:
    """Count jobs exactly. Every job that matches is looked at, so this takes longer than `holdfast status`."""
    with session.open_jobs() as app:
        counts = app.sync.count_states(app.run_blocking(filters.build_filter(app)))
    states = {state.value: number for state, number in counts.states.items()}
    if session.json:
        print_json({"count": counts.total} | ({"states": states} if by_state else {}))
    elif by_state:
        print_facts([*((name, number) for name, number in states.items() if number), ("in all", counts.total)])
    else:
        click.echo(counts.total)


def print_page(
    session: Session,
    app: Holdfast,
    filters: Filters,
    *,
    limit: int,
    cursor: str | None,
    states: tuple[JobState, ...] = (),
) -> None:
    """Prints one page of the jobs that match."""
    page = app.sync.find(app.run_blocking(filters.build_filter(app, states)), limit=limit, cursor=cursor)
    jobs = [*map(Redaction(app.settings.redacted).redact_job, page.jobs)]
    if session.json:
        print_json({"jobs": [job_document(job) for job in jobs], "cursor": page.cursor})
        return
    print_table(JOB_COLUMNS, job_rows(jobs), empty="no such jobs")
    if page.cursor is not None:
        print_note(f"there are more: add --cursor {page.cursor}")


def job_rows(jobs: Iterable[Job]) -> list[list[object]]:
    """Returns one row a job."""
    return [
        [
            job.id,
            job.task,
            job.queue,
            job.state.value,
            attempts_of(job),
            format_moment(job.created_at_us),
            _error_of(job),
        ]
        for job in jobs
    ]


def _error_of(job: Job) -> str:
    deferral = deferral_of(job)
    return clip_text((job.error or "") if deferral is None else f"{deferral.cause} (deferred)", 80)


def attempts_of(job: Job) -> str:
    """Returns the number of attempts and the maximum."""
    return f"{job.attempts}/{'∞' if job.max_attempts is None else job.max_attempts}"


@add_command(
    "show", examples=["holdfast show 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "holdfast show key:welcome-42 --json"]
)
@click.argument("job_id", metavar="ID")
@click.option("--tree", is_flag=True, help="Show its steps, its children and the jobs that wait for it, as a tree.")
@click.pass_obj
def show_job(session: Session, *, job_id: str, tree: bool) -> None:
    """Show everything about a job.

    That is payload, failed attempts with their tracebacks, timings, steps, what it waits for, log lines and result. A
    replay is shown only after an attempt that did not succeed. ID is the job's id (a UUID, or its ULID form), or its
    idempotency key as key:KEY.
    """
    with session.open_jobs() as app:
        job = app.sync.get(job_id)
        if tree:
            found = app.run_blocking(_read_tree(app, job))
            if session.json:
                print_json(to_builtins(found))
            else:
                _print_tree(found)
        else:
            print_story(session, app, job)


async def _read_record(app: Holdfast, job: Job) -> list[Step]:
    return await (await app.open_store()).workflow.read_steps(job.id)


async def _read_tree(app: Holdfast, job: Job) -> Tree:
    return await read_tree(await app.open_store(), job, Redaction(app.settings.redacted))


def _print_tree(tree: Tree) -> None:
    """Prints each job with its steps, and below it, indented, what belongs to it."""
    below: dict[str | None, list[TreeNode]] = {}
    batches = {node.id for node in tree.jobs if node.task == BATCH_TASK}
    for node in tree.jobs:
        below.setdefault(node.parent, []).append(node)
    pending = [(0, node) for node in reversed(below[None])]
    while pending:
        depth, node = pending.pop()
        _print_node(node, "  " * depth, is_member=node.parent in batches)
        pending += [(depth + 1, each) for each in reversed(below.get(node.id, []))]
    if not tree.complete and len(tree.jobs) == MAX_TREE:
        print_note(f"there are more jobs than the {len(tree.jobs)} that are shown")


def _print_node(node: TreeNode, indent: str, *, is_member: bool) -> None:
    kind = "" if node.parent is None else "then " if not node.child else "has " if is_member else "calls "
    reason = f" ({node.reason})" if node.reason else ""
    click.echo(safe_text(f"{indent}{kind}{node.task}  {node.id}  {node.state.value}{reason}{_took(node)}"))
    for step in node.steps:
        click.echo(safe_text(f"{indent}  · {step.name}  {step.ended_at[:19].replace('T', ' ')}Z"))
    if node.receiver is not None:
        until = node.receiver.until[:19].replace("T", " ")
        click.echo(safe_text(f"{indent}  · waits for signal {node.receiver.topic} until {until}Z"))


def _took(node: TreeNode) -> str:
    if node.started_at is None or node.ended_at is None:
        return ""
    seconds = (datetime.fromisoformat(node.ended_at) - datetime.fromisoformat(node.started_at)).total_seconds()
    return f", took {format_span(seconds)}" if seconds >= 0 else ""


def print_story(session: Session, app: Holdfast, job: Job) -> None:
    """Prints a job with its history and log lines, redacted."""
    redaction = Redaction(app.settings.redacted)
    batch = app.sync.read_batch(job.id) if job.task == BATCH_TASK else None
    waits = waits_document(app.sync.read_waits(job.id), batch)
    attempts, record, lines = (
        redaction.redact_attempts(job, app.sync.attempts(job.id)),
        redaction.redact_steps(app.run_blocking(_read_record(app, job))),
        redaction.redact_logs(job, lines_of(app, job)),
    )
    steps, saved = [each for each in record if each.number], saved_values(record)
    now = server_time_us(app)
    job = redaction.redact_job(job)
    if session.json:
        document = to_builtins(job_document(job)) | {"ulid": as_ulid(job.id), "trace_id": trace_id_of(job)}
        document |= {"history": [attempt_document(each) for each in attempts]}
        document |= {"steps": [step_document(each) for each in steps], "waits": to_builtins(waits)}
        document |= {"progress": to_builtins(saved.progress), "saved_state": saved.state}
        print_json(document | {"lines": [line_document(each) for each in lines]})
        return
    print_facts(_facts(job, now))
    print_heading("Payload")
    print_block(pretty_json(job.payload))
    if job.options_or_default.metadata:
        print_heading("Metadata")
        print_block(pretty_json(_encoded(job.options_or_default.metadata)))
    if attempts:
        print_heading("Attempts that did not succeed")
        _print_attempts(attempts, replays_after(job, attempts))
    if steps:
        print_heading("Steps")
        for each in steps:
            click.echo(safe_text(f"  {format_moment(each.ended_at_us)}  {each.name}  {clip_text(_step_result(each))}"))
    _print_saved(saved)
    _print_waits(job, waits)
    if lines:
        print_heading("Log lines")
        _print_lines(lines)
    if job.state is JobState.SUCCEEDED:
        print_heading("Result")
        print_block(pretty_json(job.result))
    elif job.error and not attempts:
        print_heading("Error")
        print_block(job.error)


def lines_of(app: Holdfast, job: Job) -> list[LogLine]:
    """Returns all log lines of the job."""
    page = app.sync.logs(job.id)
    found = list(page.lines)
    while page.cursor is not None:
        page = app.sync.logs(job.id, cursor=page.cursor)
        found += page.lines
    return found


def _unique(unique: UniqueKey) -> str:
    time = f"while {unique.during}" if unique.window_us is None else f"for {format_span(unique.window_us / 1e6)}"
    return f"{time}; a second one will {unique.on_conflict} it" if unique.on_conflict != "keep" else time


def _encoded(value: object) -> str:
    import json

    return json.dumps(value)


def _facts(job: Job, now: int) -> Iterable[tuple[str, object]]:
    options = job.options_or_default
    last = "" if job.state in TERMINAL | {JobState.RUNNING} else "last "
    stopping = " (asked to stop)" if job.cancelling else ""
    yield "id", f"{job.id}  (ULID {as_ulid(job.id)})"
    yield "task", job.task
    yield "queue", job.queue
    yield "state", f"{job.state.value}{f' ({job.reason})' if job.reason else ''}{stopping}"
    yield "attempts", f"{attempts_of(job)}, failed {job.failures}"
    yield "priority", job.priority or None
    yield "key", job.key
    yield "unique", None if options.unique is None else _unique(options.unique)
    yield "batch", options.batch
    yield "fork of", options.forks
    yield "tags", ", ".join(options.tags) or None
    yield "trace", trace_id_of(job)
    yield "timeout", None if options.timeout is None else format_span(options.timeout)
    yield "retry", None if options.retry is None else _encoded(options.retry)
    yield f"{last}worker", job.worker
    yield "created", _dated(job.created_at_us, now)
    yield "run at", None if job.run_at_us >= NEVER_US else _dated(job.run_at_us, now)
    yield "expires", None if job.started_at_us is not None else _dated(job.expires_at_us, now)
    yield f"{last}started", _dated(job.started_at_us, now)
    yield "lease until", _dated(job.lease_until_us, now)
    yield "ended", _dated(job.ended_at_us, now)
    if job.state is JobState.SUCCEEDED and job.started_at_us is not None and job.ended_at_us is not None:
        yield "took", format_span((job.ended_at_us - job.started_at_us) / 1e6)


def _dated(us: int | None, now: int) -> str | None:
    past = time_ago(us, now)
    if us is None or past is None:
        return None
    seconds = past.total_seconds()
    return f"{format_moment(us)}  ({f'{format_span(seconds)} ago' if seconds >= 0 else f'in {format_span(-seconds)}'})"


def _print_attempts(attempts: Sequence[Attempt], replayed: Sequence[bool]) -> None:
    for each, is_replayed in zip(attempts, replayed, strict=True):
        took = (
            ""
            if each.started_at_us is None
            else f", after {format_span((each.ended_at_us - each.started_at_us) / 1e6)}"
        )
        outcome = f"{each.state} ({each.reason})" if each.reason else each.state
        if each.reason and each.state in (JobState.QUEUED, JobState.SCHEDULED):  # the job's, and not of the attempt
            outcome = each.reason
        click.echo(safe_text(f"  attempt {each.attempt}, ended {format_moment(each.ended_at_us)}{took}: {outcome}"))
        if each.worker:
            click.echo(safe_text(f"    on {each.worker}"))
        for text in (each.error, each.traceback):
            if text:
                click.echo("\n".join("    " + safe_text(line.replace("\t", "    ")) for line in text.splitlines()))
        if is_replayed:
            click.echo("  replayed: attempts are counted from 1 again")


def _step_result(step: Step) -> str:
    text = step.result or "null"
    value = step_value(text)
    return describe_encrypted(value) if is_encrypted(value) else text


def _print_saved(saved: RecordedValues) -> None:
    progress = saved.progress
    if progress is not None:
        share = "" if not progress.total else f" of {progress.total:g} ({100 * progress.done / progress.total:.0f} %)"
        print_heading("Progress")
        click.echo(safe_text(f"  {progress.done:g}{share}{f'  {progress.message}' if progress.message else ''}"))
    if saved.state is not None:
        print_heading("Saved state")
        print_block(pretty_json(_encoded(saved.state)))


_MAX_WAITS_SHOWN = 20


def _print_waits(job: Job, waits: WaitsDocument) -> None:
    rows, left_out = [], 0
    if waits.receiver is not None and job.state is JobState.WAITING:
        rows.append(f"signal {waits.receiver.topic}, until {waits.receiver.until[:19].replace('T', ' ')}Z")
    if waits.batch is not None:
        found = waits.batch
        rows.append(f"{found.members:,} jobs of the batch: {found.ended:,} have ended, {found.failed:,} have failed")
        left_out = max(0, found.members - len(waits.dependencies))  # of more than `MAX_SHOWN`
    for each in waits.dependencies:
        kind = "child" if each.child else "job" if waits.batch is not None else f"{each.on} of job"
        rows.append(f"{kind} {each.job_id}: {each.state}")
    _print_some("Waits for", rows, left_out)
    _print_some("Waiting for it", [f"job {each.job_id}, on {each.on}" for each in waits.dependents])


def _print_some(heading: str, rows: Sequence[str], left_out: int = 0) -> None:
    if rows:
        print_heading(heading)
    for row in rows[:_MAX_WAITS_SHOWN]:
        click.echo(safe_text(f"  {row}"))
    if len(rows) > _MAX_WAITS_SHOWN:
        click.echo(f"  and {len(rows) - _MAX_WAITS_SHOWN + left_out:,} more")


def _print_lines(lines: Sequence[LogLine]) -> None:
    for each in lines:
        fields = "" if each.fields is None else f"  {each.fields}"
        first, *more = f"{each.text}{fields}".splitlines() or [""]
        click.echo(safe_text(f"  {format_moment(each.at_us)}  attempt {each.attempt}  {each.level}  {first}"))
        for text in more:
            click.echo("    " + safe_text(text.replace("\t", "    ")))
