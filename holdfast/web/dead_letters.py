"""Dead letters, queue by queue."""

from __future__ import annotations

import msgspec

from holdfast.core.errors import Conflict, NotFound
from holdfast.core.models import Job, JobState
from holdfast.views.bulk_operations import replay_operation
from holdfast.views.documents import DEAD_JOB, JOB
from holdfast.web.bulk import (
    AFTER,
    DRY_RUN,
    FILTER,
    LIMIT,
    RATE,
    REPLAY_ONE,
    BulkAnswer,
    job_operation,
    replay_job,
    run_bulk,
)
from holdfast.web.fields import FILTERS, PAGING, BodySchema, Field
from holdfast.web.jobs import JobDetails, JobPage, find_job, job_story, page_of, parse_filter
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec, named_queue

_DEAD = (JobState.DEAD,)
_FIXED = ("state", "queue")  # fields that the path sets
_FILTER = BodySchema(
    name="DeadLetterFilter",
    doc="Every field that is given must match.",
    fields=tuple(field for field in FILTER.fields if field.name not in _FIXED),
)


REPLAY_DEAD = BodySchema(
    name="ReplayDeadLettersRequest",
    doc="Which of the queue's dead letters: all, unless a filter says otherwise.",
    fields=(Field("filter", _FILTER.value, "Those that match."), DRY_RUN, LIMIT, RATE, AFTER),
    inner=(_FILTER,),
)


async def find(call: RequestContext) -> ApiResponse:
    """A page of the dead letters of a queue."""
    query = dict(call.query)
    limit, cursor = query.pop("limit", 50), query.pop("cursor", None)
    query["queue"] = named_queue(call)
    where = await parse_filter(call, query, _DEAD)
    return json_response(200, await page_of(call, where, limit, cursor))


async def get_dead_letter(call: RequestContext) -> ApiResponse:
    """A dead letter with its story."""
    return json_response(200, await job_story(call, await _dead_letter(call)))


async def replay_one(call: RequestContext) -> ApiResponse:
    """Queue a dead letter again."""
    return await replay_job(call, await _dead_letter(call))


async def _dead_letter(call: RequestContext) -> Job:
    queue = named_queue(call)
    job = await find_job(call, call.path["job_id"])
    if job.queue != queue:
        raise NotFound(f"queue {queue} has no job {job.id}")
    if job.state is not JobState.DEAD:
        raise Conflict(f"job {job.id} is no dead letter: it is {job.state}")
    return job


async def replay(call: RequestContext) -> ApiResponse:
    """Queue dead letters of a queue again."""
    queue = named_queue(call)
    given = {**call.body, "filter": {**call.body.get("filter", {}), "queue": queue}}
    return json_response(200, await run_bulk(call, replay_operation(states=_DEAD, rate=call.body.get("rate")), given))


OPERATIONS = (
    Operation(
        name="list_dead_letters",
        method="GET",
        path="/v1/queues/{queue}/dead",
        scope="read",
        group="Dead letters",
        summary="List the dead letters of a queue",
        doc="Newest first.",
        handler=find,
        query=(*(field for field in FILTERS if field.name not in _FIXED), *PAGING),
        answers={200: ResponseSpec(JobPage, "A page.", {"jobs": [DEAD_JOB], "cursor": None})},
    ),
    Operation(
        name="show_dead_letter",
        method="GET",
        path="/v1/queues/{queue}/dead/{job_id}",
        scope="read",
        group="Dead letters",
        summary="Show a dead letter",
        handler=get_dead_letter,
        answers={200: ResponseSpec(JobDetails, "The dead letter.", DEAD_JOB | {"history": [], "trace_id": None})},
        refusals=(404, 409),
    ),
    msgspec.structs.replace(
        job_operation(
            "replay_dead_letter",
            replay_one,
            "Queue a dead letter again with all attempts",
            REPLAY_ONE,
            path="/v1/queues/{queue}/dead/{job_id}/replay",
            example=JOB,
        ),
        group="Dead letters",
    ),
    Operation(
        name="replay_dead_letters",
        method="POST",
        path="/v1/queues/{queue}/dead/replay",
        scope="operate",
        group="Dead letters",
        summary="Queue many dead letters again, at once or at a rate",
        doc="`more` says whether to call again, at a `rate` with `seconds` as `after`; `dry_run` only counts.",
        handler=replay,
        body=REPLAY_DEAD,
        body_optional=True,
        answers={
            200: ResponseSpec(
                BulkAnswer,
                "What was done.",
                {"dry_run": True, "count": 4, "changed": [], "refused": [], "more": False, "seconds": 0.4},
            )
        },
    ),
)
