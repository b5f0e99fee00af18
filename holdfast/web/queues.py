"""Queues, workers, and figures of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.errors import NotFound
from holdfast.core.models import TERMINAL, QueueInfo
from holdfast.core.validation import check_span, mask_url
from holdfast.views.documents import QUEUE, WORKER, QueueDocument, WorkerDocument, queue_document, worker_document
from holdfast.views.statistics import FiguresDocument, HistoryDocument, figures_document, history_document
from holdfast.web.bulk import NOTHING
from holdfast.web.fields import WORKER_VALUE, BodySchema, Field, array_value, boolean_value, integer_text, text_value
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Handler, Operation, RequestContext, ResponseSpec, named_queue


class QueueList(msgspec.Struct, frozen=True):
    """Every queue that has jobs or is paused, by name. Of all queues together only so many ended jobs are counted, the
    latest of each state: where there are more, a queue whose jobs have all ended before these is left out."""

    queues: list[QueueDocument]


class WorkerList(msgspec.Struct, frozen=True):
    """Every registered worker process."""

    workers: list[WorkerDocument]


class StopAnswer(msgspec.Struct, frozen=True):
    """The workers that were asked to stop."""

    asked: Annotated[list[str], Meta(description="Their ids.")]
    drain: Annotated[bool, Meta(description="They empty their queues first.")]


class QueuePause(msgspec.Struct, frozen=True):
    """A queue, and True if it is paused."""

    name: str
    paused: bool


class Stats(FiguresDocument, frozen=True, kw_only=True):
    """Everything at a glance. However many jobs there are, only so many of each state are looked at."""

    store: Annotated[
        str | UnsetType,
        Meta(description="Where the jobs are kept, without a password; left out where the key is limited to queues."),
    ] = UNSET
    workers: list[WorkerDocument]


async def find(call: RequestContext) -> ApiResponse:
    """Every queue."""
    allowed = [each for each in await call.app.queues() if call.caller.allows_queue(each.name)]
    return json_response(200, QueueList([queue_document(each) for each in allowed]))


async def get_queue(call: RequestContext) -> ApiResponse:
    """Returns one queue."""
    name = named_queue(call)
    queues = await call.app.queues()
    found = next((each for each in queues if each.name == name), None) or _unseen(name, queues)
    if found is None:
        raise NotFound(f"queue {name} has no jobs, and is not paused")
    return json_response(200, queue_document(found))


def _unseen(name: str, queues: Sequence[QueueInfo]) -> QueueInfo | None:
    """A queue of which nothing was seen, where it may have ended jobs that were not looked at."""
    more = TERMINAL & {state for each in queues for state in each.at_least}
    return QueueInfo(name=name, paused=False, states={}, oldest_ready=None, at_least=more) if more else None


def _pausing(*, paused: bool) -> Handler:
    async def handle(call: RequestContext) -> ApiResponse:
        name = named_queue(call)
        await (call.app.pause if paused else call.app.resume)(name)
        return json_response(200, QueuePause(name, paused))

    return handle


async def workers(call: RequestContext) -> ApiResponse:
    """Every worker."""
    call.caller.check_unlimited()
    return json_response(200, WorkerList([worker_document(each) for each in await call.app.workers()]))


async def stop(call: RequestContext) -> ApiResponse:
    """Ask workers to stop."""
    call.caller.check_unlimited()
    named, drain = call.body.get("workers"), call.body.get("drain", False)
    asked = await call.app.stop_workers(named, drain=drain)
    call.changed += asked
    missing = sorted(set(named or ()) - set(asked))
    if missing:
        also = f"; asked to stop: {', '.join(asked)}" if asked else ""
        raise NotFound(f"there is no living worker {', '.join(missing)}{also}")
    return json_response(200, StopAnswer(asked, drain))


async def stats(call: RequestContext) -> ApiResponse:
    """Everything at a glance."""
    minutes = call.query.get("minutes", 5)
    figures = await call.app.stats(minutes=minutes)
    limited = call.caller.is_restricted
    own = figures.for_queues(call.caller.allows_queue) if limited else figures
    workers = [] if limited else await call.app.workers()
    counted = Stats(
        **msgspec.structs.asdict(figures_document(own, minutes)),
        store=UNSET if limited else mask_url((await call.app.open_store()).url),
        workers=[worker_document(each) for each in workers],
    )
    return json_response(200, counted)


async def show_history(call: RequestContext) -> ApiResponse:
    """Shows counts of ended jobs by minute or hour."""
    found = await call.app.read_history(call.query.get("since", "1h"))
    return json_response(200, history_document(found, call.caller.allows_queue))


_MINUTES = Field("minutes", integer_text(1, 1440, default=5), "What is recent.", example=5)
_SINCE = Field(
    "since",
    text_value(1, 32, check_span),
    "How far back it begins: by minutes up to 6h, then by hours, up to 31d.",
    example="1h",
)
STOP = BodySchema(
    name="StopRequest",
    doc="Which workers are to stop, and how.",
    fields=(
        Field(
            "workers",
            array_value(WORKER_VALUE, 1000),
            "These; every living one where none is named.",
            example=["w-7c1f"],
        ),
        Field("drain", boolean_value(False), "Let them empty their queues first.", example=False),
    ),
)


def _reading(name: str, path: str, group: str, summary: str, handler: Handler, answer: ResponseSpec) -> Operation:
    return Operation(
        name=name,
        method="GET",
        path=path,
        scope="read",
        group=group,
        summary=summary,
        handler=handler,
        answers={200: answer},
        refusals=(404,) if "{" in path else (),
    )


def _switch(name: str, summary: str, *, paused: bool) -> Operation:
    return Operation(
        name=f"{name}_queue",
        method="POST",
        path=f"/v1/queues/{{queue}}/{name}",
        scope="operate",
        group="Queues",
        summary=summary,
        handler=_pausing(paused=paused),
        body=NOTHING,
        body_optional=True,
        answers={200: ResponseSpec(QueuePause, "How it is now.", {"name": "default", "paused": paused})},
    )


_BOUNDED = "At a bounded cost: `at_least` names states of which there are, or may be, more than were counted."
_COUNTS = QUEUE["states"]
_BY_WORKER = [{"worker": "w-7c1f", "counts": _COUNTS}]
_POINT: dict[str, Any] = {
    "start": "2026-07-01T12:00:00.000000Z",
    "succeeded": 118,
    "dead": 2,
    "cancelled": 0,
    "mean_seconds": 0.42,
    "longest_seconds": 3.1,
}
_STATS: dict[str, Any] = {
    "store": "sqlite:////var/lib/holdfast.db",
    "counts": _COUNTS,
    "at_least": [],
    "most": 10_000,
    "scheduled_for_retry": 1,
    "attempts": {"0": 12, "1": 213, "2": 1},
    "by_queue": [{"name": "default", "counts": _COUNTS}],
    "by_worker": _BY_WORKER,
    "recent": {
        "minutes": 5,
        "counts": _COUNTS,
        "by_worker": _BY_WORKER,
        "ended_per_second": 0.7,
        "mean_seconds": 0.25,
        "longest_seconds": 1.5,
    },
    "workers": [WORKER],
}
OPERATIONS = (
    msgspec.structs.replace(
        _reading(
            "list_queues",
            "/v1/queues",
            "Queues",
            "List queues",
            find,
            ResponseSpec(QueueList, "All.", {"queues": [QUEUE]}),
        ),
        doc=_BOUNDED,
    ),
    msgspec.structs.replace(
        _reading(
            "show_queue",
            "/v1/queues/{queue}",
            "Queues",
            "Show a queue",
            get_queue,
            ResponseSpec(QueueDocument, "The queue.", QUEUE),
        ),
        doc=_BOUNDED,
    ),
    _switch("pause", "Let no worker take a job of a queue; what runs goes on", paused=True),
    _switch("resume", "Let workers take jobs of a queue again", paused=False),
    _reading(
        "list_workers",
        "/v1/workers",
        "Workers",
        "List workers",
        workers,
        ResponseSpec(WorkerList, "All.", {"workers": [WORKER]}),
    ),
    Operation(
        name="stop_workers",
        method="POST",
        path="/v1/workers/stop",
        scope="operate",
        group="Workers",
        summary="Ask workers to stop, wherever they run",
        handler=stop,
        body=STOP,
        body_optional=True,
        answers={200: ResponseSpec(StopAnswer, "Those that were asked.", {"asked": ["w-7c1f"], "drain": False})},
        refusals=(404,),
    ),
    msgspec.structs.replace(
        _reading(
            "show_stats",
            "/v1/stats",
            "Queues",
            "Show everything at a glance",
            stats,
            ResponseSpec(Stats, "The figures.", _STATS),
        ),
        doc=_BOUNDED,
        query=(_MINUTES,),
    ),
    msgspec.structs.replace(
        _reading(
            "show_history",
            "/v1/stats/history",
            "Queues",
            "Show how many jobs ended, by minute or hour",
            show_history,
            ResponseSpec(HistoryDocument, "The history.", {"interval": "minute", "points": [_POINT]}),
        ),
        doc="Sweeps count what ended more than 40 seconds ago, once a minute.",
        query=(_SINCE,),
    ),
)
