"""Settling over HTTP: the reports of a worker in any language, as outcomes that a worker of ours knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.core.errors import Invalid
from holdfast.core.lifecycle import DEFERRALS, Cancelled, Failed, Outcome, Released, Snoozed, Succeeded
from holdfast.core.models import JobState, Lease, Reason, Settled, Settlement
from holdfast.core.validation import check_span
from holdfast.settings.settings import Settings
from holdfast.tasks.codec import encode_result
from holdfast.views.documents import ID, Instant
from holdfast.views.formatting import format_timestamp
from holdfast.web.fields import (
    MAX_LIST,
    TEXT,
    BodySchema,
    Field,
    ValueType,
    any_value,
    array_value,
    choice_value,
    missing_field,
    text_value,
)
from holdfast.web.lease_tokens import SAMPLE, TOKEN_VALUE, WORKER, LeaseRecord, check_once, read_leases, worker_of
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.remote_workers import RemoteEnding
from holdfast.web.routing import Operation, RequestContext, ResponseSpec
from holdfast.worker.executors.outcome import storable_text, traceback_tail
from holdfast.worker.reporting import emit_lease_lost

_FAILED = (Reason.ERROR, Reason.TIMEOUT, Reason.CRASHED, Reason.RESOURCE)
_DEAD = (Reason.NON_RETRYABLE, Reason.PAYLOAD, Reason.ENCRYPTED, Reason.RESULT, Reason.NO_HANDLER)


class SettlementVerdict(StrEnum):
    """Outcome of a settlement."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    LOST = "lost"
    LOCKED = "locked"


class SettledJob(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one settlement."""

    id: str
    verdict: Annotated[
        SettlementVerdict,
        Meta(
            description="`accepted`: written now. `repeated`: this lease has left the job so before: most likely it is "
            "the answer to your first try that was lost. `lost`: the lease has ended, and another worker may have the "
            "job, or it was settled otherwise; nothing was changed. `locked`: another transaction holds the "
            "job; settle it again."
        ),
    ]
    state: Annotated[JobState | None, Meta(description="Where the job stands now; null: it is gone.")]
    run_at: Annotated[Instant | None, Meta(description="When it is tried again, where it is.")]


class SettleAnswer(msgspec.Struct, frozen=True):
    """The settlements in the order of the request."""

    jobs: list[SettledJob]


# ── the body ──────────────────────────────────────────────────────────────────────────────────────────────────────
ERROR = BodySchema(
    name="AttemptError",
    doc="Why an attempt failed.",
    fields=(
        Field("type", text_value(1, 200), "Its class.", example="ConnectionError"),
        Field("message", TEXT, "In words; 4,096 characters are kept.", example="connection refused", required=True),
        Field("traceback", TEXT, "Where; the last 16 KiB are kept.", example="at send (mail.js:7:3)"),
    ),
)


OUTCOMES = ("succeeded", "failed", "dead", "snoozed", "released", "cancelled")
"""The words for how an attempt ended."""
_MEANT: Mapping[str, frozenset[str]] = {
    "succeeded": frozenset({"result"}),
    "failed": frozenset({"error", "reason", "delay"}),
    "dead": frozenset({"error", "reason"}),
    "snoozed": frozenset({"delay"}),
    "released": frozenset(),
    "cancelled": frozenset(),
}
"""Fields that each outcome allows."""
_NEEDED = {"failed": "error", "dead": "error", "snoozed": "delay"}


def _contradictions() -> Iterator[dict[str, Any]]:
    """Schemas of settlements with a field that does not go with their outcome, or without one that must."""
    for outcome, meant in _MEANT.items():
        others = sorted(frozenset().union(*_MEANT.values()) - meant)
        faults: list[dict[str, Any]] = [{"required": [name]} for name in others]
        if outcome in _NEEDED:
            faults.append({"not": {"required": [_NEEDED[outcome]]}})
        yield {"properties": {"outcome": {"const": outcome}}, "required": ["outcome"], "anyOf": faults}


SETTLEMENT = BodySchema(
    name="SettlementRequest",
    doc="What an attempt came to. `succeeded` with `result`; `failed` with `error`, to be tried again while attempts "
    "are left; `dead` with `error`: no further attempt makes sense; `snoozed` with `delay`, and `released`: not tried, "
    "the attempt is given back; `cancelled`: stopped because an operator asked.",
    fields=(
        Field("token", TOKEN_VALUE, "Of the job's lease.", example=SAMPLE, required=True),
        Field(
            "outcome",
            choice_value("AttemptOutcome", *OUTCOMES),
            "How the attempt ended.",
            example="succeeded",
            required=True,
        ),
        Field("result", ValueType({}, any_value), "What it returned: any JSON.", nullable=True),
        Field("error", ERROR.value, "Why it failed."),
        Field(
            "reason",
            choice_value("FailureReason", *_FAILED, *_DEAD),
            "The kind of failure. Of `failed`: `error` (the default), `timeout`, `crashed` or `resource`; of "
            "`dead`: `non_retryable` or `result`; with `payload`, `encrypted` or `no_handler` the job is given back "
            "for another worker, as long as the setting `defer_for` says.",
        ),
        Field(
            "delay",
            ValueType({"type": ["number", "string"], "minimum": 0, "maxLength": 40}, check_span),
            'Seconds, or "5m": when a failed job is tried again, whatever its policy; how long a snoozed one sleeps.',
        ),
    ),
    inner=(ERROR,),
    refused=tuple(_contradictions()),
)
SETTLE = BodySchema(
    name="SettleRequest",
    doc="What became of claimed jobs.",
    fields=(
        WORKER,
        Field(
            "settlements",
            array_value(SETTLEMENT.reference, MAX_LIST),
            "One for each job, in any order.",
            example=[{"token": SAMPLE, "outcome": "succeeded", "result": {"sent": True}}],
            required=True,
        ),
    ),
    inner=(SETTLEMENT,),
)


def _check_fields(given: Mapping[str, Any], path: str) -> None:
    word = given["outcome"]
    for name in given.keys() - {"token", "outcome"} - _MEANT[word]:
        known = ", ".join(sorted(_MEANT[word])) or "nothing more"
        raise Invalid(path + name, given[name], f"with {word!r} goes {known}", f"does not go with {word!r}")
    needed = _NEEDED.get(word)
    if needed is not None and needed not in given:
        raise missing_field(path + needed, f"it is required with {word!r}")


def outcome_of(given: Mapping[str, Any], settings: Settings, path: str = "") -> Outcome:
    """Returns the outcome that a settlement means."""
    match given["outcome"]:
        case "succeeded":
            return _succeeded(given.get("result"), settings)
        case "snoozed":
            return Snoozed(given["delay"])
        case "released":
            return Released()
        case "cancelled":
            return Cancelled()
    return _failed(given, retryable=given["outcome"] == "failed", path=path)


def _succeeded(result: Any, settings: Settings) -> Outcome:
    """A result that cannot be stored fails the job for good, as with a worker of ours: its work was done."""
    try:
        return Succeeded(encode_result(result, settings.result_limit))
    except Invalid as error:
        return Failed(error=storable_text(f"{type(error).__name__}: {error}"), reason=Reason.RESULT, retryable=False)


def _failed(given: Mapping[str, Any], *, retryable: bool, path: str) -> Failed:
    own = _FAILED if retryable else _DEAD
    reason = Reason(given.get("reason", own[0]))
    if reason not in own:
        raise Invalid(path + "reason", str(reason), f"with {given['outcome']!r} give one of {', '.join(own)}")
    error = given["error"]
    headline = ": ".join(part for part in (error.get("type"), error["message"]) if part) or "it failed"
    trace = error.get("traceback")
    return Failed(
        error=storable_text(headline),
        reason=reason,
        traceback=traceback_tail(trace) if trace else None,
        retryable=retryable,
        delay=given.get("delay"),
    )


# ── the operation ─────────────────────────────────────────────────────────────────────────────────────────────────
async def settle(call: RequestContext) -> ApiResponse:
    """Settle jobs: each one whose lease is still valid."""
    leases, outcomes = read_settlements(call.body["settlements"], call.app.settings)
    worker = worker_of(call)
    await call.remote_workers.start_sweeper()
    store = await call.app.open_store()
    records = await read_leases(store, worker, leases)
    endings = {
        index: RemoteEnding(record.job, outcome)
        for index, (record, outcome) in enumerate(zip(records, outcomes, strict=True))
        if record.job is not None
    }
    current = [index for index in endings if records[index].has_lease]
    answers = dict(
        zip(current, await call.remote_workers.settle(worker, [endings[index] for index in current]), strict=True)
    )
    verdicts = []
    for index, record in enumerate(records):
        answer = answers.get(index)
        if answer is not None:
            verdicts.append(_answered(answer))
        else:
            asked = None if record.job is None else call.remote_workers.decide_settlement(endings[index])
            verdicts.append(_refused(call, worker, record, asked))
    call.changed += [each.id for each in verdicts if each.verdict is SettlementVerdict.ACCEPTED]
    call.verdicts = Counter(each.verdict.value for each in verdicts)
    return json_response(200, SettleAnswer(verdicts))


def read_settlements(given: Sequence[Mapping[str, Any]], settings: Settings) -> tuple[list[Lease], list[Outcome]]:
    """The leases that are to be settled, each once, and the outcomes."""
    leases, outcomes = [], []
    for index, each in enumerate(given):
        path = f"settlements[{index}]."
        read = SETTLEMENT.read(each, path)
        _check_fields(each, path)
        leases.append(read["token"])
        outcomes.append(outcome_of(read, settings, path))
    check_once(leases, "settlements[{}].token")
    return leases, outcomes


def _answered(answer: Settled) -> SettledJob:
    verdict = (
        SettlementVerdict.ACCEPTED
        if answer.accepted
        else SettlementVerdict.LOCKED
        if answer.locked
        else SettlementVerdict.LOST
    )
    goes_on = answer.accepted and answer.state in (JobState.FAILED, JobState.SCHEDULED)
    run_at = format_timestamp(answer.run_at_us) if goes_on and answer.run_at_us is not None else None
    return SettledJob(id=answer.job_id, verdict=verdict, state=answer.state, run_at=run_at)


def _refused(call: RequestContext, worker: str, record: LeaseRecord, asked: Settlement | None) -> SettledJob:
    """A settlement under a lease that is over, or not this worker's."""
    job = record.job
    if job is None or asked is None or not call.caller.allows_queue(job.queue):
        return SettledJob(id=record.lease.job_id, verdict=SettlementVerdict.LOST, state=None, run_at=None)
    deferred = job.state is JobState.SCHEDULED and asked.reason in DEFERRALS
    ours = job.worker == worker and job.claims == record.lease.claims and (job.state is asked.state or deferred)
    repeated = ours and job.reason in (None, asked.reason)
    goes_on = repeated and job.state in (JobState.FAILED, JobState.SCHEDULED)
    if not repeated and (job.claims != record.lease.claims or job.worker in (worker, None)):  # its own lease
        emit_lease_lost(call.app.events, job, worker)
    return SettledJob(
        id=job.id,
        verdict=SettlementVerdict.REPEATED if repeated else SettlementVerdict.LOST,
        state=job.state,
        run_at=format_timestamp(job.run_at_us) if goes_on else None,
    )


_EXAMPLE: dict[str, Any] = {"jobs": [{"id": ID, "verdict": "accepted", "state": "succeeded", "run_at": None}]}
OPERATIONS = (
    Operation(
        name="settle_jobs",
        method="POST",
        path="/v1/claims/settle",
        scope="work",
        group="Work",
        summary="Say what became of jobs",
        doc="What follows is decided here: whether a failed job is tried again, and when. To settle twice is harmless.",
        handler=settle,
        body=SETTLE,
        batch=True,
        results=True,
        answers={200: ResponseSpec(SettleAnswer, "What became of each, in their order.", _EXAMPLE)},
    ),
)
