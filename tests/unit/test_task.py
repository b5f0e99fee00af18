"""What may be a task, what a registry and a running job show, and which errors are retried."""

from __future__ import annotations

import math
import threading
import typing
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NoReturn

import msgspec
import pydantic
import pytest

from holdfast.core.errors import ConfigError, HoldfastError, Invalid
from holdfast.core.models import Job, Options
from holdfast.tasks import CURRENT, Context, Registry, Task, current_job, encode_result, provided

if typing.TYPE_CHECKING:
    from nowhere import Missing


class Client:
    """A dependency."""


async def send(ctx: Context, to: str, subject: str = "hello", *, copies: int = 1) -> str:
    return f"{to} {subject} {copies}"


def anything(value, other=None):  # type: ignore[no-untyped-def]  # unannotated on purpose
    return value, other


def whole(**payload: Any) -> dict[str, Any]:
    return payload


SEND = Task("email.send", send)


def refusal(call: Callable[..., object], *args: Any) -> Invalid:
    with pytest.raises(Invalid) as refused:
        call(*args)
    assert len(str(refused.value)) < 400
    return refused.value


@dataclass
class Address:
    street: str


class Box(msgspec.Struct):
    street: str


class User(pydantic.BaseModel):
    name: str


def taking(annotation: Any) -> Task[..., Any]:
    def handler(value):  # type: ignore[no-untyped-def]
        return value

    handler.__annotations__ = {"value": annotation}
    return Task("typed", handler)


# ── registration ──────────────────────────────────────────────────────────────────────────────────────────────────
class Service:
    def method(self, x: int) -> None: ...

    def __call__(self, x: int) -> None: ...


def generator(x: int) -> typing.Iterator[int]:
    yield x


async def async_generator(x: int) -> typing.AsyncIterator[int]:
    yield x


def variadic(*items: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x, "lambda"),
        (generator, "generator"),
        (async_generator, "generator"),
        (variadic, r"\*items"),
        (Service.method, "'self'"),
        (Service().method, "not a method; .* bind=True: write it without self"),
        (Service(), "not a Service"),
        (Service, "not a type"),
        (print, "plain function"),
    ],
)
def test_what_cannot_be_a_task_is_refused_at_registration(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Task("bad", function)


def test_annotations_resolve_at_first_use_and_errors_name_them() -> None:
    def handler(x: Missing) -> None: ...

    task = Task("late", handler)
    with pytest.raises(ConfigError, match=r"task 'late': the annotation 'Missing' of parameter 'x' of .*handler"):
        task.prepare()


def test_unresolvable_return_annotation_is_not_read() -> None:
    def handler(x: int) -> Missing: ...

    assert Task("late", handler).bind('{"x":1}') == {"x": 1}


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (set[int], "return a sorted list"),
        (frozenset[str] | None, "return a sorted list"),
        (dict[str, list[set[int]]], "return a sorted list"),
        (tuple[int, set[int]], "return a sorted list"),
        (dict[int, str], "return keys of type str"),
    ],
)
def test_result_type_that_no_job_keeps_is_refused_at_registration(annotation: Any, says: str) -> None:
    """Every value of it would fail after the work is done."""

    def handler() -> Any: ...

    handler.__annotations__["return"] = annotation
    with pytest.raises(ConfigError, match=f"task 'collect': a result of type .*handler.*cannot be kept: .*{says}"):
        Task("collect", handler)


@pytest.mark.parametrize("annotation", [None, int, dict[str, int], list[User], datetime, Any, NoReturn, "Later"])
def test_result_types_that_jobs_keep_are_registered(annotation: Any) -> None:
    def handler() -> Any: ...

    handler.__annotations__["return"] = annotation
    assert Task("collect", handler).name == "collect"


@pytest.mark.parametrize("annotation", [Client, list[Client], Callable[[], int], complex, dict[str, Client | None]])
def test_an_annotation_no_payload_can_carry_is_refused(annotation: Any) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'value': a payload cannot carry .*provided\(\)"):
        taking(annotation).prepare()


@pytest.mark.parametrize("annotation", [str | datetime, User | int, Address | Box])
def test_union_that_json_cannot_distinguish_is_refused(annotation: Any) -> None:
    with pytest.raises(ConfigError, match="parameter 'value': a payload cannot carry"):
        taking(annotation).prepare()


def test_the_context_comes_first_and_a_dependency_has_a_class() -> None:
    def late(x: int, ctx: Context) -> None: ...

    def unnamed(http=provided()) -> None: ...  # type: ignore[no-untyped-def]  # noqa: B008

    with pytest.raises(ConfigError, match="always the first parameter"):
        Task("late", late).prepare()
    with pytest.raises(ConfigError, match="needs a class"):
        Task("unnamed", unnamed).prepare()


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0}, {"max_attempts": True}, {"max_attempts": 1.5}, {"timeout": 0}, {"timeout": math.inf},
        {"timeout": math.nan}, {"timeout": "5"}, {"executor": "fiber"}, {"priority": 101}, {"priority": 0.5},
        {"retry_on": "ValueError"}, {"retry_on": ()}, {"retry_on": []}, {"dead_on": (ValueError, int)},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    refusal(lambda: Task("bad", send, **options))


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "a\n", "x" * 129, ".x", None])
def test_names_are_plain(name: Any) -> None:
    assert refusal(Task, name, send).field == "task"


def test_the_executor_follows_the_kind_of_function() -> None:
    assert (SEND.executor, Task("a", anything).executor) == ("async", "thread")
    assert Task("a", send, executor="process").executor == "process"
    for function, executor in ((anything, "async"), (send, "thread")):
        with pytest.raises(ConfigError, match="executor"):
            Task("a", function, executor=executor)


def test_a_reference_leads_back_to_the_function() -> None:
    assert SEND.reference == f"{__name__}:send"

    def local() -> None: ...

    with pytest.raises(ConfigError, match="top level of a module"):
        _ = Task("local", local).reference
    local.__module__ = "__main__"
    with pytest.raises(ConfigError, match="main module"):
        _ = Task("local", local).reference


def test_a_registry_has_one_task_per_name() -> None:
    registry = Registry()
    registry.register(SEND)
    registry.register(SEND)
    assert registry.get("email.send") is SEND
    assert registry.get("other") is None
    assert "email.send" in registry
    assert (registry.task_names(), list(registry), len(registry)) == (["email.send"], [SEND], 1)
    with pytest.raises(ConfigError, match=r"registered twice: by .*send \(.*test_task.py:\d+\) and by .*whole \("):
        registry.register(Task("email.send", whole))
    assert registry.get("email.send") is SEND


# ── errors of handlers ────────────────────────────────────────────────────────────────────────────────────────────
def test_which_errors_are_retried() -> None:
    def temporary(error: BaseException) -> bool:
        return "again" in str(error)

    assert SEND.is_retryable(ValueError())
    only = Task("only", send, retry_on=(ConnectionError, temporary))
    assert only.is_retryable(ConnectionResetError())
    assert only.is_retryable(ValueError("try again"))
    assert not only.is_retryable(ValueError("no"))
    never = Task("never", send, retry_on=OSError, dead_on=FileNotFoundError)
    assert never.is_retryable(PermissionError())
    assert not never.is_retryable(FileNotFoundError())


def test_a_predicate_that_raises_leaves_a_note_and_a_retry() -> None:
    def broken(error: BaseException) -> bool:
        raise KeyError("code")

    error = ValueError("x")
    assert Task("a", send, retry_on=broken).is_retryable(error)
    assert Task("a", send, dead_on=broken).is_retryable(error)
    assert error.__notes__ == [
        "retry_on of task 'a' raised KeyError: 'code'",
        "dead_on of task 'a' raised KeyError: 'code'",
    ]


# ── the running job ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("retry", "raise RetryAfter"),
        ("request", r"context\.id"),
        ("update_state", "context.progress"),
        ("max_retries", r"job\.max_attempts"),
    ],
)
def test_method_of_a_bound_task_of_celery_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"'Context' object has no attribute '{name}'; .*{ours}"):
        getattr(Context(Job("id", "t", "q", "{}", 1, 1, None, 0, 0, 0, 0)), name)


def test_a_context_shows_the_running_job() -> None:
    job = Job("id", "email.send", "default", "{}", 7, 2, 5, 0, 0, 0, 0, Options(metadata={"a": 1}, tags=("x",)))
    context = Context(job)
    assert (context.id, context.attempts, context.attempts, context.max_attempts) == ("id", 2, 2, 5)
    assert (context.claims, context.metadata, context.tags) == (7, {"a": 1}, ("x",))
    assert not context.cancelled
    watcher = threading.Thread(target=context.cancel)
    watcher.start()
    watcher.join()
    assert context.cancelled


def test_current_job_is_the_one_of_this_handler_alone() -> None:
    context = Context(Job("id", "t", "q", "{}", 1, 1, None, 0, 0, 0, 0))
    assert context.metadata == {}
    inside = copy_context()
    inside.run(CURRENT.set, context)
    assert inside.run(current_job) is context
    with pytest.raises(HoldfastError, match="inside a handler"):
        current_job()


@dataclass
class Receipt:
    """What a typed task returns."""

    number: int
    total: Decimal


def test_a_result_is_read_by_the_return_annotation():
    def sell() -> Receipt:
        return Receipt(7, Decimal("1.10"))

    task = Task("sell", sell)
    stored = encode_result(sell())
    assert task.decode_result(stored) == Receipt(7, Decimal("1.10"))
    assert task.decode_result(None) is None
    assert task.decode_result('"of an older version"') == "of an older version"


def test_unresolved_return_annotation_gives_plain_json_values():
    def odd() -> Missing:
        return [1]

    assert Task("odd", odd).decode_result("[1]") == [1]
