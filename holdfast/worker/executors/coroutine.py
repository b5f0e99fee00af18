"""Async handlers: driven inside the runner's own task, each in a context of its own.

A task object per job would cost 5 µs and its cancellation another hop. Here the awaiting task itself steps the
handler's coroutine, so ``asyncio.current_task()``, ``asyncio.timeout``, task groups and cancellation inside the handler
work as if the handler had been awaited; only its context variables are its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Value = TypeVar("Value")


class Escaped(Exception):
    """A handler raised GeneratorExit: as itself it would end the coroutine that runs the handler."""

    def __init__(self, error: GeneratorExit) -> None:
        super().__init__("GeneratorExit")
        self.error = error


@types.coroutine
def drive_in_context(
    coroutine: Coroutine[Any, Any, Value], context: contextvars.Context, waits: Callable[[], object]
) -> Generator[Any, Any, Value]:
    """Await ``coroutine`` with every one of its steps run in ``context``; its value or exception is ours. ``waits`` is
    called each time it comes to wait for something.

    Whatever the awaiting task throws in, ``CancelledError`` above all, is thrown into the coroutine. Nothing of
    ``context`` is seen outside, and nothing that is set outside later is seen in it. Raises Escaped for a
    GeneratorExit of the handler's own.
    """
    run = context.run
    closing = False
    try:
        awaited = run(coroutine.send, None)
        while True:
            # The throw stands outside the except block: else each error raised by the coroutine would carry the one
            # thrown in as its context, whether it handled that or not.
            thrown: BaseException | None = None
            sent = None
            waits()
            try:
                sent = yield awaited
            except GeneratorExit:
                closing = True
                with contextlib.suppress(BaseException):  # the handler may refuse to end
                    run(coroutine.close)
                raise
            except BaseException as error:  # handed on, not handled
                thrown = error
            awaited = run(coroutine.send, sent) if thrown is None else run(coroutine.throw, thrown)
    except StopIteration as done:
        value: Value = done.value
        return value
    except GeneratorExit as error:
        if closing:
            raise
        raise Escaped(error) from None
