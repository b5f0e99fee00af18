"""Groups of jobs that failed with the same error."""

from __future__ import annotations

import msgspec

from holdfast.core.error_groups import check_error_group
from holdfast.core.errors import NotFound
from holdfast.core.models import JobFilter
from holdfast.views.error_groups import GROUP, ErrorGroupDetails, ErrorGroupDocument, describe_group, describe_groups
from holdfast.web.fields import PAGING, QUEUE, TAG, Field
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

_LIMIT: Field = msgspec.structs.replace(PAGING[0], doc="Groups in the list.")


class ErrorGroupList(msgspec.Struct, frozen=True):
    """Groups of the jobs that failed last, at most 10,000 dead and 10,000 that wait for their next attempt."""

    groups: list[ErrorGroupDocument]
    total: int


async def find(call: RequestContext) -> ApiResponse:
    """Lists groups of errors."""
    queue, tag = call.query.get("queue"), call.query.get("tag")
    if queue is not None:
        call.caller.check_queue(queue)
    groups = await call.app.find_error_groups(
        lambda name: call.caller.allows_queue(name) and queue in (None, name),
        where=None if tag is None else JobFilter(tag=tag, queue=queue),
    )
    shown = await describe_groups(await call.app.open_store(), groups[: call.query.get("limit", 50)], call.redaction)
    return json_response(200, ErrorGroupList(shown, len(groups)))


async def show_group(call: RequestContext) -> ApiResponse:
    """Shows a group of errors."""
    group_id = check_error_group(call.path["group"], "group")
    groups = await call.app.find_error_groups(call.caller.allows_queue)
    found = next((each for each in groups if each.id == group_id), None)
    if found is None:
        raise NotFound(f"no failed job is in error group {group_id}")
    return json_response(200, await describe_group(await call.app.open_store(), found, call.redaction))


_DETAILS = {**GROUP, "place": "shop/mail.py in send", "traceback": None}

OPERATIONS = (
    Operation(
        name="list_error_groups",
        method="GET",
        path="/v1/errors",
        scope="read",
        group="Errors",
        summary="List errors: failed jobs with the same cause in one group",
        doc="The latest failure first. Dead jobs, and those that wait for their next attempt: of each the 10,000 that "
        "failed last; with `tag` all that carry it. The filter `error_group` of other operations chooses the jobs of a "
        "group.",
        handler=find,
        query=(msgspec.structs.replace(QUEUE, doc="Only jobs of this queue."), TAG, _LIMIT),
        answers={200: ResponseSpec(ErrorGroupList, "The groups.", {"groups": [GROUP], "total": 1})},
    ),
    Operation(
        name="show_error_group",
        method="GET",
        path="/v1/errors/{group}",
        scope="read",
        group="Errors",
        summary="Show an error with the latest traceback",
        handler=show_group,
        answers={200: ResponseSpec(ErrorGroupDetails, "The group.", _DETAILS)},
        refusals=(404,),
    ),
)
