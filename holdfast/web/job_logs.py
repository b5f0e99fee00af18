"""Log lines of running jobs, from workers in any language: as a handler of ours logs by its context."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.job_logs import NewLine, Record
from holdfast.core.models import Lease
from holdfast.tasks.job_logger import LEVELS, make_entry
from holdfast.web.fields import Field, Form, an_object, any_text, array_of, choice_check, number_check, seconds_check
from holdfast.web.lease_tokens import SAMPLE, TOKEN_SCHEMA, WORKER, lease_of, read_leases, worker_of
from holdfast.web.responses import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

_AGO_MOST = 86_400
_LINES_MOST = 100
_NUMBER_MOST = 1_000_000


class LogLinesAnswer(msgspec.Struct, frozen=True):
    """Outcome of the lines."""

    kept: Annotated[bool, Meta(description="false: the lease is lost, and so are the lines.")]
    dropped: Annotated[int, Meta(description="Lines whose number is over the setting `job_lines`.", ge=0)]


LINE = Form(
    name="NewLogLine",
    doc="A line that a handler logs.",
    fields=(
        Field(
            name="number",
            schema={"type": "integer", "minimum": 1, "maximum": _NUMBER_MOST},
            doc="Among the lines of its attempt, from 1: the same number again is the same line.",
            check=number_check(1, _NUMBER_MOST),
            example=1,
            required=True,
        ),
        Field(
            name="text",
            schema={"type": "string"},
            doc="What it says; cut at `job_line_size`.",
            check=any_text,
            example="fetched",
            required=True,
        ),
        Field(
            name="level",
            schema={"type": "string", "enum": list(LEVELS), "title": "LogLevel", "default": "info"},
            doc="How much it matters.",
            check=choice_check(*LEVELS),
            example="info",
        ),
        Field(
            name="fields",
            schema={"type": "object"},
            doc="More of it, for programs.",
            check=an_object,
            example={"rows": 3},
        ),
        Field(
            name="ago",
            schema={"type": "number", "minimum": 0, "maximum": _AGO_MOST},
            doc="Seconds since it was said.",
            check=seconds_check(_AGO_MOST),
            example=0,
        ),
    ),
)
SAY = Form(
    name="LogLinesRequest",
    doc="Log lines of one running job.",
    fields=(
        WORKER,
        Field(
            name="token",
            schema=TOKEN_SCHEMA,
            doc="Of the job's lease.",
            check=lease_of,
            example=SAMPLE,
            required=True,
        ),
        Field(
            name="lines",
            schema={
                "type": "array",
                "minItems": 1,
                "maxItems": _LINES_MOST,
                "items": {"$ref": "#/components/schemas/NewLogLine"},
            },
            doc="In their order.",
            check=array_of(an_object, _LINES_MOST),
            example=[{"number": 1, "text": "fetched", "fields": {"rows": 3}}],
            required=True,
        ),
    ),
    inner=(LINE,),
)


async def append_job_logs(call: RequestContext) -> ApiResponse:
    """Keep log lines with a job that the worker has in hand, or has just settled as succeeded."""
    lease: Lease = call.body["token"]
    read = [LINE.read(each, f"lines[{place}].") for place, each in enumerate(call.body["lines"])]
    settings = call.app.settings
    new = [
        NewLine(
            each["number"],
            each.get("ago", timedelta(0)),
            *make_entry(each.get("level", "info"), each["text"], each.get("fields", {}), settings.job_line_size),
        )
        for each in sorted(read, key=lambda line: int(line["number"]))
        if each["number"] <= settings.job_lines
    ]
    store = await call.app.open_store()
    (stand,) = await read_leases(store, worker_of(call), [lease])
    job = stand.job
    own = job is not None and job.worker == worker_of(call) and job.claims == lease.claims
    kept = own and (not new or (await store.queueing.append_logs([Record(lease, new)]))[0])
    call.changed += [lease.job_id] if kept else []
    return json_response(200, LogLinesAnswer(kept, len(read) - len(new)))


OPERATIONS = (
    Operation(
        name="append_log_lines",
        method="POST",
        path="/v1/claims/lines",
        scope="work",
        group="Work",
        summary="Keep log lines with a running job",
        doc="Before it is settled: afterwards only success still takes lines. To send them again is harmless.",
        handler=append_job_logs,
        body=SAY,
        batch=True,
        answers={200: ResponseSpec(LogLinesAnswer, "What became of them.", {"kept": True, "dropped": 0})},
    ),
)
