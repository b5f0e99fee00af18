"""What exceptions and returned values mean: ``worker/executors/outcome.py``."""

from __future__ import annotations

import asyncio
import contextvars
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.errors import Invalid
from holdfast.core.lifecycle import MAX_ERROR_LENGTH, Dead, Failed, RetryAfter, Snooze, Snoozed, Succeeded
from holdfast.core.models import Reason
from holdfast.tasks import Task
from holdfast.worker.executors.coroutine import drive_in_context
from holdfast.worker.executors.outcome import (
    MAX_TRACEBACK_BYTES,
    describe_error,
    format_traceback,
    outcome_of,
    payload_refused,
    storable_text,
    success_outcome,
)


def caught(error: BaseException) -> BaseException:
    """``error`` after it was really raised, with a traceback."""
    secret_local = "swordfish-" + "x"  # noqa: F841 - must not show up in any traceback
    try:
        raise error
    except BaseException as raised:
        return raised


def failed(error: BaseException, task: Task[..., Any] | None = None) -> Failed:
    outcome = outcome_of(caught(error), task)
    assert isinstance(outcome, Failed)
    return outcome


def task(function: Any, **options: Any) -> Task[..., Any]:
    return Task("t", function, **options)


def nothing() -> None: ...


def test_an_ordinary_error_is_retried_and_says_what_it_was() -> None:
    outcome = failed(ValueError("no good"))
    assert (outcome.error, outcome.reason, outcome.retryable) == ("ValueError: no good", Reason.ERROR, True)
    assert outcome.traceback is not None
    assert "raise error" in outcome.traceback
    assert "swordfish" not in outcome.traceback.replace('"swordfish-" + "x"', "")


def test_the_signals_of_a_handler() -> None:
    assert outcome_of(caught(Snooze(5)), None) == Snoozed(timedelta(seconds=5))
    assert failed(RetryAfter(7, "busy")).delay == timedelta(seconds=7)
    assert failed(RetryAfter(7, "busy")).retryable
    dead = failed(Dead("bad card"))
    assert (dead.error, dead.reason, dead.retryable) == ("Dead: bad card", Reason.NON_RETRYABLE, False)


def test_retry_after_tells_which_error_it_was_raised_for() -> None:
    assert failed(RetryAfter(7, "busy")).traceback is None
    try:
        try:
            raise ConnectionError("gateway away")
        except ConnectionError:
            raise RetryAfter(7, "busy")  # noqa: B904 - without "from", as many write it
    except RetryAfter as error:
        outcome = failed(error)
    assert outcome.error == "RetryAfter: busy, after ConnectionError: gateway away"
    assert outcome.traceback is not None
    assert 'raise ConnectionError("gateway away")' in outcome.traceback


def test_a_handler_says_its_delay_as_everything_else_says_spans() -> None:
    assert failed(RetryAfter("5m")).delay == failed(RetryAfter(timedelta(minutes=5))).delay == timedelta(seconds=300)
    assert outcome_of(caught(Snooze("1h")), None) == Snoozed(timedelta(hours=1))
    for signal in (RetryAfter, Snooze):
        with pytest.raises(Invalid, match="delay: '5' is not valid; give seconds as a number, a timedelta, or text"):
            signal("5")


def test_the_task_says_which_errors_are_final() -> None:
    assert not failed(KeyError("k"), task(nothing, dead_on=KeyError)).retryable
    assert failed(KeyError("k"), task(nothing, dead_on=KeyError)).reason is Reason.NON_RETRYABLE
    assert failed(ValueError(), task(nothing, dead_on=KeyError)).retryable
    assert not failed(ValueError(), task(nothing, retry_on=KeyError)).retryable


def test_leaving_the_program_is_a_crash_whatever_the_code() -> None:
    outcome = failed(SystemExit(0), task(nothing, retry_on=KeyError))
    assert (outcome.error, outcome.reason, outcome.retryable) == ("SystemExit: 0", Reason.CRASHED, True)


def test_a_refused_payload_is_final() -> None:
    outcome = payload_refused(Invalid("to", 5, "give a string"))
    assert (outcome.reason, outcome.retryable) == (Reason.PAYLOAD, False)
    assert outcome.error == "Invalid: to: 5 is not valid; give a string"


class Hostile(Exception):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __str__(self) -> str:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]  # the wrong type is the point


@pytest.mark.parametrize("answer", [ValueError("inner"), SystemExit(1), RecursionError(), 5, None])
def test_a_message_that_cannot_be_had_does_no_harm(answer: object) -> None:
    outcome = failed(Hostile(answer))
    assert outcome.error.startswith("Hostile: (its message cannot be shown:")


def test_a_huge_message_is_clipped() -> None:
    assert failed(Hostile("x" * 50_000_000)).error == ("Hostile: " + "x" * MAX_ERROR_LENGTH)[:MAX_ERROR_LENGTH]
    assert len((failed(Hostile("é" * 50_000)).traceback or "").encode()) <= MAX_TRACEBACK_BYTES


def test_text_that_no_database_takes_is_written_out() -> None:
    error = failed(ValueError("a\0b\ud800c")).error
    assert error == "ValueError: a\\x00b\\ud800c"
    error.encode()
    assert len(storable_text("\ud800" * 10_000)) == MAX_ERROR_LENGTH
    outcome = failed(ValueError("\0\ud800"))
    assert outcome.traceback is not None
    outcome.traceback.encode()
    assert "\0" not in outcome.traceback


def test_a_group_names_what_is_in_it() -> None:
    inner = ExceptionGroup("deeper", [KeyError("k"), OSError("o"), ValueError("v"), ValueError("w")])
    text = describe_error(ExceptionGroup("unhandled", [TypeError("t"), inner]))
    assert text == "ExceptionGroup: unhandled (2 sub-exceptions); TypeError: t; KeyError: 'k'; OSError: o"


def test_the_traceback_starts_where_the_application_does() -> None:
    def handler() -> None:
        Task("t", nothing, priority=1000)

    try:
        handler()
    except Invalid as error:
        text = format_traceback(error) or ""
    frames = [line for line in text.splitlines() if line.startswith("  File")]
    assert "in handler" in frames[1]
    assert "in __init__" in frames[2]


def test_frames_of_the_executors_are_left_out() -> None:
    async def handler() -> None:
        raise ValueError("mine")

    async def runner() -> None:
        await drive_in_context(handler(), contextvars.copy_context(), lambda: None)

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(runner())
    frames = caught.value.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.endswith("coroutine.py"):
        frames = frames.tb_next
    text = format_traceback(caught.value.with_traceback(frames)) or ""
    assert "in handler" in text
    assert "coroutine.py" not in text


def test_a_deep_recursion_keeps_its_end() -> None:
    def dive(left: int) -> None:
        if left == 0:
            raise ValueError("bottom")
        dive(left - 1)

    try:
        dive(900)
    except ValueError as error:
        text = format_traceback(error) or ""
    assert len(text.encode()) <= MAX_TRACEBACK_BYTES
    assert text.rstrip().endswith("ValueError: bottom")


def test_result_is_encoded_and_an_unencodable_one_is_final() -> None:
    assert success_outcome({"a": 1}) == Succeeded('{"a":1}')
    assert success_outcome(None) == Succeeded(None)
    outcome = success_outcome(object())
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (Reason.RESULT, False)
