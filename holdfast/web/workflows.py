"""Workflows: signals, what jobs wait for, and trees of jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.app.workflows import check_signal_id
from holdfast.core.batches import BATCH_TASK
from holdfast.core.ids import new_id
from holdfast.core.steps import MAX_NAME, check_step_name
from holdfast.core.waits import MAX_SIGNAL_ID
from holdfast.views.documents import ID
from holdfast.views.workflows import (
    SIGNAL,
    TREE,
    WAITS,
    SentSignalDocument,
    SignalDocument,
    Tree,
    WaitsDocument,
    read_tree,
    read_visible_waits,
    signal_document,
    waits_document,
)
from holdfast.web.fields import BodySchema, Field, ValueType, any_value, integer_text
from holdfast.web.jobs import find_job
from holdfast.web.messages import ApiResponse, Refusal, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

_TOPIC = ValueType({"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": r"^[^#\n]+$"}, check_step_name)
_SIGNAL_ID = ValueType(
    {"type": "string", "minLength": 1, "maxLength": MAX_SIGNAL_ID, "pattern": r"^[^\n]+$"},
    lambda value, field: check_signal_id(value),
)
NEW_SIGNAL = BodySchema(
    name="NewSignal",
    doc="A signal for the job that waits for its topic.",
    fields=(
        Field("topic", _TOPIC, "What the signal is about.", example="approved:42", required=True),
        Field(
            "value", ValueType({}, any_value), "Any JSON value; null if left out.", example={"by": "Ada"}, nullable=True
        ),
        Field("id", _SIGNAL_ID, "A signal is delivered once for each id, however often it is sent."),
    ),
)
_PAGE = Field("limit", integer_text(1, 1000, default=100), "Signals on this page.", example=100)


class SignalList(msgspec.Struct, frozen=True):
    """Signals that no job has received."""

    signals: Annotated[list[SignalDocument], Meta(description="The oldest first.")]


def _check_every_queue(call: RequestContext) -> None:
    """Refuses a key that is limited to queues: a signal may be received by a job of any queue."""
    if call.caller.is_restricted:
        detail = "a signal may be received by a job of any queue, and this key is limited to some"
        raise Refusal(403, "forbidden", detail, "use a key for every queue")


async def send_signal(call: RequestContext) -> ApiResponse:
    """Sends a signal."""
    _check_every_queue(call)
    signal_id = call.body.get("id") or new_id()
    sent = await call.app.signal(call.body["topic"], call.body.get("value"), id=signal_id)
    call.changed += [sent.job_id] if sent.is_new and sent.job_id is not None else []
    return json_response(201 if sent.is_new else 200, SentSignalDocument(signal_id, sent.is_new, sent.job_id))


async def list_signals(call: RequestContext) -> ApiResponse:
    """Returns signals that no job has received."""
    _check_every_queue(call)
    found = await call.app.kept_signals(call.query.get("topic"), limit=call.query.get("limit", 100))
    return json_response(200, SignalList([signal_document(each) for each in found]))


async def show_waits(call: RequestContext) -> ApiResponse:
    """Returns what a job waits for."""
    job = await find_job(call, call.path["job_id"])
    batch = await call.app.read_batch(job.id) if job.task == BATCH_TASK else None
    store = await call.app.open_store()
    waits, _ = await read_visible_waits(store, job.id, lambda other: call.caller.allows_queue(other.queue))
    return json_response(200, waits_document(waits, batch))


async def show_tree(call: RequestContext) -> ApiResponse:
    """Returns a job with its children and the jobs that wait for it."""
    job = await find_job(call, call.path["job_id"])
    store = await call.app.open_store()
    tree = await read_tree(store, job, call.redaction, lambda other: call.caller.allows_queue(other.queue))
    return json_response(200, tree)


OPERATIONS = (
    Operation(
        name="send_signal",
        method="POST",
        path="/v1/signals",
        scope="submit",
        group="Workflows",
        summary="Send a signal to the job that waits for it",
        doc="It is received by the job that has waited longest for the topic, or kept until one does. It needs a key "
        "for every queue.",
        handler=send_signal,
        body=NEW_SIGNAL,
        answers={
            201: ResponseSpec(SentSignalDocument, "It was sent.", {"id": ID, "is_new": True, "job_id": ID}),
            200: ResponseSpec(SentSignalDocument, "Its id was sent before.", {"id": ID, "is_new": False, "job_id": ID}),
        },
        refusals=(409,),
    ),
    Operation(
        name="list_signals",
        method="GET",
        path="/v1/signals",
        scope="read",
        group="Workflows",
        summary="List signals that no job has received",
        doc="The oldest first. It needs a key for every queue.",
        handler=list_signals,
        query=(Field("topic", _TOPIC, "Only those of this topic.", example="approved:42"), _PAGE),
        answers={200: ResponseSpec(SignalList, "A page.", {"signals": [SIGNAL]})},
    ),
    Operation(
        name="show_waits",
        method="GET",
        path="/v1/jobs/{job_id}/waits",
        scope="read",
        group="Workflows",
        summary="Show what a job waits for, and which jobs wait for it",
        doc="Jobs of other queues than the caller's are left out.",
        handler=show_waits,
        answers={200: ResponseSpec(WaitsDocument, "What it waits for.", WAITS)},
        refusals=(404,),
    ),
    Operation(
        name="show_tree",
        method="GET",
        path="/v1/jobs/{job_id}/tree",
        scope="read",
        group="Workflows",
        summary="Show a job with its children and the jobs that wait for it",
        doc="Jobs of other queues than the caller's are left out.",
        handler=show_tree,
        answers={200: ResponseSpec(Tree, "The tree.", TREE)},
        refusals=(404,),
    ),
)
