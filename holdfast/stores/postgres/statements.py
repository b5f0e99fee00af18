"""The named statements as asyncpg takes them: numbered parameters, the schema's name, the server's clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")
_SCHEMA = re.compile(r"\bholdfast\.")
# statement_timestamp() is stable: a bound for an index. clock_timestamp() would filter rows one by one instead.
_CLOCK = "(select coalesce({}::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint))"


class NumberedStatement(NamedTuple):
    """A statement and the names of its parameters in their order."""

    name: str
    sql: str
    names: tuple[str, ...]


def in_schema(sql: str, schema: str) -> str:
    """``sql`` written for the schema ``holdfast``, for another one."""
    return _SCHEMA.sub(f'"{schema}".', sql)


def number_parameters(statements: Mapping[str, str], schema: str) -> dict[str, NumberedStatement]:
    """The statements by name. ``:now`` becomes the server's clock, unless a value is given for it."""
    return {name: _numbered(name, in_schema(sql, schema)) for name, sql in statements.items()}


def _numbered(name: str, sql: str) -> NumberedStatement:
    bare = re.sub(r"--[^\n]*", "", sql)
    names = tuple(dict.fromkeys(_PARAMETER.findall(bare)))
    places = {parameter: f"${place}" for place, parameter in enumerate(names, 1)}

    def placeholder(found: re.Match[str]) -> str:
        number = places[found[1]]
        return _CLOCK.format(number) if found[1] == "now" else number

    return NumberedStatement(name, _PARAMETER.sub(placeholder, bare).strip(), names)
