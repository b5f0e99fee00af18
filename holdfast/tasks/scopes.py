"""Scopes of handlers: context managers that are entered where the handler runs.

A middleware runs on the worker's event loop. A scope runs in the handler's own thread or child process, where
connections that belong to a thread are found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from typing import Any, TypeVar

from holdfast.tasks.context import Context

Value = TypeVar("Value")

HandlerScope = Callable[[Context], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Takes a job's context and returns a context manager: with ``__enter__`` for ``def`` handlers, and for ``async def``
ones with ``__aenter__`` if it has both."""


def call_in_scopes(scopes: Sequence[HandlerScope], context: Context, handler: Callable[[], Value]) -> Value:
    """Calls a ``def`` handler inside its scopes, the first outermost."""
    with ExitStack() as stack:
        for scope in scopes:
            manager: Any = scope(context)
            stack.enter_context(manager)
        return handler()


async def await_in_scopes(
    scopes: Sequence[HandlerScope], context: Context, handler: Callable[[], Awaitable[Value]]
) -> Value:
    """Awaits an ``async def`` handler inside its scopes, the first outermost."""
    async with AsyncExitStack() as stack:
        for scope in scopes:
            manager: Any = scope(context)
            if hasattr(manager, "__aenter__"):
                await stack.enter_async_context(manager)
            else:
                stack.enter_context(manager)
        return await handler()
