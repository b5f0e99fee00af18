"""The HTTP API of AtlasQueue: a FastAPI application."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from starlette.routing import Mount, Route

from holdfast import Invalid
from holdfast.integrations.fastapi import (
    HoldfastDep,
    IdempotencyKey,
    Refusal,
    RequestContext,
    StrictRoute,
    add_holdfast_api,
    find_job,
    holdfast_lifespan,
    problem_responses,
    require_scope,
    submit_job,
)
from holdfast.views.documents import JobDocument, to_builtins
from holdfast.web.asgi import Api
from holdfast.web.fields import REFERENCE_PATTERN, TASK_PATTERN, whole_number

OPERATIONS = ("/metrics", "/metrics/", "/health/live", "/health/ready", "/docs", "/docs/{asset}")
"""Operations of Holdfast beside the routes of AtlasQueue; all of them stand below ``/holdfast``."""

Submitting = Annotated[RequestContext, Depends(require_scope("submit"))]
Reading = Annotated[RequestContext, Depends(require_scope("read"))]


class Submission(BaseModel):
    """A job to be stored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str = Field(pattern=TASK_PATTERN, examples=["email.send"])
    payload: dict[str, Any] = Field(examples=[{"to": "user@example.com"}])
    max_attempts: Annotated[int, BeforeValidator(whole_number)] = Field(5, ge=1, le=25)
    metadata: dict[str, Any] = Field({}, description="Your own; `then` lists the jobs that follow.")


class JobView(BaseModel):
    """A job under the names of AtlasQueue."""

    id: UUID
    type: str = Field(validation_alias="task")
    status: Literal["queued", "running", "succeeded", "failed", "dead", "cancelled"] = Field(validation_alias="state")
    attempts: int
    max_attempts: int | None
    payload: Any
    run_at: datetime | None
    created_at: datetime
    ended_at: datetime | None
    result: Any
    error: str | None

    @field_validator("status", mode="before")
    @classmethod
    def _as_queued(cls, state: str) -> str:
        """A job whose time has not come is queued: ``run_at`` says when; None while it waits for others."""
        return "queued" if state in ("scheduled", "waiting") else state


class Health(BaseModel):
    """A sign of life."""

    status: str
    service: str


SHOW_PROBLEMS = problem_responses(401, 403, 404, 422, 429, 503)
SUBMIT_PROBLEMS = problem_responses(401, 403, 408, 409, 413, 415, 422, 429, 503)
router = APIRouter(route_class=StrictRoute)


@router.post("/v1/jobs", tags=["Jobs"], status_code=201, responses={200: {"model": JobView}, **SUBMIT_PROBLEMS})
async def submit(wanted: Submission, key: IdempotencyKey, call: Submitting, response: Response) -> JobView:
    """Stores a job. A known key answers 200 with its job."""
    options = wanted.model_dump(exclude_unset=True, exclude={"type", "payload"})
    try:
        draft = call.app.draft_job(wanted.type, wanted.payload, key=key, **options)
    except Invalid as error:
        if error.field != "task":
            raise
        raise Invalid("type", error.value, error.remedy) from None
    handle, job = await submit_job(call, draft)
    if handle.wake_up_delayed:
        detail = "the job is stored, and Redis could not be notified: a sweep will find it"
        remedy = "send it again with the same Idempotency-Key: it stays one job"
        raise Refusal(503, "unheard", detail, remedy, (b"retry-after", b"2"))
    response.status_code = 201 if handle.created else 200
    return _shown(call.visible_job(job, own=handle.created))


@router.get("/v1/jobs/{job_id}", tags=["Jobs"], responses=SHOW_PROBLEMS)
async def show(
    job_id: Annotated[str, Field(pattern=REFERENCE_PATTERN, description="Its id, or `key:` and its idempotency key.")],
    call: Reading,
    wait: Annotated[int, Query(ge=0, le=60, description="Answers when the job has ended, or after these seconds.")] = 0,
) -> JobView:
    """Shows a job."""
    return _shown(call.visible_job(await find_job(call, job_id, wait)))


@router.get("/health", tags=["Health"])
async def check_health(app: HoldfastDep) -> Health:
    """Answers while the process lives; the store is not asked."""
    return Health(status="ok", service=app.settings.api_service)


def _shown(document: JobDocument) -> JobView:
    return JobView.model_validate(to_builtins(document))


def create_site(api: Api) -> FastAPI:
    """Returns the application, around this API of Holdfast."""
    site = FastAPI(
        title="AtlasQueue",
        lifespan=holdfast_lifespan(api.app),
        docs_url=None,  # Holdfast's page shows the document of this application, without a network
        redoc_url=None,
        routes=[*(Route(path, api) for path in OPERATIONS), Mount("/holdfast", api)],
    )
    add_holdfast_api(site, api)
    site.include_router(router)
    return site
