"""Fault injection: faults switched on and off in workers that allow them."""

from __future__ import annotations

from holdfast.core.faults import EVERY_STEP, MAX_FAULTS, MAX_SECONDS, FaultKind
from holdfast.core.steps import MAX_NAME, check_step_name
from holdfast.core.validation import parse_duration
from holdfast.views.documents import FaultPlanDocument, plan_document
from holdfast.web.fields import (
    QUEUE_VALUE,
    TASK_VALUE,
    BodySchema,
    Field,
    ValueType,
    any_value,
    array_value,
    choice_value,
    integer_value,
    text_value,
)
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

_FAULT = BodySchema(
    name="FaultRequest",
    doc="A fault: what goes wrong, for which jobs, how often.",
    fields=(
        Field("kind", choice_value("FaultKind", *FaultKind), "What goes wrong.", example="error", required=True),
        Field("task", TASK_VALUE, "Only jobs of this task.", example="mail.send"),
        Field("queue", QUEUE_VALUE, "Only jobs of this queue."),
        Field(
            "step",
            text_value(1, MAX_NAME, check_step_name),
            f"At this step, or at each ({EVERY_STEP}), instead of the whole handler.",
        ),
        Field(
            "probability",
            ValueType({"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1}, any_value),
            "Of an execution; of a call, for faults of the store.",
            example=0.3,
        ),
        Field("attempts", integer_value(1, 1_000_000), "Only the first so many attempts of a job."),
        Field(
            "seconds",
            ValueType({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}, any_value),
            "How long a latency, a freeze or a slow call of the store takes.",
        ),
        Field("when", choice_value("FaultWhen", "before", "after"), "Before the work, or when it is done."),
    ),
    shown=("task", "probability"),
)
_FAULTS = [{"kind": "error", "task": "mail.send", "probability": 0.3}]
_PLAN = BodySchema(
    name="FaultPlanRequest",
    doc="Faults to switch on, in place of those that are on.",
    fields=(
        Field("faults", array_value(_FAULT.reference, MAX_FAULTS), "The faults.", example=_FAULTS, required=True),
        Field(
            "span",
            ValueType({"type": ["number", "string"], "minimum": 0, "maxLength": 40}, parse_duration),
            'A span: seconds, or "10m"; up to a day.',
            example="10m",
            required=True,
        ),
        Field("seed", integer_value(0, 2**31), "Of the draws; left out: a new one."),
    ),
    inner=(_FAULT,),
)


async def show_faults(call: RequestContext) -> ApiResponse:
    """Returns the faults that are on."""
    call.caller.check_unlimited()
    return json_response(200, plan_document(await call.app.faults.read()))


async def start_faults(call: RequestContext) -> ApiResponse:
    """Switches faults on."""
    call.caller.check_unlimited()
    plan = await call.app.faults.start(call.body["faults"], span=call.body["span"], seed=call.body.get("seed"))
    return json_response(200, plan_document(plan))


async def stop_faults(call: RequestContext) -> ApiResponse:
    """Switches faults off."""
    call.caller.check_unlimited()
    await call.app.faults.stop()
    return ApiResponse(204)


_PATH = "/v1/faults"
_EXAMPLE = {"faults": _FAULTS, "seed": 7, "until": "2026-01-31T12:10:00.000000Z"}
OPERATIONS = (
    Operation(
        name="show_faults",
        method="GET",
        path=_PATH,
        summary="Show the faults that are on",
        handler=show_faults,
        scope="read",
        group="Faults",
        answers={200: ResponseSpec(FaultPlanDocument, "The faults.", _EXAMPLE)},
    ),
    Operation(
        name="start_faults",
        method="POST",
        path=_PATH,
        summary="Switch faults on",
        handler=start_faults,
        scope="admin",
        group="Faults",
        doc="For staging: 409 unless the settings of the API say allow_faults, and only workers whose settings say it "
        "get them.",
        body=_PLAN,
        answers={200: ResponseSpec(FaultPlanDocument, "They are on.", _EXAMPLE)},
        refusals=(409,),
    ),
    Operation(
        name="stop_faults",
        method="DELETE",
        path=_PATH,
        summary="Switch faults off",
        handler=stop_faults,
        scope="operate",
        group="Faults",
        answers={204: ResponseSpec(None, "No faults are on.")},
    ),
)
