"""The codec keeps every JSON value exactly, and refuses what it could not keep."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Invalid, TooLarge
from holdfast.tasks import MAX_PAYLOAD_BYTES, decode_payload, encode_payload, encode_result

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=20
)
PAYLOADS = st.dictionaries(WORDS, VALUES, max_size=5)


def exactly(value: Any) -> str:
    """Distinguishes what ``==`` does not: 1 and 1.0 and True, 0.0 and -0.0."""
    return repr(value)


@given(PAYLOADS)
def test_any_payload_comes_back_exactly(payload: dict[str, Any]) -> None:
    assert exactly(decode_payload(encode_payload(payload))) == exactly(payload)


@given(PAYLOADS)
def test_any_text_another_encoder_wrote_is_read_exactly(payload: dict[str, Any]) -> None:
    assert exactly(decode_payload(json.dumps(payload))) == exactly(payload)


@given(VALUES.filter(lambda value: value is not None))
def test_any_result_comes_back_exactly(value: Any) -> None:
    text = encode_result(value)
    assert text is not None
    assert exactly(msgspec.json.decode(text)) == exactly(value)


@pytest.mark.parametrize(
    "value",
    [
        0.1, 5e-324, -0.0, 1.0, 1, True, 1e22, 1.7976931348623157e308, 2**53 + 1, 2**63, 2**64, -(2**63) - 1,
        10**4299, 10**4300 - 1, -(10**4299) + 1, "\x00", "a\x00b", "😀", "\u2028", "\ufeff", "\x1b[2J", "",
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_awkward_values_come_back_exactly(value: Any) -> None:
    assert exactly(decode_payload(encode_payload({"x": value}))) == exactly({"x": value})


@pytest.mark.parametrize("key", ["__proto__", "constructor", "__class__", "$where", "{{7*7}}", "${jndi:x}", "%s%n", ""])
def test_keys_that_mean_something_elsewhere_are_data(key: str) -> None:
    assert decode_payload(encode_payload({key: {key: key}})) == {key: {key: key}}


def test_text_that_looks_like_an_envelope_is_data() -> None:
    assert decode_payload('{"x":{"$enc":1,"$ref":"y"}}') == {"x": {"$enc": 1, "$ref": "y"}}


def test_number_too_small_for_a_float_is_zero() -> None:
    assert decode_payload('{"x":1e-400}') == {"x": 0.0}


# ── refusals of text ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"x":' + "1" * 5000 + "}", "5,000 digits"),
        ('{"x":-' + "1" * 4300 + "}", "4,301 digits"),
        ('{"x":1e999}', "1e999"),
        ('{"x":-1e999}', "-1e999"),
        ('{"x":' + "1" * 400 + ".0}", "out of a float's range"),
        ('{"x":NaN}', "NaN"),
        ('{"x":Infinity}', "Infinity"),
        ('{"x":[-Infinity]}', "-Infinity"),
        ('{"x":"\\ud800"}', "surrogate"),
        ('{"x":[1,{"y":"\\udfff!"}]}', "payload.x[1].y"),
        ('{"\\ud800":1}', "surrogate"),
        ('{"a":1,"a":2}', "'a' twice"),
        ('{"a":{"b":1,"b":1}}', "'b' twice"),
        ('{"a":1,"\\u0061":2}', "'a' twice"),
        ("", "JSON"),
        ("{", "JSON"),
        ('{"a":1,}', "JSON"),
        ("{}x", "character 2"),
        ("[]", "object"),
        ("null", "object"),
        ('"x"', "object"),
        ('{"x":"\x01"}', "JSON"),
        ("\ufeff{}", "byte order mark"),
        ('{"x":' + "[" * 64 + "]" * 64 + "}", "64 levels"),
        ('{"x":' + "[" * 100_000, "64 levels"),
        ('{"x":"' + '\\"' * 100_000, "JSON"),
        ('{"' + "k" * 65_536 + '":1}', "1,024 bytes"),
        ('{"x":{"' + "é" * 513 + '":1}}', "1,024 bytes"),
    ],
    ids=lambda each: each[:24],
)
def test_text_that_is_not_exact_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        decode_payload(text)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe{\x00}\x00", "{}".encode("utf-32"), b'{"x":"\xed\xa0\x80"}', b'{"x":"\xc0\x80"}', b"\xef\xbb\xbf{}"],
)
def test_bytes_that_are_not_plain_utf8_are_refused(data: bytes) -> None:
    with pytest.raises(Invalid):
        decode_payload(data)


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert decode_payload('{"x":"\\ud83d\\ude00"}') == {"x": "😀"}


def test_brackets_inside_strings_are_not_depth() -> None:
    payload = {"x": "[" * 1000 + '"' + "{\\" * 1000}
    assert decode_payload(encode_payload(payload)) == payload


def test_depth_64_is_kept_and_65_is_not() -> None:
    deepest: Any = 1
    for _ in range(63):
        deepest = [deepest]
    assert decode_payload(encode_payload({"x": deepest})) == {"x": deepest}
    with pytest.raises(Invalid, match="64 levels"):
        encode_payload({"x": [deepest]})


def test_the_size_limit_is_exact() -> None:
    padding = "x" * (MAX_PAYLOAD_BYTES - len('{"x":""}'))
    text = encode_payload({"x": padding})
    assert len(text) == MAX_PAYLOAD_BYTES
    assert decode_payload(text) == {"x": padding}
    with pytest.raises(TooLarge, match="262,145 bytes"):
        encode_payload({"x": padding + "x"})
    with pytest.raises(TooLarge, match="262,145 bytes"):
        decode_payload(text + " ")


def test_the_size_counts_bytes_not_characters() -> None:
    with pytest.raises(TooLarge):
        encode_payload({"x": "é" * (MAX_PAYLOAD_BYTES // 2)})


def test_a_hundred_thousand_tiny_keys_are_kept_where_they_fit() -> None:
    payload = {f"{index:x}": 1 for index in range(26_000)}
    assert decode_payload(encode_payload(payload)) == payload
    large = {f"{index:x}": 1 for index in range(100_000)}
    with pytest.raises(TooLarge):
        encode_payload(large)
    assert decode_payload(encode_payload(large, 2**21), 2**21) == large


def test_key_of_1024_bytes_is_kept_and_longer_is_refused() -> None:
    payload = {"k" * 1024: "v" * 5000}
    assert decode_payload(encode_payload(payload)) == payload
    for key in ("k" * 1025, "é" * 513, '"' * 1025):
        with pytest.raises(Invalid, match="1,024 bytes"):
            encode_payload({"x": {key: 1}})
    assert encode_payload({'"' * 600: 1})  # its escapes do not count


# ── refusals of values ────────────────────────────────────────────────────────────────────────────────────────────
class Evil:
    def __repr__(self) -> str:
        raise RuntimeError("never ask me")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nor that")

    __hash__ = object.__hash__


class EvilModel(pydantic.BaseModel):
    name: str

    @pydantic.model_serializer
    def broken(self) -> dict[str, str]:
        raise RuntimeError("never write me")


@dataclass
class Reading:
    value: float | None
    notes: frozenset[str] = frozenset()


class Measured(pydantic.BaseModel):
    value: float | None


class Weird(Enum):
    NOWHERE = math.nan


def endless() -> list[Any]:
    itself: list[Any] = []
    itself.append(itself)
    return itself


REFUSED = [
    (math.nan, ""),
    ([1, {"a": math.inf}], "[1].a"),
    ({"a": -math.inf}, ".a"),
    (Reading(math.nan), ".value"),
    ([Measured(value=math.inf)], "[0].value"),
    (Weird.NOWHERE, ""),
    ("\ud800", ""),
    ({"a": ["ok", "x\udc00"]}, ".a[1]"),
    ({"\ud800": 1}, ""),
    (10**4300, ""),
    (-(10**4299), ""),
    (Measured.model_construct(value=10**4300), ".value"),
    ([-(10**5000)], "[0]"),
    ({1, 2}, ""),
    ({"a": [frozenset()]}, ".a[0]"),
    ((each for each in "abc"), ""),
    (endless(), ""),
    (Evil(), ""),
    ([Evil()], "[0]"),
    (EvilModel(name="x"), ""),
    (object(), ""),
    (print, ""),
    (Evil, ""),
    ({1: "a"}, ""),
    ({"a": {None: 1}}, ".a"),
    ({1: "a", "1": "b"}, ""),
    ({math.nan: 1}, ""),
    (1j, ""),
]


@pytest.mark.parametrize(
    ("value", "place"), REFUSED, ids=lambda each: each if isinstance(each, str) else type(each).__name__
)
def test_what_cannot_be_kept_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(Invalid) as refused:
        encode_result(value)
    assert refused.value.field.startswith("result" + place)
    assert len(str(refused.value)) < 300
    with pytest.raises(Invalid) as refused:
        encode_payload({"x": value})
    assert refused.value.field.startswith("payload.x" + place)


def test_a_result_of_fifty_megabytes_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"result: 5\d,\d+,\d+ bytes is not valid; at most 1,048,576"):
        encode_result("x" * 50_000_000)


def test_error_inside_a_reference_loop_is_reported() -> None:
    itself: dict[str, Any] = {"value": math.nan}
    itself["self"] = [itself]
    with pytest.raises(Invalid):
        encode_result(itself)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("1.10"), '"1.10"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (datetime(2031, 1, 2, 3, 4, 5, tzinfo=UTC), '"2031-01-02T03:04:05Z"'),
        (date(2031, 1, 2), '"2031-01-02"'),
        (timedelta(seconds=90), '"PT90S"'),
        (b"abc", '"YWJj"'),
        ((1, "a"), '[1,"a"]'),
        (Reading(1.5, frozenset({"a"})), '{"value":1.5,"notes":["a"]}'),
        ([Measured(value=None)], '[{"value":null}]'),
        ({"a": None}, '{"a":null}'),
        ("null", '"null"'),
        (False, "false"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_values_with_one_json_form_are_results(value: Any, text: str) -> None:
    assert encode_result(value) == text


def test_subclasses_of_plain_values_are_written_as_what_they_are() -> None:
    kinds = [type("Text", (str,), {})("x"), type("Count", (int,), {})(3), type("Share", (float,), {})(-0.0)]
    assert encode_result(kinds) == '["x",3,-0.0]'


def test_no_result_is_none() -> None:
    assert encode_result(None) is None


@pytest.mark.parametrize("payload", [None, [], "{}", 5])
def test_a_payload_is_a_mapping(payload: Any) -> None:
    with pytest.raises(Invalid, match="arguments by name"):
        encode_payload(payload)


def test_without_pydantic_nothing_is_taken_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pydantic")
    with pytest.raises(Invalid):
        encode_result(Measured(value=1.0))
    assert encode_result({"a": 1}) == '{"a":1}'
    assert "pydantic" not in sys.modules
