"""Liveness and readiness of this process."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec


class ServiceHealth(msgspec.Struct, frozen=True):
    """A sign of life."""

    status: str
    service: str
    warnings: Annotated[list[str] | UnsetType, Meta(description="What is to be seen to; left out if nothing is.")] = (
        UNSET
    )
    durability: Annotated[
        str | UnsetType,
        Meta(description="Of `/health/ready`: what the store does for its writes now, and what a crash of it loses."),
    ] = UNSET


async def live(call: RequestContext) -> ApiResponse:
    """The process answers; the store is not asked."""
    return json_response(200, ServiceHealth("ok", call.app.settings.api_service, call.warnings() or UNSET))


async def ready(call: RequestContext) -> ApiResponse:
    """The store answers. A server that took over may keep less than the one that was opened."""
    found = await (await call.app.open_store()).health.durability()
    warnings = [] if found.level == "ok" else [f"durability: {found.text}; {found.remedy}"]
    return json_response(200, ServiceHealth("ready", call.app.settings.api_service, warnings or UNSET, found.text))


def _operation(name: str, path: str, summary: str, status: str) -> Operation:
    kept = "journal_mode=wal, synchronous=FULL: an acknowledged job survives a power cut"
    durability = {"durability": kept} if status == "ready" else {}
    return Operation(
        name=name,
        method="GET",
        path=path,
        scope=None,
        group="Health",
        summary=summary,
        handler=ready if status == "ready" else live,
        answers={200: ResponseSpec(ServiceHealth, "Yes.", {"status": status, "service": "holdfast-api"} | durability)},
    )


OPERATIONS = (
    _operation("check_health", "/health", "Whether this process answers", "ok"),
    _operation("check_live", "/health/live", "The same, for a liveness probe", "ok"),
    _operation("check_ready", "/health/ready", "Whether the store answers: for a readiness probe", "ready"),
)
