"""What the end of a handler means: exceptions and returned values as outcomes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.errors import Invalid
from holdfast.job import Reason
from holdfast.lifecycle import ERROR_LIMIT, Failed, Outcome, Snoozed, Succeeded
from holdfast.signals import Dead, RetryAfter, Snooze
from holdfast.task import RESULT_LIMIT, Task, encode_result

TRACEBACK_LIMIT = 16 * 1024
"""Bytes of a traceback that are kept: the last ones, where the error is."""

UNSTARTABLE_DELAY = timedelta(seconds=1)
"""How long a job rests that a worker short of descriptors or memory could not start."""

_FRAMES = 64
_LEAVES = 3
_OURS = f"{Path(__file__).parent.parent}{os.sep}"


def outcome_of(error: BaseException, task: Task[..., Any] | None) -> Outcome:
    """What an exception out of a handler means. ``task`` says which ones are worth another attempt; None: all are."""
    match error:
        case Snooze(delay=delay):
            return Snoozed(delay)
        case RetryAfter(delay=delay):
            return Failed(error=describe(error), delay=delay)
        case Dead():
            return Failed(error=describe(error), reason=Reason.NON_RETRYABLE, retryable=False)
        case SystemExit():
            # In a thread or a coroutine it would end the worker; there is no "successful exit" of a handler.
            return Failed(error=describe(error), reason=Reason.CRASHED, traceback=trace(error))
    retryable = task is None or task.is_retryable(error)
    return Failed(
        error=describe(error),
        reason=Reason.ERROR if retryable else Reason.NON_RETRYABLE,
        traceback=trace(error),
        retryable=retryable,
    )


def payload_refused(error: Invalid) -> Failed:
    """The payload does not fit the task (``Task.bind`` raised): trying again would change nothing."""
    return Failed(error=describe(error), reason=Reason.PAYLOAD, retryable=False)


def succeeded(task: Task[..., Any] | None, value: object, limit: int = RESULT_LIMIT) -> Outcome:
    """The handler (a command, where ``task`` is None) returned ``value``.

    A value that cannot be stored fails the job for good: its work *was* done.
    """
    try:
        return Succeeded(encode_result(value, limit) if task is None else task.encode_result(value, limit))
    except Exception as error:  # encoding runs the application's code: models, __str__, properties
        return Failed(error=describe(error), reason=Reason.RESULT, traceback=trace(error), retryable=False)


def describe(error: BaseException) -> str:
    """``TypeName: message``, storable anywhere, at most ``ERROR_LIMIT`` characters. Never raises."""
    text = _headline(error)
    if isinstance(error, BaseExceptionGroup):
        leaves = list(_leaves(error, _LEAVES))
        text = "; ".join([text, *map(_headline, leaves)])
    return storable(text)


def trace(error: BaseException) -> str | None:
    """The traceback from the first frame that is not ours, without local variables; None if there is no such frame."""
    frames = _beyond_ours(error.__traceback__)
    if frames is None:
        return None
    try:
        lines = traceback.TracebackException(type(error), error, frames, limit=-_FRAMES, compact=True).format()
        text = "".join(lines)
    except Exception as trouble:  # an exception's own attributes may raise
        text = f"(the traceback cannot be shown: {type(trouble).__name__})"
    return tail(text)


def storable(text: str, limit: int = ERROR_LIMIT) -> str:
    """``text`` as every store takes it: no NUL, lone surrogates written out, at most ``limit`` characters."""
    clean = text[:limit].replace("\0", "\\x00")
    return clean.encode("utf-8", "backslashreplace").decode()[:limit]


def _headline(error: BaseException) -> str:
    name = type(error).__name__
    try:
        message = str(error)[:ERROR_LIMIT]
    except (Exception, SystemExit) as trouble:  # the application's __str__
        return f"{name}: (its message cannot be shown: {type(trouble).__name__})"
    return f"{name}: {message}" if message else name


def _leaves(group: BaseExceptionGroup[BaseException], limit: int) -> Iterator[BaseException]:
    """The first ``limit`` exceptions of a group that are no groups, without recursion: groups may be deep."""
    pending = list(reversed(group.exceptions))
    while pending and limit:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(reversed(error.exceptions))
        else:
            limit -= 1
            yield error


def _beyond_ours(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames


def tail(text: str) -> str:
    """The end of a traceback, as every store takes it: at most ``TRACEBACK_LIMIT`` bytes."""
    data = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) <= TRACEBACK_LIMIT:
        return data.decode()
    return "…" + data[3 - TRACEBACK_LIMIT :].decode("utf-8", "ignore")
