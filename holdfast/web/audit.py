"""Who changed what: an event for each call that may change something, and an entry in the audit file before and after.

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
from holdfast.config import Settings
from holdfast.desk.words import timestamp
from holdfast.errors import ConfigError, Unavailable
from holdfast.events import ApiChange, ApiSubmission, AuditFailed
from holdfast.observe.audit_file import AuditFile, check
from holdfast.web.messages import Answer, Refusal
from holdfast.web.problems import RETRY_AFTER, answer_to
from holdfast.web.routing import Call, Operation

_TOLD = ("id", "ids", "filter", "all", "dry_run", "limit", "force", "rate", "type", "queue", "queues", "key")
_TOLD_TOO = ("worker", "workers", "drain", "priority", "delay", "run_at")
_IDS_MOST = 50
_TEXT_MOST = 1000
_ANSWER_MOST = 256 * 1024  # bytes of an answer that is searched for ids


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the audit file says of a call."""

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


class _Named(msgspec.Struct):
    id: str = ""


class _Outcome(msgspec.Struct):
    """What is looked for in answers and problems."""

    id: str = ""
    code: str | UnsetType = UNSET
    count: int | None = None
    changed: list[_Named] = []
    jobs: list[_Named] = []
    asked: list[str] = []
    stored: list[str | None] = []


_encode = msgspec.json.Encoder(enc_hook=repr).encode
_decode = msgspec.json.Decoder(_Outcome).decode


class Audit:
    """The record of one application's API; ConfigError where its file cannot be used at the start."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._file = _file(app.settings)
        self._problem = ""

    def warnings(self) -> list[str]:
        """What is to be seen to, in words for everybody; the log says more."""
        return ["the audit file cannot be written; calls that change something are refused"] if self._problem else []

    async def asked(self, call: Call, operation: Operation) -> None:
        """Before the change. Refusal where it could not be recorded."""
        if self._file is None:
            return
        try:
            await self._file.add(_encode(_entry("asked", call, operation, asked=_summary(call.body))))
        except Unavailable as error:
            self._tell_failure(str(error))
            retry = (b"retry-after", str(RETRY_AFTER).encode())
            detail = "this would change something, and the audit file cannot be written"
            raise Refusal(503, "audit_unavailable", detail, "try again; nothing was changed", retry) from None
        self._problem = ""

    async def done(self, call: Call, operation: Operation, ended: Answer | Exception) -> None:
        """After it, however it ended."""
        if not self._is_heard(operation):
            return
        answer = answer_to(ended, call.request.id) if isinstance(ended, Exception) else ended
        outcome = _outcome(answer, call.changed)
        self._emit(call, operation, answer.status, outcome)
        if self._file is not None:
            entry = _entry("done", call, operation, status=answer.status, **outcome)
            try:
                await self._file.add(_encode(entry))
            except Unavailable as error:
                self._tell_failure(f"what came of request {call.request.id} is not recorded: {error}")

    def refused(self, call: Call, operation: Operation, error: Exception) -> None:
        """A call that was not understood, and changed nothing. It waits for no file."""
        if not self._is_heard(operation):
            return
        answer = answer_to(error, call.request.id)
        outcome = _outcome(answer)
        self._emit(call, operation, answer.status, outcome)
        if self._file is not None:
            self._file.offer(_encode(_entry("refused", call, operation, status=answer.status, **outcome)))

    def _is_heard(self, operation: Operation) -> bool:
        """Whether anybody wants to know: submissions come by the thousand."""
        return self._file is not None or self._app.events.listens(_kind(operation))

    def _emit(self, call: Call, operation: Operation, status: int, outcome: Mapping[str, Any]) -> None:
        kind = _kind(operation)
        if self._app.events.listens(kind):
            ids = outcome.get("ids", ())
            self._app.events.emit(
                kind(
                    operation=operation.name,
                    who=call.caller.name,
                    address=call.caller.address,
                    request_id=call.request.id,
                    target=_target(call),
                    status=status,
                    count=outcome.get("count", len(ids)),
                    ids=list(ids),
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
    check(path)
    return AuditFile(path)


def _kind(operation: Operation) -> type[ApiChange | ApiSubmission]:
    return ApiSubmission if operation.scope in ("submit", "work") else ApiChange


def _entry(step: Literal["asked", "done", "refused"], call: Call, operation: Operation, **said: Any) -> Entry:
    return Entry(
        at=timestamp(time.time_ns() // 1000),
        step=step,
        who=call.caller.name,
        address=call.caller.address[:64],
        request_id=call.request.id,
        operation=operation.name,
        target=_target(call),
        **said,
    )


def _target(call: Call) -> str:
    path = "/" + "/".join(call.request.segments)
    return f"{call.request.method} {path}"[:300]


def _summary(body: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, without what jobs carry, and never long."""
    said: dict[str, Any] = {}
    for name in (*_TOLD, *_TOLD_TOO):
        if name in body:
            value = body[name]
            if isinstance(value, list) and len(value) > _IDS_MOST:
                said[f"{name}_count"] = len(value)
                value = value[:_IDS_MOST]
            text = _encode(value)
            said[name] = value if len(text) <= _TEXT_MOST * 4 else text[:_TEXT_MOST].decode("utf-8", "replace")
    if isinstance(jobs := body.get("jobs"), list):
        said["jobs_count"] = len(jobs)
    return said if len(_encode(said)) <= _TEXT_MOST * 8 else {"fields": sorted(said)}


def _outcome(answer: Answer, changed: Sequence[str] = ()) -> dict[str, Any]:
    """What the answer says of jobs: their ids, as far as they are few, and how many; ``changed``: where it has none."""
    if changed:
        return {"ids": list(changed[:_IDS_MOST]), "count": len(changed)}
    if not answer.body or len(answer.body) > _ANSWER_MOST:
        return {}
    try:
        found = _decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    ids = [found.id] if found.id else [each.id for each in (*found.changed, *found.jobs)] or found.asked
    ids = ids or [each for each in found.stored if each is not None]
    said: dict[str, Any] = {} if found.code is UNSET else {"code": found.code}
    if ids:
        said["ids"] = [each[:64] for each in ids[:_IDS_MOST]]
    count = len(ids) if found.count is None else found.count
    return said if answer.status >= 400 else {**said, "count": count}
