"""Whether this process is there, and whether it can work."""

from __future__ import annotations

import msgspec

from holdfast.web.messages import Answer, document
from holdfast.web.routing import Call, Operation, Told


class Health(msgspec.Struct, frozen=True):
    """A sign of life."""

    status: str
    service: str


async def live(call: Call) -> Answer:
    """The process answers; nothing else is looked at."""
    return document(200, Health("ok", call.app.settings.api_service))


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
