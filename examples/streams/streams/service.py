"""The HTTP API of a service, a FastAPI application: health, jobs by type, dead letters and their replay.

Beside these routes, Holdfast's own API stands below ``/holdfast``. Errors are problem documents (RFC 9457).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import msgspec
from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel, Field

from holdfast import Conflict, Holdfast, Invalid, Job, JobFilter, JobState
from holdfast.core.validation import is_too_deep
from holdfast.integrations.fastapi import HoldfastDep, StrictRoute, holdfast_lifespan
from holdfast.web import create_app
from holdfast.web.fields import TASK_PATTERN
from streams.sites import StrictBody, create_site

Status = Literal["pending", "processing", "completed", "failed"]
STATUS: dict[JobState, Status] = {
    JobState.RUNNING: "processing",
    JobState.SUCCEEDED: "completed",
    JobState.DEAD: "failed",
    JobState.CANCELLED: "failed",
}
"""Status of a job by its state; in every other state it is pending: it waits for a worker, a retry or a date."""


class Submission(StrictBody):
    """A job to be stored."""

    type: str = Field(pattern=TASK_PATTERN, examples=["notification.send"])
    payload: dict[str, Any] = Field(examples=[{"email": "ada@example.com"}])
    idempotency_key: str | None = Field(None, min_length=1, max_length=512, description="One job for each key.")


class Accepted(BaseModel):
    """Answer to a submission: the job is stored, and not yet run."""

    job_id: UUID
    status: Literal["accepted"] = "accepted"
    created: bool = Field(description="False: the key already stands for this job.")


class JobView(BaseModel):
    """A job as the service shows it."""

    job_id: UUID
    service: str
    type: str
    status: Status
    idempotency_key: str | None
    attempt_count: int
    max_attempts: int | None
    error: str | None
    result: Any
    next_run_at: datetime | None
    created_at: datetime
    ended_at: datetime | None


class DeadLetter(BaseModel):
    """A job that has failed for good."""

    job_id: UUID
    type: str
    payload: Any
    error: str | None
    reason: str | None
    attempt_count: int
    ended_at: datetime | None


class DeadLetters(BaseModel):
    """A page of dead letters, newest first."""

    service: str
    jobs: list[DeadLetter]
    cursor: str | None = Field(description="Continues the listing; null: that was all.")


class Health(BaseModel):
    """The process answers. Neither database nor Redis is asked: ``/holdfast/health/ready`` does that."""

    status: Literal["ok"] = "ok"
    service: str


router = APIRouter(route_class=StrictRoute)


@router.get("/health", tags=["Health"])
async def check_health(app: HoldfastDep) -> Health:
    """Answers while the process lives."""
    return Health(service=app.settings.api_service)


@router.post("/jobs", status_code=202, tags=["Jobs"])
async def submit_job(wanted: Submission, app: HoldfastDep) -> Accepted:
    """Stores a job, then adds it to the service's stream. A known key returns its job."""
    key = wanted.idempotency_key
    if key is None:
        if app.settings.key_required:
            raise Invalid("idempotency_key", None, "give each job a key of its own", "is missing")
        key = str(uuid4())
    handle = await app.enqueue(wanted.type, wanted.payload, key=key)
    return Accepted(job_id=UUID(handle.id), created=handle.created)


@router.get("/jobs/{job_id}", tags=["Jobs"])
async def show_job(job_id: UUID, app: HoldfastDep) -> JobView:
    """Shows where a job stands."""
    return view_of(await app.get(str(job_id)), app.settings.api_service)


@router.get("/dlq", tags=["Dead letters"])
async def list_dead_letters(
    app: HoldfastDep, limit: Annotated[int, Query(ge=1, le=500)] = 50, cursor: str | None = None
) -> DeadLetters:
    """Lists the jobs that have failed for good."""
    page = await app.find(JobFilter(states=(JobState.DEAD,)), limit=limit, cursor=cursor)
    return DeadLetters(
        service=app.settings.api_service, jobs=[dead_letter_of(job) for job in page.jobs], cursor=page.cursor
    )


@router.post("/dlq/{job_id}/replay", status_code=202, tags=["Dead letters"])
async def replay_dead_letter(job_id: UUID, app: HoldfastDep) -> Accepted:
    """Queues a dead letter again, with new attempts. Its recorded steps are not run again."""
    job = await app.get(str(job_id))
    if job.state is not JobState.DEAD:
        raise Conflict(f"job {job_id} is {job.state}, not dead; only dead letters are replayed")
    await app.replay_one(job.id)
    return Accepted(job_id=job_id, created=False)


def view_of(job: Job, service: str) -> JobView:
    """Returns the view of a job. ``next_run_at``: when a pending job may start; None if it waits for others."""
    status = STATUS.get(job.state, "pending")
    return JobView(
        job_id=UUID(job.id),
        service=service,
        type=job.task,
        status=status,
        idempotency_key=job.key,
        attempt_count=job.attempts,
        max_attempts=job.max_attempts,
        error=job.error,
        result=job.return_value() if job.state is JobState.SUCCEEDED else None,
        next_run_at=job.run_at if status == "pending" and job.state is not JobState.WAITING else None,
        created_at=job.created_at,
        ended_at=job.ended_at,
    )


def dead_letter_of(job: Job) -> DeadLetter:
    """Returns the view of a dead letter."""
    return DeadLetter(
        job_id=UUID(job.id),
        type=job.task,
        payload=payload_of(job),
        error=job.error,
        reason=job.reason,
        attempt_count=job.attempts,
        ended_at=job.ended_at,
    )


def payload_of(job: Job) -> Any:
    """Returns the payload as JSON values, also one that is no object; what cannot be shown as JSON, as text."""
    try:
        payload = msgspec.json.decode(job.payload)
    except (msgspec.DecodeError, RecursionError):
        return job.payload
    return job.payload if is_too_deep(payload) else payload


def create_service(app: Holdfast, *routers: APIRouter) -> FastAPI:
    """Returns the FastAPI application of a service: the common routes, its own, and Holdfast's API."""
    api = create_app(app)
    site = create_site(api, app.settings.api_service, holdfast_lifespan(api.app))
    for each in (router, *routers):
        site.include_router(each)
    site.mount("/holdfast", api)
    return site
