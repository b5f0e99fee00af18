"""Audit: an event for each call that may change something, and an entry in the audit file before and after.

The first entry is on disk before anything is changed. Without it nothing is: the call is refused. Entries say which
operation on which jobs, and how it ended; nothing of payloads, results and errors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.events import ApiChange, ApiSubmission, AuditFailed
from holdfast.settings.settings import Settings
from holdfast.telemetry.audit_file import AuditFile, check_writable
from holdfast.views.formatting import format_timestamp
from holdfast.web.messages import RETRY_AFTER, ApiResponse, Refusal, answer_to
from holdfast.web.routing import Operation, RequestContext
from holdfast.web.settlements import OUTCOMES

_TARGETS = ("id", "ids", "filter", "all", "dry_run", "limit", "force", "rate", "task", "queue", "queues", "key")
_OPTIONS = ("worker", "workers", "drain", "priority", "delay", "run_at", "expires", "tags", "after", "name", "replace")
_RETRIES = ("max_attempts", "timeout", "retry", "unique", "key_for", "batch", "from_step", "topic")
_TIMES = ("cron", "zone", "every", "at", "start", "end", "overlap", "catch_up", "jitter", "max_runs")
_LIMITS = ("by", "concurrency", "burst", "weight", "depth", "for", "faults", "span", "seed")
_COUNTED = ("jobs", "leases", "lines", "settlements", "shares", "values")
_MAX_IDS = 50
_MAX_TEXT = 1000


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry of the audit file about a call."""

    at: str
    step: Literal["asked", "done", "refused"]
    who: str
    address: str
    request_id: str
    operation: str
    target: str
    asked: Mapping[str, Any] | UnsetType = UNSET
    status: int | UnsetType = UNSET
    code: str | UnsetType = UNSET
    ids: Sequence[str] | UnsetType = UNSET
    count: int | UnsetType = UNSET
    verdicts: Mapping[str, int] | UnsetType = UNSET


class _Problem(msgspec.Struct):
    """Fields looked for in a refusal."""

    code: str
    stored: list[str | None] = []


_encode = msgspec.json.Encoder(enc_hook=repr).encode
_decode = msgspec.json.Decoder(_Problem).decode


class Audit:
    """The record of one application's API; ConfigError where its file cannot be used at the start."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._file = _file(app.settings)
        self._problem = ""

    def list_warnings(self) -> list[str]:
        """Returns warnings for operators; the log says more."""
        return ["the audit file cannot be written; calls that change something are refused"] if self._problem else []

    async def record_request(self, call: RequestContext, operation: Operation) -> None:
        """Before the change. Refusal where it could not be recorded."""
        if self._file is None:
            return
        try:
            await self._file.add(_encode(_entry("asked", call, operation, asked=_summary(call.body, operation))))
        except Unavailable as error:
            self._tell_failure(str(error))
            retry = (b"retry-after", str(RETRY_AFTER).encode())
            detail = "this would change something, and the audit file cannot be written"
            raise Refusal(503, "audit_unavailable", detail, "try again; nothing was changed", retry) from None
        self._problem = ""

    async def record_result(self, call: RequestContext, operation: Operation, ended: ApiResponse | Exception) -> None:
        """After it, however it ended."""
        if not self._is_audited(operation):
            return
        answer = answer_to(ended, call.request.id) if isinstance(ended, Exception) else ended
        outcome = _outcome(answer, call)
        self._emit(call, operation, answer.status, outcome)
        if self._file is not None:
            entry = _entry("done", call, operation, status=answer.status, **outcome)
            try:
                await self._file.add(_encode(entry))
            except Unavailable as error:
                self._tell_failure(f"what came of request {call.request.id} is not recorded: {error}")

    def record_refusal(self, call: RequestContext, operation: Operation, error: Exception) -> None:
        """A call that was not understood, and changed nothing. It waits for no file."""
        if not self._is_audited(operation):
            return
        answer = answer_to(error, call.request.id)
        outcome = _outcome(answer, call)
        self._emit(call, operation, answer.status, outcome)
        if self._file is not None:
            self._file.add_later(_encode(_entry("refused", call, operation, status=answer.status, **outcome)))

    def _is_audited(self, operation: Operation) -> bool:
        """Returns True if there is a subscriber: submissions come by the thousand."""
        return self._file is not None or self._app.events.has_subscriber(_kind(operation))

    def _emit(self, call: RequestContext, operation: Operation, status: int, outcome: Mapping[str, Any]) -> None:
        kind = _kind(operation)
        if self._app.events.has_subscriber(kind):
            self._app.events.emit(
                kind(
                    operation=operation.name,
                    who=call.caller.name,
                    address=call.caller.address,
                    request_id=call.request.id,
                    target=_target(call),
                    status=status,
                    count=outcome.get("count", 0),
                    ids=list(outcome.get("ids", ())),
                )
            )

    def _tell_failure(self, problem: str) -> None:
        if problem != self._problem:
            self._app.events.emit(AuditFailed(problem=problem))
        self._problem = problem


def _file(settings: Settings) -> AuditFile | None:
    if settings.audit_file is None:
        return None
    path = Path(settings.audit_file)
    if settings.keys_file is not None and path.resolve() == Path(settings.keys_file).resolve():
        raise ConfigError(f"audit_file, keys_file: {path} cannot be both; name another file")
    check_writable(path)
    return AuditFile(path)


def _kind(operation: Operation) -> type[ApiChange | ApiSubmission]:
    return ApiSubmission if operation.scope in ("submit", "work") else ApiChange


def _entry(
    step: Literal["asked", "done", "refused"], call: RequestContext, operation: Operation, **given: Any
) -> AuditEntry:
    return AuditEntry(
        at=format_timestamp(time.time_ns() // 1000),
        step=step,
        who=call.caller.name,
        address=call.caller.address[:64],
        request_id=call.request.id,
        operation=operation.name,
        target=_target(call),
        **given,
    )


def _target(call: RequestContext) -> str:
    return f"{call.request.method} {call.request.shown_path}"[:300]


def _summary(body: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    """Returns a short summary of the request, without job contents."""
    given: dict[str, Any] = {}
    for name in (*_TARGETS, *_OPTIONS, *_RETRIES, *_TIMES, *_LIMITS):
        if name in body:
            value = body[name]
            if isinstance(value, list) and len(value) > _MAX_IDS:
                given[f"{name}_count"] = len(value)
                value = value[:_MAX_IDS]
            text = _encode(value)
            given[name] = value if len(text) <= _MAX_TEXT * 4 else text[:_MAX_TEXT].decode("utf-8", "replace")
    if not operation.raw:  # else it is unread
        given |= {f"{name}_count": len(body[name]) for name in _COUNTED if name in body}
        words = [each.get("outcome") for each in body.get("settlements", ())]
        given |= {"settlements": {word: words.count(word) for word in OUTCOMES if word in words}} if words else {}
    if operation.scope == "operate" and "payload" in body:  # record that it was edited, not its values
        given["payload_edited"] = True
    return given if len(_encode(given)) <= _MAX_TEXT * 8 else {"fields": sorted(given)}


def _outcome(answer: ApiResponse, call: RequestContext) -> dict[str, Any]:
    """Returns the outcome of a call: the code of its refusal, its changes if they are few, and their number."""
    problem = _decode(answer.body) if answer.status >= 400 else None
    given: dict[str, Any] = {} if problem is None else {"code": problem.code}
    ids = call.changed or ([] if problem is None else [each for each in problem.stored if each is not None])
    if ids:
        given["ids"] = ids[:_MAX_IDS]
    if ids or problem is None:
        given["count"] = len(ids)
    return {**given, "verdicts": call.verdicts} if call.verdicts else given
