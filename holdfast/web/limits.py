"""Limits: how many jobs run at once and how often they start; added, changed and paused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.app.limits import found_definition
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.limits import MAX_CONCURRENCY, MAX_DEPTH, MAX_SHARE, MAX_WEIGHT, Limit
from holdfast.core.validation import check_name, parse_duration
from holdfast.views.limits import LIMIT, MAX_VALUES, LimitDocument, limit_document, list_documents, parse_key_values
from holdfast.web.bulk import NOTHING
from holdfast.web.fields import (
    NAME_PATTERN,
    OBJECT,
    QUEUE_VALUE,
    TASK_VALUE,
    BodySchema,
    Field,
    ValueType,
    any_value,
    array_value,
    at_most_one,
    boolean_value,
    integer_text,
    integer_value,
    text_value,
)
from holdfast.web.messages import ApiResponse, Refusal, json_response
from holdfast.web.routing import Handler, Operation, RequestContext, ResponseSpec

_NAME = ValueType({"type": "string", "pattern": NAME_PATTERN}, lambda value, field: check_name(field, value))
_PATH_PATTERN = r"^args(\.[^.]{1,64}){1,8}$"
_WEIGHT = ValueType(
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_WEIGHT},
            {"type": "string", "pattern": _PATH_PATTERN},
        ],
        "default": 1,
    },
    any_value,
)
_SHARES = ValueType(
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 1, "maximum": MAX_SHARE},
        "maxProperties": 1000,
    },
    OBJECT.check,
)
_SPAN = ValueType({"type": ["number", "string"], "minimum": 0, "maxLength": 40}, parse_duration)


def _or_null(value: ValueType) -> ValueType:
    return ValueType(
        {"anyOf": [value.schema, {"type": "null"}]},
        lambda given, field: None if given is None else value.check(given, field),
    )


_SCOPE = (
    Field("queue", QUEUE_VALUE, "It applies to jobs of this queue.", example="crm"),
    Field("task", TASK_VALUE, "It applies to jobs of this task, in any queue."),
    Field("by", text_value(6, 600), "A place in the payload: each value of it has a bucket.", example="args.tenant"),
)
_VALUES = (
    Field(
        "concurrency",
        _or_null(integer_value(1, MAX_CONCURRENCY)),
        "Jobs that may run at once.",
        example=2,
        nullable=True,
    ),
    Field(
        "rate",
        _or_null(text_value(3, 20)),
        'Starts in a span: "10/s", "90/m", "100/15m".',
        example="10/s",
        nullable=True,
    ),
    Field(
        "burst",
        _or_null(integer_value(1, MAX_CONCURRENCY)),
        "Starts that may come at once; left out: a tenth of a second's worth, at least the weight.",
        nullable=True,
    ),
    Field(
        "depth",
        _or_null(integer_value(1, MAX_DEPTH)),
        "Jobs that may wait in the queue; submissions beyond it are answered with 429.",
        nullable=True,
    ),
    Field("weight", _WEIGHT, "The room and tokens that a job takes, or the place in its payload that says so."),
    Field("shares", _SHARES, "Turns by value of the key; 1 for any other value.", example={"acme": 3}),
)
LIMIT_REQUEST = BodySchema(
    name="LimitRequest",
    doc="A limit of a queue or of a task; of neither: handlers take tokens of its rate.",
    fields=(
        Field("name", _NAME, "The limit's name.", example="crm", required=True),
        *_SCOPE,
        *_VALUES,
        Field("replace", boolean_value(False), "Replace a limit of this name that an operator made."),
    ),
    refused=at_most_one("queue", "task"),
    shown=("queue", "concurrency"),
)
LIMIT_CHANGE = BodySchema(
    name="LimitChange", doc="The values to change; null takes one away. At least one.", fields=_VALUES, refused=[]
)
_KEY_VALUES = Field(
    "values",
    array_value(ValueType({}, any_value), MAX_VALUES),
    "Of a limit with a key: the values that are meant.",
    example=["acme"],
)
PAUSE = BodySchema(
    name="LimitPause",
    doc="How long no job starts.",
    fields=(Field("for", _SPAN, 'A span: seconds, or "10m".', example="10m", required=True), _KEY_VALUES),
)
RESUMPTION = BodySchema(
    name="LimitResumption",
    doc="The values of the key whose pause ends; nothing for a limit without a key.",
    fields=(_KEY_VALUES,),
)
_PAGE = Field("limit", integer_text(1, 1000, default=100), "Limits on this page.", example=100)
_AFTER = Field("after", _NAME, "Continue behind this name.", example="crm")
_VALUE = Field(
    "value", text_value(0, 1000), "A value of the key whose use is shown; several.", example="acme", many=True
)


class LimitList(msgspec.Struct, frozen=True):
    """Limits by name."""

    limits: list[LimitDocument]


class PausedLimit(msgspec.Struct, frozen=True):
    """A limit that admits no job for a time."""

    limit: Annotated[str, Meta(description="The limit's name.", examples=["crm"])]
    buckets: Annotated[int, Meta(description="Values of the key that are paused; 1 for a limit without one.", ge=1)]
    paused_for: Annotated[float, Meta(description="Seconds.", ge=0)]


def allows_limit(call: RequestContext, limit: Limit) -> bool:
    """Returns True if the caller may see and change the limit: one of its queues, or any with a key for all queues."""
    return not call.caller.is_restricted or (limit.queue is not None and call.caller.allows_queue(limit.queue))


async def _named(call: RequestContext) -> Limit:
    """The limit that the path names, if it is the caller's."""
    name = check_name("limit", call.path["limit"])
    limit = await call.app.limits.get(name)
    return found_definition(limit if allows_limit(call, limit) else None, f"limit {name}")


async def list_limits(call: RequestContext) -> ApiResponse:
    """Returns a page of the limits that are the caller's."""
    after, most = call.query.get("after", ""), call.query.get("limit", 100)
    limits = [each for each in await call.app.limits.find_all() if each.name > after and allows_limit(call, each)]
    return json_response(200, LimitList(await list_documents(await call.app.open_store(), limits[:most])))


async def show_limit(call: RequestContext) -> ApiResponse:
    """Returns one limit, with the use of the values that the query names."""
    limit, values = await _named(call), call.query.get("value", ())
    if values and limit.by is None:
        raise Invalid("value", values[0], "leave it out: this limit has one bucket for all jobs")
    if len(values) > MAX_VALUES:
        raise Invalid("value", len(values), f"name at most {MAX_VALUES} values")
    if limit.by is not None and not values:
        return json_response(200, limit_document(limit))
    return json_response(200, limit_document(limit, await call.app.limits.use(limit.name, *parse_key_values(values))))


async def add_limit(call: RequestContext) -> ApiResponse:
    """Adds a limit, or replaces one."""
    given = {field: value for field, value in call.body.items() if value is not None}
    name, replacing = given.pop("name"), given.pop("replace", False)
    _check_scope(call, given)
    known = {each.name: each for each in await call.app.limits.find_all()}.get(name)
    if known is not None and not allows_limit(call, known):
        raise Conflict(f"limit {name} exists; choose another name")
    limit = await call.app.limits.add(name, replace_existing=replacing, **given)
    return json_response(200 if known else 201, limit_document(limit))


def _check_scope(call: RequestContext, given: Mapping[str, Any]) -> None:
    """Refuses a limit of jobs of other queues than the caller's."""
    if "queue" in given:
        call.caller.check_queue(given["queue"])
    elif call.caller.is_restricted:
        detail = "a limit of a task or of handlers concerns every queue, and this key is limited to some"
        raise Refusal(403, "forbidden", detail, "name a queue, or use a key for every queue")


async def change_limit(call: RequestContext) -> ApiResponse:
    """Changes values of a limit."""
    limit = await _named(call)
    if not call.body:
        raise Invalid("body", {}, "name a value to change: concurrency, rate, burst, weight, depth, shares")
    return json_response(200, limit_document(await call.app.limits.change(limit.name, **call.body)))


async def reset_limit(call: RequestContext) -> ApiResponse:
    """Takes the values of the code again."""
    return json_response(200, limit_document(await call.app.limits.reset((await _named(call)).name)))


async def remove_limit(call: RequestContext) -> ApiResponse:
    """Removes a limit; its jobs run without."""
    await call.app.limits.remove((await _named(call)).name)
    return ApiResponse(204)


async def pause_limit(call: RequestContext) -> ApiResponse:
    """Starts no job under a limit for a time."""
    limit, values, span = await _named(call), call.body.get("values", ()), call.body["for"]
    _refuse_values(limit, values)
    await call.app.limits.pause(limit.name, span, *values)
    return json_response(200, PausedLimit(limit.name, len(values) or 1, span.total_seconds()))


async def resume_limit(call: RequestContext) -> ApiResponse:
    """Ends a pause of a limit."""
    limit, values = await _named(call), call.body.get("values", ())
    _refuse_values(limit, values)
    resumed = await call.app.limits.resume(limit.name, *values)
    return json_response(200, limit_document(resumed, await call.app.limits.use(limit.name, *values)))


def _refuse_values(limit: Limit, values: Sequence[Any]) -> None:
    if values and limit.by is None:
        raise Invalid("values", values, "leave it out: this limit has one bucket for all jobs")


def _operation(name: str, method: str, path: str, summary: str, handler: Handler, **more: Any) -> Operation:
    """An operation on limits; one with a name in its path may not find it."""
    parts: dict[str, Any] = {"scope": "read" if method == "GET" else "operate", "group": "Limits"}
    if "{" in path:
        parts["refusals"] = (404, *more.pop("refusals", ()))
    if method == "POST" and "body" not in more:
        more |= {"body": NOTHING, "body_optional": True}
    return Operation(name=name, method=method, path=path, summary=summary, handler=handler, **parts, **more)


_ONE = "/v1/limits/{limit}"
_DOCUMENT = ResponseSpec(LimitDocument, "The limit.", LIMIT)
_UNSEEN = LIMIT | {"buckets": []}
OPERATIONS = (
    _operation(
        "list_limits",
        "GET",
        "/v1/limits",
        "List limits by name",
        list_limits,
        doc="With the use of those without a key. A key that is limited to queues sees the limits of its queues; those "
        "of tasks and of handlers need a key for every queue. So it is for each operation on limits.",
        query=(_PAGE, _AFTER),
        answers={200: ResponseSpec(LimitList, "A page.", {"limits": [_UNSEEN]})},
    ),
    _operation(
        "add_limit",
        "POST",
        "/v1/limits",
        "Add a limit",
        add_limit,
        doc="A limit that code declares is changed by `change_limit`, not replaced.",
        body=LIMIT_REQUEST,
        answers={
            201: ResponseSpec(LimitDocument, "The limit was added.", _UNSEEN),
            200: ResponseSpec(LimitDocument, "The limit was replaced.", _UNSEEN),
        },
        refusals=(409,),
    ),
    _operation(
        "show_limit", "GET", _ONE, "Show a limit and its use", show_limit, query=(_VALUE,), answers={200: _DOCUMENT}
    ),
    _operation(
        "change_limit",
        "PATCH",
        _ONE,
        "Change values of a limit",
        change_limit,
        doc="They hold at once, and before those of the code, until `reset_limit`. `shares` replaces all shares.",
        body=LIMIT_CHANGE,
        answers={200: ResponseSpec(LimitDocument, "The limit.", _UNSEEN)},
        refusals=(409,),
    ),
    _operation(
        "remove_limit",
        "DELETE",
        _ONE,
        "Remove a limit; its jobs run without",
        remove_limit,
        doc="One that code declares returns when a worker starts.",
        answers={204: ResponseSpec(None, "The limit is gone.")},
        refusals=(409,),
    ),
    _operation(
        "reset_limit",
        "POST",
        f"{_ONE}/reset",
        "Take the values of the code again",
        reset_limit,
        answers={200: ResponseSpec(LimitDocument, "The limit.", _UNSEEN)},
        refusals=(409,),
    ),
    _operation(
        "pause_limit",
        "POST",
        f"{_ONE}/pause",
        "Start no job under a limit for a time",
        pause_limit,
        doc="Running jobs go on. A pause ends by itself or by `resume_limit`; a later one makes it longer, never "
        "shorter.",
        body=PAUSE,
        answers={200: ResponseSpec(PausedLimit, "It is paused.", {"limit": "crm", "buckets": 1, "paused_for": 600.0})},
    ),
    _operation(
        "resume_limit",
        "POST",
        f"{_ONE}/resume",
        "End a pause of a limit",
        resume_limit,
        doc="Also a pause that a handler made by RetryAfter.",
        body=RESUMPTION,
        body_optional=True,
        answers={200: ResponseSpec(LimitDocument, "The limit.", LIMIT)},
        refusals=(409,),
    ),
)
