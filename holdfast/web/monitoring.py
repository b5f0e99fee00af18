"""Liveness and readiness of this process, and metrics of it and of the store's queues."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.errors import ConfigError
from holdfast.telemetry.metric_types import OPEN, TEXT, expose_metrics
from holdfast.web.messages import ApiResponse, Refusal, json_response
from holdfast.web.routing import METRICS, Operation, RequestContext, ResponseSpec


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


def _health_operation(name: str, path: str, summary: str, status: str) -> Operation:
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


class MetricSeries(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric for one combination of its labels; a histogram has a count, a sum and buckets in place of a value."""

    labels: dict[str, str]
    value: float | msgspec.UnsetType | None = msgspec.UNSET
    count: int | msgspec.UnsetType = msgspec.UNSET
    sum: float | msgspec.UnsetType = msgspec.UNSET
    buckets: (
        Annotated[dict[str, int], Meta(description="By upper bound, how many were at most so large.")]
        | msgspec.UnsetType
    ) = msgspec.UNSET


class Metric(msgspec.Struct, frozen=True):
    """A metric."""

    name: str
    type: Annotated[Literal["counter", "gauge", "histogram"], Meta(title="MetricKind")]
    help: str
    series: list[MetricSeries]


class MetricsDocument(msgspec.Struct, frozen=True):
    """Every metric of this process, and of the queues if the store could be asked."""

    metrics: list[Metric]


async def get_metrics(call: RequestContext) -> ApiResponse:
    """In the format that is asked for."""
    call.caller.check_unlimited()
    accept = call.request.headers.get(b"accept", b"").decode("latin-1")
    readings = [*call.request_metrics.metrics.read(), *await call.request_metrics.queues.read()]
    try:
        body, media = expose_metrics(readings, prefix=call.app.settings.metrics_prefix, accept=accept)
    except ConfigError as error:
        raise Refusal(406, "not_acceptable", str(error), "ask for application/json") from None
    return ApiResponse(200, body, media.encode())


def _metrics_operation(name: str, path: str, example: Any) -> Operation:
    return Operation(
        name=name,
        method="GET",
        path=path,
        scope="read",
        group=METRICS,
        summary="Show metrics: as Prometheus text, or as JSON for who prefers that",
        doc="Figures of queues are some seconds old at most. While the store is away, `store_up` is 0 and they are "
        "left out.",
        handler=get_metrics,
        answers={200: ResponseSpec(MetricsDocument, "The metrics.", example, texts=(TEXT, OPEN))},
        refusals=(406,),
    )


_EXAMPLE: dict[str, Any] = {
    "metrics": [
        {
            "name": "holdfast_queue_jobs",
            "type": "gauge",
            "help": "Jobs of a queue.",
            "series": [{"labels": {"queue": "default", "state": "queued"}, "value": 12.0}],
        }
    ]
}


OPERATIONS = (
    _health_operation("check_health", "/health", "Whether this process answers", "ok"),
    _health_operation("check_live", "/health/live", "The same, for a liveness probe", "ok"),
    _health_operation("check_ready", "/health/ready", "Whether the store answers: for a readiness probe", "ready"),
    _metrics_operation("show_metrics", "/metrics", _EXAMPLE),
    _metrics_operation("show_metrics_at_slash", "/metrics/", None),
)
