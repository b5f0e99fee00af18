"""Errors as RFC 9457 problem documents: a stable code, the field, the value shown safely, the remedy."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.errors import (
    ConfigError,
    Conflict,
    HoldfastError,
    Invalid,
    NotFound,
    TooBroad,
    Unavailable,
    quote_value,
)
from holdfast.web.responses import PROBLEM, ApiResponse, Header, Refusal

RETRY_AFTER = 2
"""Seconds after which a client may try again where the store was away."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its remedy (RFC 9457)."""

    type: Annotated[str, Meta(description="A name for the kind of problem.", examples=["urn:holdfast:problem:invalid"])]
    title: Annotated[str, Meta(description="The status in words.", examples=["Unprocessable Content"])]
    status: Annotated[int, Meta(examples=[422])]
    detail: Annotated[
        str,
        Meta(
            description="What is wrong this time, for people.",
            examples=["priority: 101 is not valid; give a whole number from -100 to 100"],
        ),
    ]
    code: Annotated[str, Meta(description="The stable word for it, for programs.", examples=["invalid"])]
    request_id: Annotated[str, Meta(description="As in the header X-Request-Id.", examples=["6f1c2a9e0b7d4c35"])]
    field: Annotated[
        str | UnsetType, Meta(description="What is wrong, where it is a value.", examples=["priority"])
    ] = UNSET
    value: Annotated[
        str | UnsetType, Meta(description="The value, quoted and cut to 64 characters.", examples=["101"])
    ] = UNSET
    remedy: Annotated[
        str | UnsetType, Meta(description="What to do.", examples=["give a whole number from -100 to 100"])
    ] = UNSET
    stored: Annotated[
        list[str | None] | UnsetType,
        Meta(
            description="There where a batch was refused after it was stored, or a part of it: the ids of the jobs it "
            "stored, in its order, null for those it did not store. Send those again, after a conflict under other "
            "keys, and none of the others."
        ),
    ] = UNSET


_encode = msgspec.json.Encoder().encode
_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # older Pythons call them otherwise
_AWAY = "the store is away, busy or full"
_MISSET = "the settings of Holdfast and its store do not go together as they are: the log has why under this request_id"
_BROKEN = "something went wrong in Holdfast itself; its log has the cause under this request_id"


def answer_to(error: Exception, request_id: str) -> ApiResponse:
    """The answer to a request that ended in this error.

    What is not about the request tells nothing of itself: addresses, files, users and statements are in the log.
    """
    match error:
        case Refusal():
            return problem_response(
                error.status, error.code, error.detail, request_id, *error.headers, remedy=error.remedy
            )
        case Invalid():
            said = {"field": error.field, "value": quote_value(error.value), "remedy": error.remedy}
            return problem_response(error.http_status, error.code, str(error), request_id, **said)
        case Conflict() if any(error.stored):
            return problem_response(error.http_status, error.code, str(error), request_id, stored=list(error.stored))
        case Unavailable():
            return _unavailable(error, request_id)
        case TooBroad():
            return problem_response(error.http_status, error.code, str(error), request_id, remedy=error.remedy)
        case NotFound():
            remedy = "GET /v1/jobs, /v1/queues and /v1/workers of Holdfast's API list what there is"
            return problem_response(error.http_status, error.code, str(error), request_id, remedy=remedy)
        case ConfigError():
            remedy = "tell its operator; `holdfast doctor` says what is wrong"
            return problem_response(500, error.code, _MISSET, request_id, remedy=remedy)
        case HoldfastError() if error.http_status < 500:
            return problem_response(error.http_status, error.code, str(error), request_id)
    return problem_response(500, "internal", _BROKEN, request_id, remedy="tell its operator")


def _unavailable(error: Unavailable, request_id: str) -> ApiResponse:
    retry = (b"retry-after", str(RETRY_AFTER).encode())
    detail = f"{_AWAY}; {error.outcome}" if error.outcome else _AWAY
    if any(error.stored):
        remedy, stored = "send those again whose place in stored is null, and none of the others", list(error.stored)
        return problem_response(
            503, error.code, f"{detail}; a part is stored", request_id, retry, remedy=remedy, stored=stored
        )
    remedy = "try again; with an idempotency key or an id that is harmless"
    return problem_response(503, error.code, detail, request_id, retry, remedy=remedy)


def problem_response(
    status: int, code: str, detail: str, request_id: str, *headers: Header, **said: Any
) -> ApiResponse:
    """A problem document as an answer."""
    body = Problem(
        type=f"urn:holdfast:problem:{code}",
        title=_TITLES.get(status) or HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=request_id,
        **said,
    )
    return ApiResponse(status, _encode(body), PROBLEM, headers)
