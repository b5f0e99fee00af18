"""Metrics of this process, and of the store's queues."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.core.errors import ConfigError
from holdfast.telemetry.metric_types import OPEN, TEXT, expose_metrics
from holdfast.web.messages import ApiResponse, Refusal
from holdfast.web.routing import METRICS, Operation, RequestContext, ResponseSpec


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
    readings = [*call.meter.metrics.read(), *await call.meter.queues.read()]
    try:
        body, media = expose_metrics(readings, prefix=call.app.settings.metrics_prefix, accept=accept)
    except ConfigError as error:
        raise Refusal(406, "not_acceptable", str(error), "ask for application/json") from None
    return ApiResponse(200, body, media.encode())


def _operation(name: str, path: str, example: Any) -> Operation:
    return Operation(
        name=name,
        method="GET",
        path=path,
        scope="read",
        group=METRICS,
        summary="Show metrics: as Prometheus text, or as JSON for who accepts that first",
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
OPERATIONS = (_operation("show_metrics", "/metrics", _EXAMPLE), _operation("show_metrics_at_slash", "/metrics/", None))
