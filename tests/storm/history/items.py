"""Items of a history: one for each job of a request or of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from holdfast.core.models import BulkResult, Claim, Job, JobState, Lease, NewJob, Settled, Settlement, Submitted
from holdfast.core.workers import HeartbeatReply, LeaseStatus
from tests.storm.history.records import Items


def describe_job(job_id: str, job: Job | None) -> dict[str, Any]:
    """Returns the item of a job that was read; without one it is not there."""
    if job is None:
        return {"job": job_id, "state": None}
    return {"job": job_id, "state": job.state, "claims": job.claims, "attempts": job.attempts}


def describe_new_jobs(jobs: Sequence[NewJob]) -> Items:
    """Returns the items of a submission."""
    fields = ("queue", "priority", "key", "max_attempts", "delay")
    return [
        {"job": job.id, "unique": job.unique and job.unique.key, **{each: getattr(job, each) for each in fields}}
        for job in jobs
    ]


def describe_submitted(jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> Items:
    """Returns the items of the answers to a submission. ``id``: of the job that there is now."""
    return [
        {"job": job.id, "accepted": each.job_id == job.id, "created": each.created, "id": each.job_id}
        for job, each in zip(jobs, answers, strict=True)
    ]


def describe_claim(claim: Claim, lease_for: timedelta) -> Items:
    """Returns the items of claimed jobs."""
    known = {"accepted": True, "state": JobState.RUNNING, "lease_for": span_us(lease_for)}
    fields = ("claims", "attempts", "max_attempts", "queue", "run_at_us")
    known |= {"lease_until_us": claim.lease_until_us}
    return [{"job": job.id, **known, **{each: getattr(job, each) for each in fields}} for job in claim.jobs]


def describe_settlements(settlements: Sequence[Settlement]) -> Items:
    """Returns the items of settlements. ``mark``: the text by which their effect is known."""
    return [
        {
            "job": each.job_id,
            "claims": each.claims,
            "to": each.state,
            "worker": each.worker,
            "lost": each.lease_expired or None,
            "mark": (each.result or "").strip('"') or each.error,
        }
        for each in settlements
    ]


def describe_settled(answers: Sequence[Settled]) -> Items:
    """Returns the items of the answers to settlements. ``open``: a refusal that does not say that nothing changed: the
    job is locked, or it is gone, and with it the evidence of a settlement whose first answer was lost."""
    return [
        {"job": each.job_id, "accepted": each.accepted, "state": each.state, "open": each.locked or each.state is None}
        for each in answers
    ]


def describe_leases(leases: Sequence[Lease], lease_for: timedelta) -> Items:
    """Returns the items of a heartbeat."""
    return [{"job": lease.job_id, "claims": lease.claims, "lease_for": span_us(lease_for)} for lease in leases]


def describe_heartbeat(leases: Sequence[Lease], reply: HeartbeatReply) -> Items:
    """Returns the items of the answer to a heartbeat. ``open``: another transaction has locked the job, and its lease
    was neither renewed nor lost."""
    renewed = (LeaseStatus.HELD, LeaseStatus.CANCEL)
    return [
        {"job": lease.job_id, "accepted": status in renewed, "open": status is LeaseStatus.LOCKED}
        for lease, status in zip(leases, reply.statuses, strict=True)
    ]


def describe_changes(ids: Sequence[str], answer: BulkResult) -> Items:
    """Returns the items of the answer to an operator's call."""
    changed = dict(answer.changed)
    states = {**dict(answer.refused), **changed}
    return [{"job": job_id, "accepted": job_id in changed, "state": states.get(job_id)} for job_id in ids]


def span_us(span: timedelta) -> int:
    """Returns a duration in microseconds."""
    return span // timedelta(microseconds=1)
