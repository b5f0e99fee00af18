"""Fields of queries and bodies: schema, example and check of each field in one place. ``openapi`` puts them together.

The schema tells a client the accepted values; ``tests/interfaces`` holds one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from holdfast.core.error_groups import GROUP_PATTERN, check_error_group
from holdfast.core.errors import Invalid
from holdfast.core.models import JobState, Reason
from holdfast.core.validation import (
    MAX_KEY_LENGTH,
    check_key,
    check_name,
    check_tag,
    check_task_name,
    check_worker_id,
    did_you_mean,
    parse_count,
)
from holdfast.tasks.codec import RawText
from holdfast.tasks.command_policy import CommandPayload
from holdfast.tasks.signature import Argument

Check = Callable[[Any, str], Any]
"""Validates one field, given its value and its name for errors, and returns the parsed value."""
Schema = Mapping[str, Any]

NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,63}$"
_UUID = "[0-9A-Fa-f]{8}-?(?:[0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}"
_ULID = "[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}"
REFERENCE_PATTERN = f"^(?:{_UUID}|{_ULID}|key:.{{1,512}})$"
TASK_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._:/-]{0,127}$"
WORKER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MAX_PAGE = 500
"""Jobs on one page."""
MAX_LIST = 1000
"""Items of a list in one request."""


class ValueType(NamedTuple):
    """The values that a field may have: their JSON schema, and the check that agrees with it."""

    schema: Schema
    check: Check


class Field(msgspec.Struct, frozen=True):
    """A field of a query, a header or a body. ``many``: may be repeated in a query. ``nullable``: null is a value."""

    name: str
    value: ValueType
    doc: str
    example: Any = None
    required: bool = False
    many: bool = False
    nullable: bool = False


class BodySchema:
    """The fields of a body, under a name of their own.

    ``inner``: the bodies its schema refers to. ``refused``: schemas of bodies that contradict themselves. ``shown``:
    optional fields that its example has.
    """

    def __init__(
        self,
        *,
        name: str,
        doc: str,
        fields: Sequence[Field],
        inner: Sequence[BodySchema] = (),
        refused: Sequence[Schema] = (),
        shown: Sequence[str] = (),
    ) -> None:
        self.name, self.shown = name, shown
        self.refused = tuple(refused)
        self.doc = doc
        self.fields = tuple(fields)
        self.inner = tuple(inner)
        self._known = {field.name: field.value.check for field in fields}
        self._nullable = frozenset(field.name for field in fields if field.nullable)
        self._required = [field.name for field in fields if field.required]

    @property
    def reference(self) -> ValueType:
        """An object of these fields, which the operation reads itself."""
        return ValueType({"$ref": f"#/components/schemas/{self.name}"}, check_object)

    @property
    def value(self) -> ValueType:
        """An object of these fields."""
        return self.reference._replace(check=lambda value, field: self.read(check_object(value, field), f"{field}."))

    def read(self, given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Returns the checked values by name; Invalid names the field, with ``path`` before it."""
        values = {}
        for name, value in given.items():
            check = self._known.get(name)
            if check is None:
                raise _unknown(path + name, name, list(self._known))
            if value is None and name not in self._nullable:
                raise Invalid(path + name, None, "leave the field out where there is nothing to say")
            values[name] = check(value, path + name)
        for name in self._required:
            if name not in values:
                raise missing_field(path + name)
        return values


def read_query(text: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """Returns the checked values of a query by name."""
    if not text and not fields:
        return {}
    known = {field.name: field for field in fields}
    given: dict[str, list[str]] = {}
    for name, value in _pairs(text):
        if name not in known:
            raise _unknown(name, name, list(known))
        given.setdefault(name, []).append(value)
    values: dict[str, Any] = {}
    for field in fields:
        texts = given.get(field.name)
        if texts is None:
            if field.required:
                raise missing_field(field.name)
        elif field.many:
            values[field.name] = tuple(field.value.check(each, field.name) for each in texts)
        elif len(texts) > 1:
            raise Invalid(field.name, RawText(f"given {len(texts)} times"), "give it once", code="duplicate_key")
        else:
            values[field.name] = field.value.check(texts[0], field.name)
    return values


def _pairs(text: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError:  # a wrong encoding, or too many
        remedy = "percent-encode UTF-8, and say at most 100 things"
        raise Invalid("query", text.decode("ascii", "replace"), remedy) from None


_ELSEWHERE = {"type": "task", "job_type": "task", "status": "state", "args": "payload", "arguments": "payload"}
"""Fields that other systems name differently."""
_OF_COMMANDS = CommandPayload.__struct_fields__
"""Fields of the payload of a command job."""


@contextmanager
def client_field_names(path: str = "") -> Iterator[None]:
    """Errors of the application name the client's field, with ``path`` before it."""
    try:
        yield
    except Invalid as error:
        words, error.field = error.field, path + _client_name(error.field)
        error.args = (error.field + str(error).removeprefix(words),)
        raise


def _client_name(field: str) -> str:
    if isinstance(field, Argument):
        return field.place
    if field.startswith(_OF_COMMANDS):
        return f"payload.{field}"
    return field


def _unknown(path: str, name: str, known: Sequence[str]) -> Invalid:
    there = f"there are {', '.join(known)}" if known else "there are none here"
    meant = _ELSEWHERE.get(name)
    close = f"; did you mean {meant}?" if meant in known else did_you_mean(name, known)
    return Invalid(path, name, there + close, "is not known here", code="unknown_field")


def missing_field(path: str, remedy: str = "it is required") -> Invalid:
    """The error of a field that is required and was left out."""
    return Invalid(path, RawText("nothing"), remedy, "was given", code="missing")


# ── kinds of values ────────────────────────────────────────────────────────────────────────────────────────────────
def any_value(value: Any, field: str) -> Any:
    """Checks nothing: the value is checked where it is used."""
    return value


def check_object(value: Any, field: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise Invalid(field, value, "give a JSON object")
    return value


OBJECT = ValueType({"type": "object"}, check_object)


def any_text(value: Any, field: str) -> str:
    """Text of any length."""
    if not isinstance(value, str):
        raise Invalid(field, value, "give text")
    return value


TEXT = ValueType({"type": "string"}, any_text)


def text_value(least: int, most: int, parse: Check = any_value) -> ValueType:
    """Text of that many characters. ``parse`` checks it further."""

    def check_value(value: Any, field: str) -> Any:
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise Invalid(field, value, f"give text of {least} to {most} characters")
        return parse(value, field)

    return ValueType({"type": "string", "minLength": least, "maxLength": most}, check_value)


def integer_text(least: int, most: int, *, default: int) -> ValueType:
    """A whole number of a query, as its text."""
    return ValueType(
        {"type": "integer", "minimum": least, "maximum": most, "default": default},
        lambda value, field: parse_count(value, field, least=least, most=most),
    )


def whole_number(value: Any, _field: str = "") -> Any:
    """The value; a number such as 2.0, which JSON does not tell from 2, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def integer_value(least: int, most: int, *, default: int | None = None) -> ValueType:
    """A whole number of a body: no text."""
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return ValueType(
        schema if default is None else {**schema, "default": default},
        lambda value, field: parse_count(whole_number(value), field, least=least, most=most, text=False),
    )


def seconds_value(most: int, least: int = 0) -> ValueType:
    """A number of seconds, of JSON."""

    def check_value(value: Any, field: str) -> timedelta:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Invalid(field, value, f"give a number of seconds from {least} to {most:,}")
        return timedelta(seconds=value)

    return ValueType({"type": "number", "minimum": least, "maximum": most}, check_value)


def choice_value(title: str, *words: str, default: str | None = None) -> ValueType:
    """A word of a fixed list, which the OpenAPI document calls ``title``."""

    def check_value(value: Any, field: str) -> str:
        if value not in words:
            raise Invalid(field, value, f"give one of {', '.join(words)}{did_you_mean(value, words)}")
        return str(value)

    schema = {"type": "string", "enum": list(words), "title": title}
    return ValueType(schema if default is None else {**schema, "default": default}, check_value)


def boolean_value(default: bool) -> ValueType:
    """true or false, of JSON."""

    def check_value(value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            raise Invalid(field, value, "give true or false")
        return value

    return ValueType({"type": "boolean", "default": default}, check_value)


def array_value(entry: ValueType, most: int, least: int = 1) -> ValueType:
    """A JSON array of at most ``most`` entries."""

    def check_value(value: Any, field: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            shown = RawText(f"an array of {len(value):,}") if isinstance(value, list) else value
            raise Invalid(field, shown, f"give a JSON array of {least} to {most:,} entries, also where it is one")
        return [entry.check(each, f"{field}[{index}]") for index, each in enumerate(value)]

    bounds = {"minItems": least, "maxItems": most} if least else {"maxItems": most}
    return ValueType({"type": "array", **bounds, "items": entry.schema}, check_value)


def at_most_one(*names: str) -> list[Schema]:
    """Schemas of bodies with more than one of these fields."""
    return [{"required": list(pair)} for pair in combinations(names, 2)]


def none_of(*names: str) -> Schema:
    """The schema of bodies with none of these fields."""
    return {"not": {"anyOf": [{"required": [name]} for name in names]}}


KEY_VALUE = text_value(1, MAX_KEY_LENGTH, check_key)
"""An idempotency key; too long is wrong here like any other fault, not a matter of size."""
TAG_VALUE = text_value(1, 100, check_tag)
QUEUE_VALUE = ValueType({"type": "string", "pattern": NAME_PATTERN}, lambda value, field: check_name(field, value))
TASK_VALUE = ValueType({"type": "string", "pattern": TASK_PATTERN}, check_task_name)
WORKER_VALUE = ValueType(
    {"type": "string", "pattern": WORKER_PATTERN}, lambda value, field: check_worker_id(field, value)
)
ERROR_GROUP_VALUE = ValueType({"type": "string", "pattern": GROUP_PATTERN}, check_error_group)


# ── fields of several operations ──────────────────────────────────────────────────────────────────────────────────
STATES = [state.value for state in JobState]

QUEUE = Field("queue", QUEUE_VALUE, "Jobs of this queue.", example="default")
TAG = Field("tag", TAG_VALUE, "Jobs that carry this tag.", example="spring")
FILTERS = (
    Field(
        "state",
        choice_value("JobState", *STATES),
        "Jobs in this state; several: in any of them.",
        example="dead",
        many=True,
    ),
    QUEUE,
    Field("task", TASK_VALUE, "Jobs of this task; several: of any of them.", example="email.send", many=True),
    TAG,
    Field(
        "reason",
        choice_value("Reason", *Reason),
        "Jobs whose latest failure, not followed by a success, has this reason.",
        example="max_attempts",
    ),
    Field("worker", WORKER_VALUE, "Jobs this worker took last."),
    Field("error", text_value(1, 1000), "Jobs whose error contains this text.", example="connection refused"),
    Field("error_group", ERROR_GROUP_VALUE, "Jobs whose error is in this group.", example="5f0c9a41d2be"),
    Field("since", text_value(1, 40), 'Submitted after: an instant, or how long ago ("2h").', example="2h"),
    Field(
        "until",
        text_value(1, 40),
        'Submitted before: an instant, or how long ago ("7d").',
        example="2030-01-31T08:00:00Z",
    ),
    Field(
        "not_started_after",
        text_value(1, 40),
        'Jobs of which no run began after: an instant, or how long ago ("1h"). Where a replay has `more`, give each '
        "call the instant of the first: jobs that died again are then not replayed once more.",
        example="2030-01-31T08:00:00Z",
    ),
)
CURSOR = Field("cursor", text_value(1, 100), "Continue where an earlier page ended.")
PAGING = (Field("limit", integer_text(1, MAX_PAGE, default=50), "Jobs on this page.", example=50), CURSOR)
