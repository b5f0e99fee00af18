"""Tasks and their registry."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from msgspec import UNSET, UnsetType

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.validation import check_priority, check_task_name, did_you_mean
from holdfast.tasks.codec import MAX_PAYLOAD_BYTES, decode_json, result_decoder
from holdfast.tasks.signature import Signature, check_function, check_result_annotation, source_location

if TYPE_CHECKING:
    from holdfast.core.resources import Resources
    from holdfast.core.retry import Retry
    from holdfast.core.unique import Unique
    from holdfast.tasks.scopes import HandlerScope

P = ParamSpec("P")
R = TypeVar("R")

Executor = Literal["async", "thread", "process"]
"""Executor of a handler: the worker's event loop, a thread, or a child process that can be killed."""

_NEAR = 0.85  # likeness of a misspelt name; names of another program often begin as those here do
_MAX_LOGGED = 100  # limit of names that are compared, and logged

Predicate = Callable[[BaseException], bool]
ErrorMatch = type[BaseException] | Predicate | tuple["type[BaseException] | Predicate", ...]
"""A match of errors: a class, a predicate, or a tuple of both."""


class Task(Generic[P, R]):
    """A registered function with the options of its jobs. Calling the task calls the function."""

    __slots__ = (
        "name",
        "function",
        "queue",
        "retry",
        "max_attempts",
        "timeout",
        "executor",
        "retry_on",
        "dead_on",
        "priority",
        "tags",
        "unique",
        "expires",
        "resources",
        "scopes",
        "_result",
        "_signature",
        "__weakref__",
    )

    def __init__(
        self,
        name: str,
        function: Callable[P, R],
        *,
        queue: str = "default",
        retry: Retry | None = None,
        max_attempts: int | UnsetType | None = UNSET,
        timeout: float | None = None,
        executor: Executor | None = None,
        retry_on: ErrorMatch | None = None,
        dead_on: ErrorMatch = (),
        priority: int = 0,
        tags: Sequence[str] = (),
        unique: Unique | None = None,
        expires: timedelta | None = None,
        resources: Resources | None = None,
        scopes: Sequence[HandlerScope] = (),
    ) -> None:
        """``timeout`` in seconds. ``max_attempts``: UNSET leaves it to the settings, None is no limit.

        ``executor``: by default the event loop for ``async def``, a thread for ``def``.
        """
        _check_options(name, max_attempts, timeout, executor, priority)
        check_function(name, function)
        check_result_annotation(name, function)
        coroutine = inspect.iscoroutinefunction(function)
        _check_executor(name, executor, coroutine=coroutine)
        self.name = name
        self.function = function
        self.queue = queue
        self.retry = retry
        self.max_attempts = max_attempts
        self.timeout = timeout
        self.executor: Executor = executor or ("async" if coroutine else "thread")
        self.retry_on = () if retry_on is None else _matches(name, "retry_on", retry_on)
        self.dead_on = _matches(name, "dead_on", dead_on)
        self.priority = priority
        self.tags = tuple(tags)
        self.unique = unique
        self.expires = expires
        if unique is not None:
            self.check_unique(unique)
        self.scopes = scopes
        self.resources = resources
        if resources is not None and self.executor != "process":
            remedy = 'add executor="process": the event loop and threads share the worker\'s own process'
            problem = f"cannot limit a task of executor {self.executor!r}"
            raise Invalid(f"resources of task {name!r}", resources, remedy, problem)
        self._signature: Signature | None = None
        self._result: Callable[[str], Any] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name} {self.function.__module__}:{self.function.__qualname__}>"

    def check_unique(self, unique: Unique) -> None:
        """Raises Invalid if the policy names an argument that the function does not take: it would always be null."""
        for part in unique.by:
            if part.startswith("args."):
                self.check_argument(part, "unique.by")

    def check_argument(self, path: str, field: str) -> None:
        """Raises Invalid if a path like "args.tenant" names an argument that the function does not take."""
        parameters = inspect.signature(self.function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return
        argument = path.removeprefix("args.").partition(".")[0]
        if argument not in parameters:
            remedy = f"task {self.name!r} takes {', '.join(parameters) or 'no arguments'}"
            raise Invalid(field, path, remedy + did_you_mean(argument, parameters))

    # ── the payload ───────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self) -> Signature:
        """Returns the signature with resolved annotations; ConfigError if one fails."""
        if self._signature is None:
            self._signature = Signature(self.name, self.function)
        return self._signature

    def check_runnable(self) -> None:
        """Raises ConfigError for a task that no worker can run. A worker calls this at start."""
        self.prepare()
        if self.executor == "process":
            if self.dependencies:
                names = ", ".join(self.dependencies)
                raise ConfigError(
                    f"task {self.name!r} runs in a child process, where provided values ({names}) do not exist; "
                    "make them inside the handler, or use another executor"
                )
            _ = self.reference

    def encode(self, args: Sequence[Any], kwargs: dict[str, Any], max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
        """Encodes a call as a payload; Invalid or TooLarge names the argument."""
        return (self._signature or self.prepare()).encode(args, kwargs, max_bytes)

    def bind(self, payload: str) -> dict[str, Any]:
        """Decodes a payload to keyword arguments, defaults included; Invalid if it does not fit."""
        return (self._signature or self.prepare()).bind(payload)

    def decode_result(self, text: str | None) -> R:
        """Decodes a stored result by the function's return annotation; returns plain JSON values if it does not fit."""
        value: Any = None
        if text is not None:
            if self._result is None:
                self._result = result_decoder(self.function)
            try:
                value = self._result(text)
            except ValueError:  # msgspec's errors are among them
                value = decode_json(text)
        result: R = value
        return result

    # ── the call ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def needs_context(self) -> bool:
        """Returns True if the first parameter is annotated ``Context``."""
        return self.prepare().needs_context

    @property
    def dependencies(self) -> dict[str, type]:
        """Returns the parameters that the worker provides, with the class of each."""
        return self.prepare().dependencies

    @property
    def entry(self) -> Callable[..., Any]:
        """Returns a callable that takes the context, if the task needs it, and all other arguments by name.

        It is the function itself, unless that has positional-only parameters.
        """
        return self.prepare().entry

    @property
    def reference(self) -> str:
        """Returns ``module:qualname``, with which a child process imports this task; ConfigError if it cannot."""
        module, name = self.function.__module__, self.function.__qualname__
        if module == "__main__":
            raise self._unreachable("it is defined in the program's main module, which a child does not import")
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not self and found is not self.function and getattr(found, "function", None) is not self.function:
            raise self._unreachable(f"{module}:{name} is not it")
        return f"{module}:{name}"

    def _unreachable(self, why: str) -> ConfigError:
        return ConfigError(
            f'task {self.name!r}: executor "process" imports the function in a child process, but {why}; '
            f"define it at the top level of a module: {source_location(self.function)}"
        )

    def is_retryable(self, error: BaseException) -> bool:
        """Returns True if the attempt may be repeated: ``dead_on`` does not match, and ``retry_on``, if given, does.

        A predicate that raises prevents no retry; the error gets a note.
        """
        if self.dead_on and self._matched("dead_on", self.dead_on, error, if_broken=False):
            return False
        return not self.retry_on or self._matched("retry_on", self.retry_on, error, if_broken=True)

    def _matched(
        self,
        option: str,
        matches: tuple[type[BaseException] | Predicate, ...],
        error: BaseException,
        *,
        if_broken: bool,
    ) -> bool:
        for match in matches:
            if isinstance(match, type):
                if isinstance(error, match):
                    return True
                continue
            try:
                if match(error):
                    return True
            except Exception as broken:
                error.add_note(f"{option} of task {self.name!r} raised {type(broken).__name__}: {broken}")
                return if_broken
        return False


def _check_executor(name: str, executor: Executor | None, *, coroutine: bool) -> None:
    if executor == "async" and not coroutine:
        raise ConfigError(f'task {name!r}: executor "async" needs an async def; use "thread" or "process"')
    if executor == "thread" and coroutine:
        raise ConfigError(f'task {name!r}: executor "thread" needs a plain def; use "async" or "process"')


def _check_options(name: object, max_attempts: object, timeout: object, executor: object, priority: object) -> None:
    check_task_name(name)
    attempts_fit = isinstance(max_attempts, int) and not isinstance(max_attempts, bool) and max_attempts >= 1
    if not (max_attempts is None or max_attempts is UNSET or attempts_fit):
        raise Invalid(
            f"max_attempts of task {name!r}", max_attempts, "give a whole number from 1, or None for no limit"
        )
    if not (timeout is None or _is_positive(timeout)):
        raise Invalid(f"timeout of task {name!r}", timeout, "give seconds above 0, or None")
    if executor not in (None, "async", "thread", "process"):
        raise Invalid(f"executor of task {name!r}", executor, "give async, thread or process")
    check_priority(priority, f"priority of task {name!r}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _matches(name: str, option: str, given: object) -> tuple[type[BaseException] | Predicate, ...]:
    if option == "retry_on" and given in ((), []):  # to match no error cannot mean to retry all
        remedy = "leave it out to retry every error; for no automatic retries give dead_on=Exception"
        raise Invalid(f"{option} of task {name!r}", given, remedy, "names no error")
    matches = given if isinstance(given, tuple) else (given,)
    for each in matches:
        if not (issubclass(each, BaseException) if isinstance(each, type) else callable(each)):
            remedy = "give exception classes or functions from the error to a bool"
            raise Invalid(f"{option} of task {name!r}", each, remedy)
    return matches


class Registry:
    """The tasks of an application, by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._foreign: set[str] = set()

    def register(self, task: Task[..., Any]) -> None:
        """Adds a task; ConfigError if another one has its name."""
        other = self._tasks.setdefault(task.name, task)
        if other is not task:
            raise ConfigError(
                f"task {task.name!r} is registered twice: by {source_location(other.function)} "
                f"and by {source_location(task.function)}; give one of them another name"
            )

    def get(self, name: str) -> Task[..., Any] | None:
        """Returns the task of that name; None if there is none."""
        return self._tasks.get(name)

    def warn_if_misspelt(self, name: str) -> None:
        """Logs, once for each name, that no task has it but one has almost this name."""
        if name in self._tasks or name in self._foreign or len(self._foreign) == _MAX_LOGGED:
            return
        self._foreign.add(name)
        if close := difflib.get_close_matches(name, self._tasks, n=1, cutoff=_NEAR):
            text = "a job of task %s is submitted, which this application does not have; did you mean %s?"
            logging.getLogger(__name__).warning(text, name, close[0])

    def task_names(self) -> list[str]:
        """Returns the names of all tasks, sorted."""
        return sorted(self._tasks)

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks
