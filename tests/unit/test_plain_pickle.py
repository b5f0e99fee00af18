"""The reader of plain pickles: values as pickle has them, and nothing that a pickle could execute or blow up."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rq.serializers import DefaultSerializer

from holdfast.importing.plain_pickle import NotPlain, read_plain_pickle

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()

dump = DefaultSerializer.dumps
"""Pickles a value as RQ does."""


def values_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested lists, tuples and dictionaries of these values."""

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.text() | st.integers()
        return st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.just(())

    return st.recursive(leaves, extend, max_leaves=20)


@given(values_of(PLAIN))
def test_plain_values_are_read_as_rq_wrote_them(value: Any) -> None:
    assert read_plain_pickle(dump(value), 10**6) == value


@pytest.mark.parametrize(
    "data",
    [b"(lp0\nI1\naVb\np1\na(dp2\ng1\nN", b"\x80\x02]q\x00(K\x01X\x01\x00\x00\x00bq\x01}q\x02h\x01N"],
    ids=["protocol 0", "protocol 2"],
)
def test_old_protocols_are_read(data: bytes) -> None:
    assert read_plain_pickle(data + (b"sa." if data[:1] == b"(" else b"se."), 100) == [1, "b", {"b": None}]


@given(st.binary())
def test_damaged_pickles_raise_one_error(data: bytes) -> None:
    for damaged in (data, b"\x80\x04" + data, dump(["a", {"b": 1}])[: len(data)]):
        try:
            read_plain_pickle(damaged, 1000)
        except NotPlain:
            continue


def nested(levels: int) -> list[Any]:
    """A list whose text doubles with each level."""
    value: list[Any] = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "data",
    [
        dump(os.system),
        b"cos\nsystem\n(S'true'\ntR.",
        dump(datetime.now(UTC)),
        dump({1, 2}),
        dump(nested(60)),
        dump(endless()),
        b"\x80\x04})" + b"".join(b"\x94h%c\x86" % number for number in range(60)) + b"Ns.",
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02Nr\xff\xff\xff\x7f" + b"0.",
        b"\x80\x048\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    ],
    ids=[
        "a function",
        "a call",
        "a class",
        "a set",
        "a bomb",
        "a circle",
        "a key",
        "too deep",
        "a pop",
        "unknown",
        "too long",
    ],
)
def test_hostile_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        read_plain_pickle(data, 10**6)
