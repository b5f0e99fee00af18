"""Outcomes of handlers: exceptions and returned values."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from holdfast.core.errors import Invalid
from holdfast.core.faults import InjectedError
from holdfast.core.lifecycle import (
    MAX_ERROR_LENGTH,
    Dead,
    Failed,
    Outcome,
    RetryAfter,
    Snooze,
    Snoozed,
    Succeeded,
    Suspension,
)
from holdfast.core.models import Reason
from holdfast.core.validation import check_span
from holdfast.tasks import MAX_RESULT_BYTES, Task, encode_result

MAX_TRACEBACK_BYTES = 16 * 1024
"""Bytes of a traceback that are kept: the last ones, which contain the error."""

UNSTARTABLE_DELAY = timedelta(seconds=1)
"""Delay of a released job that could not start for lack of descriptors or memory."""

_WITHOUT_VALUES = re.compile(
    r"(?:there is no such parameter|give one:|the worker provides).*|expected `[^']*"
).fullmatch
"""Remedies that quote no value; others may, such as those of enumerations and of validators."""
_WITHOUT_RESULT = Succeeded()
_SUSPENDED_OUTSIDE_STEPS = Failed(error="the handler raised Suspension, which only its steps may do")
_MAX_FRAMES = 64
_MAX_LEAVES = 3
_MAX_LINKED = 100  # causes, contexts and group members in one traceback

# Read attributes without the exception's own code: its __getattribute__ or properties may raise or never return.
_type_name = type.__dict__["__name__"].__get__
_frames_of = BaseException.__dict__["__traceback__"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_FOLLOWED = ("__getattribute__", "__cause__", "__context__")
_OWN_PATH = f"{Path(__file__).parents[2]}{os.sep}"


def outcome_of(error: BaseException, task: Task[..., Any] | None, *, is_encrypted: bool = False) -> Outcome:
    """Returns the outcome of an exception raised by a handler. Never raises.

    ``task`` decides which exceptions are retryable; None: all are. ``is_encrypted``: the store has payloads encrypted,
    so a refusal of a call that the handler made, such as ``enqueue``, quotes no value; nor does a retry because of it.
    """
    try:
        outcome = _outcome_of_error(error, task)
        refused = _handled_error(error) if isinstance(error, RetryAfter) else error
        if is_encrypted and type(outcome) is Failed and isinstance(refused, Invalid):
            head = "" if refused is error else f"{describe_error(error)}, after "
            text = storable_text(head + _describe_refusal(refused, "the call that the handler made does not accept it"))
            frames = _skip_own_frames(_frames_of(error))
            return replace(outcome, error=text, traceback=None if frames is None else _format_frames(frames, text))
        return outcome
    except BaseException as trouble:  # attributes of the exception and predicates of the task may raise
        text = f"{describe_error(error)} (looking at it raised {describe_error(trouble)})"
        return Failed(error=storable_text(text), traceback=format_traceback(error))


def _outcome_of_error(error: BaseException, task: Task[..., Any] | None) -> Outcome:
    match error:
        case Suspension():
            return _SUSPENDED_OUTSIDE_STEPS  # inside them JobSteps.final_outcome replaces this
        case Snooze(delay=delay):
            return Snoozed(check_span(delay, "delay"))
        case RetryAfter(delay=delay, scope=scope):
            pause = None if scope == "job" else str(scope)
            text, traceback = describe_error(error), None
            if (handled := _handled_error(error)) is not None:
                text, traceback = storable_text(f"{text}, after {describe_error(handled)}"), format_traceback(error)
            return Failed(error=text, delay=check_span(delay, "delay"), pause=pause, traceback=traceback)
        case Dead():
            return Failed(error=describe_error(error), reason=Reason.NON_RETRYABLE, retryable=False)
        case SystemExit():
            # Never a success: a handler has no exit code.
            return Failed(error=describe_error(error), reason=Reason.CRASHED, traceback=format_traceback(error))
        case InjectedError(retryable=injected):  # whatever the task says of errors: its own code raised none
            reason = Reason.ERROR if injected else Reason.NON_RETRYABLE
            return Failed(error=describe_error(error), reason=reason, retryable=injected)
    retryable = task is None or task.is_retryable(error)
    return Failed(
        error=describe_error(error),
        reason=Reason.ERROR if retryable else Reason.NON_RETRYABLE,
        traceback=format_traceback(error),
        retryable=retryable,
    )


def _handled_error(error: RetryAfter) -> BaseException | None:
    """Returns the error that was handled where this one was raised: it tells what is wrong."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def payload_refused(error: Invalid, *, is_encrypted: bool = False) -> Failed:
    """Returns the failure of a payload that does not fit the task (``Task.bind`` raised); not retryable.

    ``is_encrypted``: the store has the payload encrypted, so the error, which it has in the clear, quotes no value.
    """
    otherwise = "it does not fit the task, or this worker's settings"
    text = _describe_refusal(error, otherwise) if is_encrypted else describe_error(error)
    return Failed(error=text, reason=Reason.PAYLOAD, retryable=False)


def _describe_refusal(error: Invalid, otherwise: str) -> str:
    """Text of a refusal without the refused value; ``otherwise`` stands for a remedy that may quote one."""
    remedy = error.remedy if _WITHOUT_VALUES(error.remedy) else otherwise
    return storable_text(f"Invalid: {error.field}: [encrypted] is not valid; {remedy}")


def success_outcome(value: object, max_bytes: int = MAX_RESULT_BYTES) -> Outcome:
    """Returns the outcome of a handler or command that returned ``value``.

    A value that cannot be stored fails the job without a retry: its work is done.
    """
    if value is None:
        return _WITHOUT_RESULT
    try:
        return Succeeded(encode_result(value, max_bytes))
    except BaseException as error:  # encoding runs the application's code: models, __str__, properties
        return Failed(
            error=describe_error(error), reason=Reason.RESULT, traceback=format_traceback(error), retryable=False
        )


def describe_error(error: BaseException) -> str:
    """Returns ``TypeName: message``, storable in every store, at most ``MAX_ERROR_LENGTH`` characters. Never raises."""
    text = _headline(error)
    if issubclass(type(error), BaseExceptionGroup):  # not isinstance: it reads the exception's __class__
        leaves = list(_leaves(error, _MAX_LEAVES))
        text = "; ".join([text, *map(_headline, leaves)])
    return storable_text(text)


def format_traceback(error: BaseException) -> str | None:
    """Returns the traceback from the first frame outside Holdfast, without local variables; None if there is none."""
    frames = _skip_own_frames(_frames_of(error))
    if frames is None:
        return None
    try:
        if _can_be_followed(error):
            lines = traceback.TracebackException(type(error), error, frames, limit=-_MAX_FRAMES, compact=True).format()
            return traceback_tail("".join(lines))
    except BaseException:  # noqa: S110 - attributes of the exception may raise: format the frames alone
        pass
    return _format_frames(frames, _headline(error))


def _format_frames(frames: TracebackType, text: str) -> str:
    stack = traceback.format_tb(frames, limit=-_MAX_FRAMES)
    return traceback_tail("".join(["Traceback (most recent call last):\n", *stack, text]))


def _can_be_followed(error: BaseException) -> bool:
    """Returns True if the linked exceptions are few and no class overrides the attributes that link them."""
    pending, seen = [error], {id(error)}
    while pending:
        each = pending.pop()
        kind = type(each)
        if any(getattr(kind, name) is not getattr(BaseException, name) for name in _FOLLOWED):
            return False
        linked = [_cause_of(each), _context_of(each)]
        if issubclass(kind, BaseExceptionGroup):
            if kind.exceptions is not BaseExceptionGroup.exceptions:
                return False
            linked += _members_of(each)
        fresh = [link for link in linked if link is not None and id(link) not in seen]
        seen.update(map(id, fresh))
        pending += fresh
        if len(seen) > _MAX_LINKED:
            return False
    return True


def storable_text(text: str, max_length: int = MAX_ERROR_LENGTH) -> str:
    """Returns ``text`` as every store accepts it: no NUL, lone surrogates escaped, up to ``max_length`` characters."""
    clean = text[:max_length].replace("\0", "\\x00")
    return clean.encode("utf-8", "backslashreplace").decode()[:max_length]


def _headline(error: BaseException) -> str:
    name = _type_name(type(error))
    try:
        message = str.__getitem__(str(error), slice(MAX_ERROR_LENGTH))  # of a subclass of str, too
    except BaseException as trouble:  # the application's __str__
        return f"{name}: (its message cannot be shown: {_type_name(type(trouble))})"
    return f"{name}: {message}" if message else name


def _leaves(group: BaseException, max_count: int) -> Iterator[BaseException]:
    """Yields the first ``max_count`` leaf exceptions of a group, without recursion: groups may be deep."""
    pending = list(reversed(_members_of(group)))
    while pending and max_count:
        error = pending.pop()
        if issubclass(type(error), BaseExceptionGroup):
            pending.extend(reversed(_members_of(error)))
        else:
            max_count -= 1
            yield error


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_PATH):
        frames = frames.tb_next
    return frames


def traceback_tail(text: str) -> str:
    """Returns the end of a traceback, as every store accepts it: at most ``MAX_TRACEBACK_BYTES`` bytes."""
    data = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TRACEBACK_BYTES:
        return data.decode()
    return "…" + data[3 - MAX_TRACEBACK_BYTES :].decode("utf-8", "ignore")
