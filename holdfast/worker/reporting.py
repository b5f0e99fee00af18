"""Events about claims and settlements, the same for local workers and programs over HTTP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

from msgspec.structs import replace

from holdfast.core.dependencies import NEVER_US
from holdfast.core.events import (
    Events,
    JobCancelledEvent,
    JobDead,
    JobDeferred,
    JobExpired,
    JobFailedEvent,
    JobReleased,
    JobSucceeded,
    JobSuspended,
    JobUnstartable,
    LeaseAcquired,
    LeaseLostEvent,
    LeaseRejected,
)
from holdfast.core.lifecycle import DEFERRALS
from holdfast.core.metric_events import JobsClaimed, SettlementsWritten
from holdfast.core.models import Claim, ExpiredJob, Job, JobState, Settled, Settlement, to_datetime
from holdfast.settings.settings import Settings
from holdfast.telemetry.trace_context import trace_id_of
from holdfast.transports.contract import TransportKeys


def emit_claim(events: Events, claim: Claim, worker_id: str, lease_for: timedelta) -> None:
    """Emits the events of a claim."""
    if (claim.jobs or claim.refused) and events.has_subscriber(JobsClaimed):
        _measure_claim(events, claim, lease_for)
    emit_expired(events, claim.expired)
    if claim.refused and events.has_subscriber(LeaseRejected):
        events.emit(LeaseRejected(count=claim.refused, worker_id=worker_id))
    if claim.jobs and events.has_subscriber(LeaseAcquired):
        until = None if claim.lease_until_us is None else to_datetime(claim.lease_until_us)
        for job in claim.jobs:
            events.emit(
                LeaseAcquired(
                    job_id=job.id, task=job.task, attempt=job.attempts, worker_id=worker_id, locked_until=until
                )
            )


def emit_expired(events: Events, expired: Iterable[ExpiredJob]) -> None:
    """Emits the events of jobs that have ended because no worker took them in time."""
    for each in expired:
        events.emit(JobExpired(job_id=each.job_id, task=each.task, queue=each.queue))


def _measure_claim(events: Events, claim: Claim, lease_for: timedelta) -> None:
    """Emits the queue wait of claimed jobs, by the store's clock: their leases began at the claim."""
    claimed_at_us = (claim.lease_until_us or 0) - lease_for // timedelta(microseconds=1)
    queue_wait: defaultdict[str, list[float]] = defaultdict(list)
    retried = 0
    for job in claim.jobs:
        queue_wait[job.queue].append((claimed_at_us - job.run_at_us) * 1e-6)
        if job.attempts > 1:
            retried += 1
    events.emit(JobsClaimed(retried=retried, refused=claim.refused, queue_wait=queue_wait))


def measure_settled(events: Events, size: int, succeeded: Iterable[tuple[str, float]]) -> None:
    """Emits ``SettlementsWritten``. ``succeeded``: task and seconds of each job that succeeded."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for task, spent in succeeded:
        seconds[task].append(spent)
    events.emit(SettlementsWritten(size=size, succeeded=seconds))


def emit_success(events: Events, job: Job, seconds: float) -> None:
    """Emits ``JobSucceeded`` for a stored settlement. Callers that settle many jobs check for subscribers first."""
    events.emit(
        JobSucceeded(
            job_id=job.id, task=job.task, attempt=job.attempts, seconds=round(seconds, 6), trace_id=trace_id_of(job)
        )
    )


def emit_lease_lost(events: Events, job: Job, worker_id: str) -> None:
    """Emits ``LeaseLostEvent``: the job was running here, and its lease is no longer this worker's."""
    events.emit(LeaseLostEvent(job_id=job.id, task=job.task, worker_id=worker_id))


def emit_unsuccessful(
    events: Events, job: Job, settlement: Settlement, answer: Settled, *, seconds: float, dlq_key: str | None
) -> None:
    """Emits the event of an accepted settlement other than a success."""
    reason, error, trace_id = str(settlement.reason or ""), settlement.error or "", trace_id_of(job)
    match answer.state:
        case JobState.FAILED:
            retry_at = None if answer.run_at_us is None else to_datetime(answer.run_at_us)
            events.emit(
                JobFailedEvent(
                    job_id=job.id,
                    task=job.task,
                    attempt=job.attempts,
                    reason=reason,
                    error=error,
                    retry_at=retry_at,
                    seconds=round(seconds, 6),
                    trace_id=trace_id,
                )
            )
        case JobState.DEAD:
            events.emit(
                JobDead(
                    job_id=job.id,
                    task=job.task,
                    attempt=job.attempts,
                    reason=reason,
                    error=error,
                    seconds=round(seconds, 6),
                    dlq_key=dlq_key,
                    trace_id=trace_id,
                )
            )
        case JobState.CANCELLED:
            events.emit(JobCancelledEvent(job_id=job.id, task=job.task, attempt=job.attempts, trace_id=trace_id))
        case JobState.WAITING:
            has_deadline = answer.run_at_us is not None and answer.run_at_us < NEVER_US
            until = to_datetime(answer.run_at_us or 0) if has_deadline else None
            events.emit(JobSuspended(job_id=job.id, task=job.task, reason=reason, until=until, trace_id=trace_id))
        case JobState.SCHEDULED if settlement.reason in DEFERRALS:
            retry_at = None if answer.run_at_us is None else to_datetime(answer.run_at_us)
            events.emit(JobDeferred(job_id=job.id, task=job.task, reason=reason, retry_at=retry_at))
        case _:
            if error:
                events.emit(JobUnstartable(job_id=job.id, task=job.task, error=error))
            events.emit(JobReleased(job_id=job.id, task=job.task, reason=reason))


def emit_recovered(events: Events, job: Job, settlement: Settlement, answer: Settled, dlq_key: str | None) -> None:
    """Emits the event of a job whose expired lease was settled: of a failed attempt, if it is ready for the next."""
    if answer.state is JobState.QUEUED:
        settlement = replace(settlement, error=f"{settlement.error}; ready for its next attempt")
        answer = replace(answer, state=JobState.FAILED, run_at_us=None)
    emit_unsuccessful(events, job, settlement, answer, seconds=0.0, dlq_key=dlq_key)


def dlq_key_of(settings: Settings, queue: str) -> str | None:
    """Returns the key of the transport's list of dead letters of a queue; None without a transport."""
    if settings.transport == "none":
        return None
    return TransportKeys(settings.transport_key, settings.transport_dead_key).dead_letter_key(queue)
