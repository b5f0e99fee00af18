"""Calls become payloads and payloads become calls again, exactly; what does not fit is refused and named."""

from __future__ import annotations

import enum
import math
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, Invalid, TooLarge
from holdfast.tasks import Context, Task, provided


class Client:
    """A dependency."""


async def send(ctx: Context, to: str, subject: str = "hello", *, copies: int = 1) -> str:
    return f"{to} {subject} {copies}"


def anything(value, other=None):  # type: ignore[no-untyped-def]  # unannotated on purpose
    return value, other


def whole(**payload: Any) -> dict[str, Any]:
    return payload


def counts(label: str, **numbers: int) -> dict[str, int]:
    return numbers


def served(ctx: Context, to: str, http: Client = provided(), retries: int = 3) -> None: ...  # noqa: B008  # a marker


def ordered(ctx: Context, first: int, /, second: int = 2) -> tuple[int, int]:
    return first, second


SEND = Task("email.send", send)
OPTION = "options of a job are separate from its arguments: .options(delay=…).enqueue(…)"
SUBJET = "argument 'subjet' of task 'email.send'"


def refusal(call: Callable[..., object], *args: Any) -> Invalid:
    with pytest.raises(Invalid) as refused:
        call(*args)
    assert len(str(refused.value)) < 400
    return refused.value


# ── call → payload → call ─────────────────────────────────────────────────────────────────────────────────────────
def test_a_call_becomes_its_arguments_by_name() -> None:
    assert SEND.encode(("a@b.c",), {"copies": 2}) == '{"to":"a@b.c","copies":2}'
    assert SEND.bind('{"to":"a@b.c","copies":2}') == {"to": "a@b.c", "subject": "hello", "copies": 2}
    assert SEND.needs_context


def test_calling_the_task_calls_the_function() -> None:
    assert Task("any", anything)(1, other=2) == (1, 2)


def test_unannotated_parameters_take_any_json_value() -> None:
    task = Task("any", anything)
    for value in (None, 1, 2**70, "x", [1, {"a": None}], {"a": [1.5]}, True, -0.0):
        assert repr(task.bind(task.encode((value,), {}))["value"]) == repr(value)
    assert task.bind(task.encode(((1, 2),), {})) == {"value": [1, 2], "other": None}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(10**300), 10**300))
def test_a_typed_call_comes_back_exactly(to: str, copies: int) -> None:
    assert SEND.bind(SEND.encode((to,), {"copies": copies})) == {"to": to, "subject": "hello", "copies": copies}


def test_a_task_may_take_the_object_whole() -> None:
    task = Task("whole", whole)
    assert task.bind(task.encode((), {"a": 1, "b": [None]})) == {"a": 1, "b": [None]}
    assert task.bind("{}") == {}


def test_the_rest_is_validated_by_its_annotation() -> None:
    task = Task("counts", counts)
    assert task.bind('{"label":"x","a":1,"b":2}') == {"label": "x", "a": 1, "b": 2}
    error = refusal(task.bind, '{"label":"x","a":1,"b":"two"}')
    assert str(error) == "argument 'b' of task 'counts': 'two' is not valid; expected `int`, got `str`"


def test_a_dependency_is_no_part_of_the_payload() -> None:
    task = Task("served", served)
    assert task.dependencies == {"http": Client}
    assert task.bind(task.encode(("x",), {"retries": 1})) == {"to": "x", "retries": 1}
    assert "the worker provides it" in str(refusal(task.encode, ("x",), {"http": Client()}))
    assert "the worker provides it" in str(refusal(task.encode, ("x", None), {}))
    assert "the worker provides it" in str(refusal(task.bind, '{"to":"x","http":{}}'))
    assert "the worker provides it" in str(refusal(task.bind, '{"to":"x","ctx":{}}'))


def test_an_open_signature_keeps_its_reserved_names() -> None:
    def handler(ctx: Context, http: Client = provided(), **rest: Any) -> None: ...  # noqa: B008  # a marker

    task = Task("open", handler)
    for name in ("ctx", "http"):
        assert "the worker provides it" in str(refusal(task.bind, f'{{"{name}":1}}'))


def test_positional_only_parameters_are_called_through_the_entry() -> None:
    task = Task("ordered", ordered)
    arguments = task.bind(task.encode((5,), {}))
    assert arguments == {"first": 5, "second": 2}
    assert task.entry(None, **arguments) == (5, 2)
    assert SEND.entry is SEND.function


def test_a_default_is_the_functions_own_object() -> None:
    shared: list[int] = [1]

    def handler(items=shared, when=timedelta(1)):  # type: ignore[no-untyped-def]
        return items, when

    assert Task("defaults", handler).bind("{}")["items"] is shared


def test_awkward_parameter_names_work() -> None:
    def handler(keys: int, _hidden: int, items: int, __dict: int = 0) -> None: ...

    with pytest.raises(ConfigError, match="__dict"):
        Task("names", handler)

    def better(keys: int, _hidden: int, items: int, payload: int, name: int) -> None: ...

    payload = {"keys": 1, "_hidden": 2, "items": 3, "payload": 4, "name": 5}
    task = Task("names", better)
    assert task.bind(task.encode((), payload)) == payload


# ── typed values ──────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Address:
    street: str
    since: date | None = None


class Point(NamedTuple):
    x: float
    y: float


class Pair(TypedDict, total=False):
    left: int
    right: int


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Mood(enum.StrEnum):
    GOOD = "good"


class Box(msgspec.Struct):
    content: list[Address]


class User(pydantic.BaseModel):
    name: str
    born: date
    tags: set[str] = set()


class Order(msgspec.Struct):
    items: list[Address]
    by: dict[str, Pair] = {}


UserId = NewType("UserId", int)
Small = Annotated[int, msgspec.Meta(ge=0, le=9)]

TYPED: list[tuple[Any, Any]] = [
    (Address, Address("x", date(2031, 1, 2))),
    (list[Address], [Address("x"), Address("y")]),
    (Point, Point(1.5, -0.0)),
    (Pair, {"left": 1}),
    (Box, Box([Address("x")])),
    (datetime, datetime(2031, 1, 2, 3, 4, 5, 678901)),  # noqa: DTZ001  # naive on purpose
    (datetime, datetime(2031, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
    (datetime, datetime(2031, 7, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))),
    (date, date(1, 1, 1)),
    (time, time(23, 59, 59, 999999)),
    (timedelta, timedelta(days=-3, microseconds=1)),
    (UUID, UUID(int=2**127)),
    (Decimal, Decimal("1.10")),
    (Colour, Colour.BLUE),
    (Mood, Mood.GOOD),
    (bytes, bytes(range(256))),
    (set[int], {1, 2, 3}),
    (frozenset[str], frozenset({"a"})),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (Sequence[int], [1, 2]),
    (Mapping[str, int], {"a": 1}),
    (dict[int, str], {1: "a", -5: "b"}),
    (dict[UUID, date], {UUID(int=1): date(2031, 1, 1)}),
    (int | None, None),
    (int | str, "x"),
    (float, 3),
    (Literal["a", 1], 1),
    (UserId, UserId(2**80)),
    (Small, 9),
    (User, User(name="ada", born=date(1815, 12, 10), tags={"x"})),
    (User | None, None),
    (dict[str, list[User]], {"a": [User(name="ada", born=date(1815, 12, 10))]}),
    (object, {"a": [1]}),
    (Any, "x"),
]


def taking(annotation: Any) -> Task[..., Any]:
    def handler(value):  # type: ignore[no-untyped-def]
        return value

    handler.__annotations__ = {"value": annotation}
    return Task("typed", handler)


@pytest.mark.parametrize(("annotation", "value"), TYPED, ids=lambda each: str(each)[:30])
def test_typed_values_come_back_as_they_went_in(annotation: Any, value: Any) -> None:
    task = taking(annotation)
    received = task.bind(task.encode((value,), {}))["value"]
    assert received == value
    assert type(received) is type(value) or annotation is float


@pytest.mark.parametrize(
    ("annotation", "value", "says"),
    [
        (int, "5", "expected `int`, got `str`"),
        (int, 1.5, "expected `int`, got `float`"),
        (str, None, "expected `str`, got `null`"),
        (Small, 10, "<= 9"),
        (Literal["a"], "b", "'b'"),
        (float, math.nan, "JSON has no such number"),
        (float | None, math.inf, "JSON has no such number"),
        (float, 2**53 + 1, "would arrive as"),
        (str, "\ud800", "lone surrogate"),
        (list[str], ["ok", "\udc00"], "'value[1]' of task 'typed'"),
        (Any, {1, 2}, "set"),
        (Any, datetime(2031, 1, 1, tzinfo=UTC), "annotate the parameter"),
        (Any, [Decimal(1)], "'value[0]' of task 'typed'"),
        (Any, {"a": {1: 2}}, "keys of a JSON object are text"),
        (dict[str, Any], {"a": Address("x")}, "'value.a' of task 'typed'"),
        (Any, Colour.RED, "annotate the parameter"),
        (Any, b"x", "annotate the parameter"),
        (Any, 10**4300, "4,300 digits"),
        (set[float | None], {math.nan}, "JSON has no such number"),
        (Address, {"street": 5}, "'value.street' of task 'typed': 5 is"),
        (User, {"name": "ada"}, "born: Field required"),
        (User, User.model_construct(name=5, born=date(1, 1, 1)), "name: Input should be a valid string"),
        (Any, object(), "value of type object"),
        (Any, (each for each in "ab"), "value of type generator"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) and each.isascii() else type(each).__name__,
)
def test_values_that_do_not_fit_or_would_change_are_refused(annotation: Any, value: Any, says: str) -> None:
    error = refusal(taking(annotation).encode, (value,), {})
    assert says in str(error)
    assert re.fullmatch(r"argument 'value[\w.\[\]]*' of task 'typed'", error.field)


class Ledger(Address):
    """A subclass, which an annotation of its base would not bring back."""


class Hidden(pydantic.BaseModel):
    word: pydantic.SecretStr


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(Address, Ledger("x")), (Hidden, Hidden(word=pydantic.SecretStr("x"))), (list[Any], [UUID(int=1)])],
    ids=str,
)
def test_a_value_that_would_come_back_as_another_is_refused(annotation: Any, value: Any) -> None:
    refusal(taking(annotation).encode, (value,), {})


def test_plain_json_for_a_typed_parameter_is_taken() -> None:
    assert taking(datetime).encode(("2031-01-02T00:00:00Z",), {}) == '{"value":"2031-01-02T00:00:00Z"}'
    assert taking(Address).encode(({"street": "x"},), {}) == '{"value":{"street":"x"}}'


def test_two_dataclasses_that_compare_by_identity_are_compared_by_field() -> None:
    @dataclass(eq=False)
    class Plain:
        share: float | None

    assert taking(Plain).encode((Plain(0.5),), {}) == '{"value":{"share":0.5}}'
    assert "share" in refusal(taking(Plain).encode, (Plain(math.nan),), {}).field


# ── what does not fit ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ('{"to":5}', "argument 'to' of task 'email.send': 5 is not valid; expected `str`, got `int`"),
        ("{}", "argument 'to' of task 'email.send': a value is missing; give one: it has no default"),
        (
            '{"to":"x","subjet":"y"}',
            f"{SUBJET}: 'y' is not valid; there is no such parameter; did you mean 'subject'? it takes …",
        ),
        (
            '{"to":"x","subject":"y","delay":3}',
            f"argument 'delay' of task 'email.send': 3 is not valid; there is no such parameter; it takes …; {OPTION}",
        ),
        ("[1]", "payload: [1] is not valid; a payload is a JSON object: the arguments by name"),
        ("{", "payload: the payload of task 'email.send' is not valid; it is not JSON that can be read"),
        ('{"to":"\\ud800"}', "payload: the payload of task 'email.send' is not valid; it is not JSON that can be read"),
        ("[" * 5000, "payload: the payload of task 'email.send' is not valid; it is not JSON that can be read"),
    ],
    ids=lambda each: each[:24],
)
def test_a_payload_that_does_not_fit_says_why(payload: str, message: str) -> None:
    assert str(refusal(SEND.bind, payload)).replace("to, subject, copies", "…") == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"items":[{"street":"x"},{"street":5}]}', "argument 'o.items[1].street' of task 'nested': 5 is not valid"),
        ('{"items":[{}]}', "argument 'o.items[0].street' of task 'nested': a value is missing; give one"),
        (
            '{"by":{"a b":{"left":null}},"items":[]}',
            "argument 'o.by[...].left' of task 'nested': {'a b': {'left': None}",
        ),
        ("{}", "argument 'o.items' of task 'nested': a value is missing; give one"),
        ("[]", "argument 'o' of task 'nested': [] is not valid; expected `object`, got `array`"),
    ],
)
def test_an_error_inside_an_argument_names_its_place(value: str, message: str) -> None:
    def nested(o: Order) -> None: ...

    def rest(**o: Order) -> None: ...

    for function in (nested, rest):
        nested_error = refusal(Task("nested", function).bind, f'{{"o":{value}}}')
        assert str(nested_error).startswith(message)


def test_a_call_that_does_not_fit_says_why() -> None:
    assert "at most 2 by position" in str(refusal(SEND.encode, ("a", "b", 3), {}))
    assert "give one of them" in str(refusal(SEND.encode, ("a",), {"to": "b"}))
    assert "a value is missing" in str(refusal(SEND.encode, (), {}))
    assert "did you mean 'copies'?" in str(refusal(SEND.encode, ("a",), {"copis": 2}))
    with pytest.raises(TooLarge, match="300,009 bytes"):
        SEND.encode(("x" * 300_000,), {})


@pytest.mark.parametrize("name", ["connection", "after", "batch"])
def test_an_option_among_the_arguments_is_told_from_them_whatever_its_value(name: str) -> None:
    text = str(refusal(SEND.encode, ("a",), {name: object()}))
    assert text.startswith(f"argument '{name}' of task 'email.send': ")
    assert text.endswith(OPTION.replace("delay", name))
    assert "the worker provides it" in str(refusal(Task("served", served).encode, ("a",), {"http": object()}))


def test_the_payload_limit_can_be_set() -> None:
    with pytest.raises(TooLarge):
        SEND.encode(("x" * 100,), {}, 50)


def test_a_long_key_of_an_open_payload_is_refused() -> None:
    assert "1,024 bytes" in str(refusal(Task("whole", whole).encode, (), {"k" * 1025: 1}))


def test_an_error_of_a_models_own_validator_is_a_refusal() -> None:
    class Broken(pydantic.BaseModel):
        x: int

        @pydantic.field_validator("x")
        @classmethod
        def fails(cls, value: int) -> int:
            raise RuntimeError("boom")

    assert "boom" in str(refusal(taking(Broken).bind, '{"value":{"x":1}}'))
