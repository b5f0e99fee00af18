"""The blocking face: the same methods, for callers without an event loop.

A public method marked ``awaited`` refuses to be called without an event loop; its blocking twin is not written
anywhere, it is the same method run through the store's way for blocking callers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.portal import forbid_running_loop, running_loop

P = ParamSpec("P")
T = TypeVar("T")


class Blocker(Protocol):
    """Protocol of an object that runs a coroutine to its end for a blocking caller."""

    def run_blocking(self, call: Coroutine[Any, Any, T], *, here: bool = False) -> T: ...


def requires_loop(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Refuse a call outside an event loop at once, instead of returning a coroutine that never runs."""
    name = method.__name__

    @functools.wraps(method)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        if running_loop() is None:
            raise HoldfastError(
                f"{name}() was called outside an event loop and would never run; await it in an async function, "
                f"or use its blocking form: .sync.{name}(…)"
            )
        return method(*args, **kwargs)

    return checked_call


class Blocking:
    """``thing.sync``: each async method of ``thing``, as a blocking one."""

    def __init__(self, blocker: Blocker, thing: object) -> None:
        self._blocker = blocker
        self._thing = thing

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self._thing), name, None)
        inner = inspect.unwrap(method) if callable(method) else None
        if name.startswith("_") or inner is None or not inspect.iscoroutinefunction(inner):
            raise AttributeError(f"{type(self._thing).__name__} has no async method {name!r} to block on")

        @functools.wraps(inner)
        def blocking_call(*args: Any, **kwargs: Any) -> Any:
            forbid_running_loop(f"await {name}(…) itself instead of .sync.{name}(…)")
            here = kwargs.get("connection") is not None
            return self._blocker.run_blocking(inner(self._thing, *args, **kwargs), here=here)

        return blocking_call

    def __dir__(self) -> list[str]:
        kind = type(self._thing)
        names = [name for name in dir(kind) if not name.startswith("_")]
        return [name for name in names if inspect.iscoroutinefunction(inspect.unwrap(getattr(kind, name)))]
