"""The reference page of the HTTP API, made from its table of operations.

``python -m tests.support.api_page > docs/http-api.md``
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from holdfast.web.asgi import OPERATIONS
from holdfast.web.fields import BodySchema, Field
from holdfast.web.openapi import REFUSALS, example_body, refusals_of
from holdfast.web.routing import Operation

_HEAD = """\
# HTTP API reference

<!-- Made by `python -m tests.support.api_page > docs/http-api.md`, and compared by a test. -->

[The HTTP API](http.md) tells how to run and use it. `GET /openapi.json` has the same for programs, with the schema of
every document; [what bodies are made of](#objects-in-bodies) stands at the end. In paths `{job_id}` is a job's id (a
UUID or its ULID form), or `key:` and its idempotency key, percent-encoded.

With keys, each operation needs the scope that is named with it; `admin` stands for every scope.
Every operation may also answer 401, 403, 404, 405, 429, 431 or 503, and those with a body 408, 413 or 415; each
with a problem document ([errors](http.md#errors)).
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    groups = list(dict.fromkeys(operation.group for operation in OPERATIONS))
    ordered = sorted(OPERATIONS, key=lambda operation: groups.index(operation.group))
    for group, operations in groupby(ordered, key=lambda operation: operation.group):
        yield f"\n## {group}\n"
        for operation in operations:
            yield from _operation(operation)
    yield "\n## Objects in bodies\n"
    for body in _inner_schemas():
        yield f"\n### {body.name}\n\n{body.doc}\n"
        yield from _fields("field", body.fields)


def _inner_schemas() -> Iterable[BodySchema]:
    """What bodies refer to, each once."""
    found: dict[str, BodySchema] = {}
    left = [body for each in OPERATIONS if each.body is not None for body in each.body.inner]
    while left:
        body = left.pop(0)
        found[body.name] = body
        left += body.inner
    return found.values()


def _operation(operation: Operation) -> Iterator[str]:
    scope = "needs no key" if operation.scope is None else f"scope `{operation.scope}`"
    yield f"\n### {operation.method} {operation.path}\n\n{operation.summary} ({scope}).\n"
    if operation.doc:
        yield f"\n{operation.doc}\n"
    yield from _fields("header", operation.headers)
    yield from _fields("query", operation.query)
    if operation.body is not None:
        given = " (may be left out)" if operation.body_optional else ""
        if operation.body.fields:
            yield from _fields(f"body{given}", operation.body.fields)
            yield f"\n```json\n{_spread(example_body(operation.body))}\n```\n"
    yield "\n| answer | |\n|---|---|\n"
    for status, response in operation.answers.items():
        yield f"| {status} | {response.doc} |\n"
    for status in refusals_of(operation):
        if status in operation.refusals:
            yield f"| {status} | {REFUSALS[status]} |\n"
    first = next(iter(operation.answers.values()))
    if first.example is not None:
        yield f"\n```json\n{_spread(first.example)}\n```\n"


def _fields(place: str, fields: tuple[Field, ...]) -> Iterator[str]:
    if fields:
        yield f"\n| {place} | | |\n|---|---|---|\n"
    for field in fields:
        required = ", required" if field.required else ""
        several = ", several times" if field.many else ""
        yield f"| `{field.name}` | {_form(field.value.schema)}{required}{several} | {field.doc} |\n"


def _form(schema: Any) -> str:
    match schema:
        case {"$ref": str(name)}:
            inner = name.rpartition("/")[2]
            return f"[{inner}](#{inner.lower()})"
        case {"enum": list(words)}:
            return "one of " + ", ".join(f"`{word}`" for word in words)
        case {"const": value}:
            return f"`{json.dumps(value)}`"
        case {"anyOf": [one, {"items": items}]} if items == one:
            return f"{_form(one)}, or an array of such"
        case {"anyOf": list(ways)}:
            return " or ".join(map(_form, ways))
        case {"type": "array", "items": items}:
            return f"array of {_form(items)}"
        case {"type": "integer", "minimum": least, "maximum": most}:
            return f"whole number, {least} to {most}"
        case {"type": list(kinds)}:
            return " or ".join(kinds)
        case {} if not schema:
            return "any JSON"
        case {"format": "date-time"}:
            return "instant"
        case {"type": "string", "maxLength": most}:
            return f"text, at most {most}"
        case {"type": kind}:
            return str(kind)
    raise ValueError(f"no words for {schema}")


def _spread(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    print(page(), end="")
