"""Async handlers: driven inside the runner's task, each with its own context variables.

A task object per job would cost 5 µs, and its cancellation another iteration of the loop. Here the awaiting task steps
the handler's coroutine. ``asyncio.current_task()``, ``asyncio.timeout``, task groups and cancellation work in the
handler as if it were awaited.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Value = TypeVar("Value")


class HandlerGeneratorExit(Exception):
    """Wraps a GeneratorExit that a handler raised: unwrapped, it would end the runner's coroutine."""

    def __init__(self, error: GeneratorExit) -> None:
        super().__init__("GeneratorExit")
        self.error = error


@types.coroutine
def drive_in_context(
    coroutine: Coroutine[Any, Any, Value], context: contextvars.Context, waits: Callable[[], object]
) -> Generator[Any, Any, Value]:
    """Awaits ``coroutine``, running each of its steps in ``context``; returns its value or raises its exception.

    ``waits`` is called each time the coroutine suspends. Exceptions thrown into the awaiting task, such as
    ``CancelledError``, are thrown into the coroutine. Context variables are isolated in both directions. Raises
    HandlerGeneratorExit for a GeneratorExit that the coroutine raised itself.
    """
    run = context.run
    closing = False
    try:
        awaited = run(coroutine.send, None)
        while True:
            # The throw is outside the except block: inside, errors of the coroutine would get the thrown error as
            # their context, even if the coroutine had handled it.
            thrown: BaseException | None = None
            sent = None
            waits()
            try:
                sent = yield awaited
            except GeneratorExit:
                closing = True
                with contextlib.suppress(BaseException):  # the handler may raise
                    run(coroutine.close)
                raise
            except BaseException as error:  # passed on to the coroutine
                thrown = error
            awaited = run(coroutine.send, sent) if thrown is None else run(coroutine.throw, thrown)
    except StopIteration as done:
        value: Value = done.value
        return value
    except GeneratorExit as error:
        if closing:
            raise
        raise HandlerGeneratorExit(error) from None
