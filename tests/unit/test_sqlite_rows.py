"""What SQLite shows of a job, as text."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.stores.sqlite.encoding import array_elements

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{},\\":a'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[],\\":a'), inner),
    max_leaves=8,
)


@given(st.lists(VALUES, min_size=1))
def test_an_array_is_taken_apart_at_its_own_commas(values: list[Any]) -> None:
    array = json.dumps(values, separators=(",", ":"))
    assert array_elements(array) == [json.dumps(value, separators=(",", ":")) for value in values]


def test_an_array_may_be_as_deep_as_it_likes() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert array_elements(f"[1,{deep},2]") == ["1", deep, "2"]
