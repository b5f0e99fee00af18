"""Whether this process is there, and whether it can work."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.web.messages import Answer, document
from holdfast.web.routing import Call, Operation, Told


class Health(msgspec.Struct, frozen=True):
    """A sign of life."""

    status: str
    service: str
    warnings: Annotated[list[str] | UnsetType, Meta(description="What is to be seen to; left out if nothing is.")] = (
        UNSET
    )


async def live(call: Call) -> Answer:
    """The process answers; the store is not asked."""
    return document(200, Health("ok", call.app.settings.api_service, call.warnings() or UNSET))


async def ready(call: Call) -> Answer:
    """The store answers."""
    await (await call.app.opened()).now_us()
    return document(200, Health("ready", call.app.settings.api_service))


def _operation(name: str, path: str, summary: str, status: str) -> Operation:
    return Operation(
        name=name,
        method="GET",
        path=path,
        scope=None,
        group="Health",
        summary=summary,
        handler=ready if status == "ready" else live,
        answers={200: Told(Health, "Yes.", {"status": status, "service": "holdfast-api"})},
    )


OPERATIONS = (
    _operation("health", "/health", "Whether this process answers", "ok"),
    _operation("live", "/health/live", "The same, for a liveness probe", "ok"),
    _operation("ready", "/health/ready", "Whether the store answers: for a readiness probe", "ready"),
)
