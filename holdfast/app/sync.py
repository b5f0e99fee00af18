"""The blocking view: the same methods, for callers without an event loop.

A public method marked ``requires_loop`` refuses to be called without an event loop; its blocking twin is a line in a
view, and runs the same method through the store's way for blocking callers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from holdfast.core.portal import forbid_running_loop

P = ParamSpec("P")
T = TypeVar("T")
_HINTS = {"enqueue_stream": "give parts of the stream to .sync.enqueue_many, one after the other"}


class Blocker(Protocol):
    """Protocol of an object that runs a coroutine to its end for a blocking caller."""

    def run_blocking(self, call: Coroutine[Any, Any, T], *, in_this_thread: bool = False) -> T: ...

    def _current_connection(self) -> Any: ...


class BlockingView:
    """``thing.sync``: async methods of ``thing`` as blocking ones. Each is a line of a derived class."""

    __slots__ = ("_blocker", "_thing")

    def __init__(self, blocker: Blocker, thing: object) -> None:
        self._blocker = blocker
        self._thing = thing

    if not TYPE_CHECKING:  # to a type checker, other attributes are errors as ever

        def __getattr__(self, name: str) -> Any:
            thing = self._thing
            if not hasattr(thing, name):
                return getattr(thing, name)  # raises its error, which may name what to write here
            hint = _HINTS.get(name, f"use .{name} itself, without .sync before it")
            raise AttributeError(f"{type(thing).__name__} has no async method {name!r} to block on; {hint}")


class BlockingMethod(Generic[P, T]):
    """The blocking twin of an async method: ``get = BlockingMethod(Holdfast.get)`` in a view of ``Holdfast``."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self._name = method.__name__
        self._submits = "connection" in (inspect.unwrap(method).__kwdefaults__ or ())
        self.__doc__ = method.__doc__

    def __get__(self, view: BlockingView, _: type) -> Callable[P, T]:
        name, thing = self._name, view._thing
        inner = inspect.unwrap(getattr(type(thing), name))  # of a derived class, its own

        @functools.wraps(inner)
        def blocking_call(*args: P.args, **kwargs: P.kwargs) -> T:
            forbid_running_loop(f"await {name}(…) itself instead of .sync.{name}(…)")
            if self._submits and kwargs.get("connection") is None:
                kwargs["connection"] = view._blocker._current_connection()
            in_this_thread = kwargs.get("connection") is not None
            result: T = view._blocker.run_blocking(inner(thing, *args, **kwargs), in_this_thread=in_this_thread)
            return result

        return blocking_call


def iterate_blocking(blocker: Blocker, name: str, pages: AsyncGenerator[Sequence[T], None]) -> Iterator[T]:
    """Yields what an async generator yields in pages, for a blocking caller of the method ``name``."""
    forbid_running_loop(f"use async for with {name}(…) itself instead of .sync.{name}(…)")
    try:
        while page := blocker.run_blocking(_next_page(pages)):
            yield from page
    finally:
        blocker.run_blocking(_close_pages(pages))


async def _next_page(pages: AsyncGenerator[Sequence[T], None]) -> Sequence[T] | None:
    return await anext(pages, None)


async def _close_pages(pages: AsyncGenerator[Any, None]) -> None:
    await pages.aclose()
