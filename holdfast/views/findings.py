"""Findings about a whole system, each with a remedy: for ``doctor`` and the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from datetime import timedelta

import msgspec

from holdfast.core.alerts import Alert
from holdfast.core.faults import FAULTS_TASK, FaultPlan
from holdfast.core.limits import BucketUse, Limit
from holdfast.core.models import MICROSECOND, Finding, JobState, QueueInfo
from holdfast.core.validation import did_you_mean
from holdfast.core.workers import WorkerInfo, serves_queue
from holdfast.views.formatting import count_noun, format_moment, format_timestamp
from holdfast.views.limits import describe_values

_LONG_PAUSE = timedelta(minutes=1)


def about_faults(plan: FaultPlan | None, *, is_allowed: bool) -> Iterator[Finding]:
    """Yields a finding about injected faults, or about settings that allow them."""
    if plan is not None:
        text = f"faults are injected until {format_timestamp(plan.until_us)}: {', '.join(plan.kinds)}"
        yield Finding("faults", "warning", text, "`holdfast chaos stop` ends them")
    elif is_allowed:
        remedy = "keep allow_faults out of the settings of a system that people rely on"
        yield Finding("faults", "warning", "none is injected, but these settings allow it", remedy)


class AlertDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A breach of a rule by a queue."""

    rule: str
    queue: str
    text: str
    since: str
    sent: bool
    problem: str | None


def alert_document(alert: Alert) -> AlertDocument:
    """Returns the document of an alert."""
    return AlertDocument(
        rule=alert.rule,
        queue=alert.queue,
        text=alert.text,
        since=format_timestamp(alert.since_us),
        sent=alert.is_sent,
        problem=alert.problem or None,
    )


def about_alerts(alerts: Sequence[Alert]) -> Iterator[Finding]:
    """Yields a finding for each alert that has not cleared."""
    for alert in alerts:
        text = f"alert {alert.rule} since {format_timestamp(alert.since_us)}: {alert.text}"
        remedy = f"holdfast list --queue {alert.queue}; its dead jobs: holdfast dlq list --queue {alert.queue}"
        if alert.problem:
            text += f"; it is not sent yet: {alert.problem}"
            remedy += "; holdfast alerts test"
        yield Finding("alerts", "warning", text, remedy)


def about_dead(queues: Sequence[QueueInfo]) -> Iterator[Finding]:
    """Yields a finding for each queue with dead jobs."""
    for queue in queues:
        number = queue.states.get(JobState.DEAD, 0)
        if number:
            counted = f"{'at least ' if JobState.DEAD in queue.at_least else ''}{count_noun(number, 'dead job')}"
            remedy = f"mend the cause, then: holdfast dlq replay --queue {queue.name}"
            yield Finding("dead letters", "warning", f"queue {queue.name} has {counted}", remedy)


def about_limits(
    limits: Sequence[Limit], queues: Sequence[QueueInfo], workers: Sequence[WorkerInfo], tasks: Set[str]
) -> Iterator[Finding]:
    """Yields findings about unused limits and those that differ from the code; ``tasks``: of the application."""
    if not limits:
        return
    changed = [limit for limit in limits if limit.declared is not None]
    declared = sum(limit.owner is not None for limit in limits)
    text = f"{count_noun(len(limits), 'limit')}, {declared} declared, {len(changed)} changed by operators"
    yield Finding("limits", "ok", text)
    for limit in changed:
        given = describe_values(limit.declared or limit.values)
        text = f"limit {limit.name} has {describe_values(limit.values)}; it is declared with {given}"
        remedy = f"holdfast limit reset {limit.name}, or write it into the code, or the settings"
        yield Finding("limits", "warning", text, remedy)
    known = {queue.name for queue in queues}
    for limit in limits:
        if limit.queue is not None and limit.queue not in known:
            if not any(serves_queue(worker, limit.queue) for worker in workers if worker.alive):
                text = f"limit {limit.name}: queue {limit.queue} has no job and no worker"
                remedy = f"correct its queue, or: holdfast limit remove {limit.name}"
                yield Finding("limits", "warning", text + did_you_mean(limit.queue, known), remedy)
        elif limit.task is not None and tasks and limit.task not in tasks:
            text = f"limit {limit.name}: this application has no task {limit.task}{did_you_mean(limit.task, tasks)}"
            remedy = f"if no other application has it: holdfast limit remove {limit.name}"
            if limit.owner is not None:
                remedy = "correct the task where the limit is declared"
            yield Finding("limits", "warning", text, remedy)


def about_pauses(uses: Sequence[BucketUse], now_us: int) -> Iterator[Finding]:
    """Yields a finding for each limit that is paused for longer than handlers usually ask for."""
    for use in uses:
        if use.free_at_us - now_us > _LONG_PAUSE // MICROSECOND:
            text = f"limit {use.bucket} is paused until {format_moment(use.free_at_us)}: no job starts under it"
            yield Finding("limits", "warning", text, f"holdfast limit resume {use.bucket}", use.bucket)


def about_workers(queues: Sequence[QueueInfo], workers: Sequence[WorkerInfo]) -> Iterator[Finding]:
    """Yields findings about silent workers, unserved queues, and paused queues that hold jobs."""
    alive = [worker for worker in workers if worker.alive]
    yield Finding("workers", "ok", f"{len(alive)} alive")
    for worker in workers:
        if not worker.alive:
            name, host = worker.heartbeat.worker, worker.heartbeat.host
            text = f"worker {name} on {host} fell silent at {format_moment(worker.seen_at_us)}"
            yield Finding("workers", "warning", text, "read its log; other workers of its queues recover its jobs")
    for queue in queues:
        states = {JobState.QUEUED, JobState.SCHEDULED, JobState.FAILED}
        unstarted = sum(queue.states.get(state, 0) for state in states)
        number = f"{'at least ' if states & queue.at_least else ''}{count_noun(unstarted, 'job')}"
        if unstarted and queue.paused:
            text = f"queue {queue.name} is paused and holds {number}"
            yield Finding("queues", "warning", text, f"holdfast queue resume {queue.name}", queue.name)
        elif unstarted and queue.name != FAULTS_TASK and not any(serves_queue(worker, queue.name) for worker in alive):
            text = f"no worker serves queue {queue.name}, which holds {number}"
            yield Finding("queues", "warning", text, f"holdfast worker start --queues {queue.name}")
