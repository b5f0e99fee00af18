"""Named statements and what they have in common: ``stores/common/named_sql.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.stores.common.named_sql import load_statements


def load(folder: Path, text: str) -> dict[str, str]:
    file = folder / "queries.sql"
    file.write_text(text, encoding="utf-8")
    return load_statements(file)


def test_fragment_is_inserted_and_is_no_statement(tmp_path: Path) -> None:
    text = """-- All of them.

-- name: all
-- Every row.
select -- include: shown
from job;

-- fragment: shown
a,
b

-- name: one
select -- include: shown
from job where id = :id;
"""
    assert load(tmp_path, text) == {
        "all": "-- Every row.\nselect a,\nb\nfrom job",
        "one": "select a,\nb\nfrom job where id = :id",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-- name: all\nselect 1;\n-- name: all\nselect 2;\n", "names all twice"),
        ("-- fragment: all\na\n-- name: all\nselect 2;\n", "names all twice"),
        ("-- name: all\nselect -- include: shown\n;\n", "includes shown, which it does not define"),
        (
            "-- name: all\nselect -- include: one\n;\n-- name: one\nselect 1;\n",
            "includes one, which it does not define",
        ),
    ],
)
def test_names_are_unique_and_only_fragments_are_included(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"queries.sql {message}"):
        load(tmp_path, text)
