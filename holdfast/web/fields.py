"""Fields of queries and bodies: schema, example and check of each in one place.

The schema tells a client the accepted values; ``tests/interfaces`` holds one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.models import JobState, Reason
from holdfast.core.validation import (
    KEY_LIMIT,
    check_key,
    check_name,
    check_tag,
    check_task_name,
    check_worker_id,
    did_you_mean,
    parse_count,
    parse_rate,
)
from holdfast.tasks.codec import Words
from holdfast.tasks.command_policy import CommandPayload
from holdfast.tasks.signature import Argument

Check = Callable[[Any, str], Any]
"""From a value and what the client calls it to what the value means; raises Invalid."""
Schema = Mapping[str, Any]

NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,63}$"
_UUID = "[0-9A-Fa-f]{8}-?(?:[0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}"
_ULID = "[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}"
REFERENCE_PATTERN = f"^(?:{_UUID}|{_ULID}|key:.{{1,512}})$"
TASK_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._:/-]{0,127}$"
WORKER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PAGE_MOST = 500
"""Jobs on one page."""


class Field(msgspec.Struct, frozen=True):
    """A thing that may be said. ``many``: a query may say it several times. ``nullable``: null is a value."""

    name: str
    schema: Schema
    doc: str
    check: Check
    example: Any = None
    required: bool = False
    many: bool = False
    nullable: bool = False


class Form:
    """The fields of a body, under a name of their own.

    ``inner``: the forms its schema refers to. ``refused``: schemas of bodies that contradict themselves.
    """

    def __init__(
        self,
        *,
        name: str,
        doc: str,
        fields: Sequence[Field],
        inner: Sequence[Form] = (),
        refused: Sequence[Schema] = (),
    ) -> None:
        self.name = name
        self.refused = tuple(refused)
        self.doc = doc
        self.fields = tuple(fields)
        self.inner = tuple(inner)
        self._known = {field.name: field.check for field in fields}
        self._nullable = frozenset(field.name for field in fields if field.nullable)
        self._required = [field.name for field in fields if field.required]

    def read(self, said: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Returns the checked values by name; Invalid names the field, with ``path`` before it."""
        values = {}
        for name, value in said.items():
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
    said: dict[str, list[str]] = {}
    for name, value in _pairs(text):
        if name not in known:
            raise _unknown(name, name, list(known))
        said.setdefault(name, []).append(value)
    values: dict[str, Any] = {}
    for field in fields:
        texts = said.get(field.name)
        if texts is None:
            if field.required:
                raise missing_field(field.name)
        elif field.many:
            values[field.name] = tuple(field.check(each, field.name) for each in texts)
        elif len(texts) > 1:
            raise Invalid(field.name, Words(f"said {len(texts)} times"), "say it once", code="duplicate_key")
        else:
            values[field.name] = field.check(texts[0], field.name)
    return values


def _pairs(text: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError:  # a wrong encoding, or too many
        remedy = "percent-encode UTF-8, and say at most 100 things"
        raise Invalid("query", text.decode("ascii", "replace"), remedy) from None


_ELSEWHERE = {"type": "task", "job_type": "task", "status": "state", "args": "payload", "arguments": "payload"}
"""What other systems call otherwise."""
_OF_COMMANDS = CommandPayload.__struct_fields__
"""What stands in the payload of a command job."""


@contextmanager
def named_as_said(path: str = "") -> Iterator[None]:
    """Errors of the application name the client's field, with ``path`` before it."""
    try:
        yield
    except Invalid as error:
        words, error.field = error.field, path + _as_said(error.field)
        error.args = (error.field + str(error).removeprefix(words),)
        raise


def _as_said(field: str) -> str:
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


def missing_field(path: str) -> Invalid:
    """The error of a field that is required and was left out."""
    return Invalid(path, Words("nothing"), "it is required", "was given", code="missing")


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────────────
def as_it_is(value: Any, field: str) -> Any:
    """No check here: the value is checked where it is used."""
    return value


def text_check(least: int, most: int) -> Check:
    """Text of that many characters."""

    def check_value(value: Any, field: str) -> str:
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise Invalid(field, value, f"give text of {least} to {most} characters")
        return value

    return check_value


def count(least: int, most: int) -> Check:
    """A whole number; in a query, its text."""
    return lambda value, field: parse_count(value, field, least=least, most=most)


def whole_number(value: Any, _field: str = "") -> Any:
    """The value; a number such as 2.0, which JSON does not tell from 2, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number_check(least: int, most: int) -> Check:
    """A whole number in a body: no text."""
    return lambda value, field: parse_count(whole_number(value), field, least=least, most=most, text=False)


def only_true(value: Any, field: str) -> bool:
    """true, of JSON."""
    if value is not True:
        raise Invalid(field, value, "give true, or leave the field out")
    return True


def at_most_one(*names: str) -> list[Schema]:
    """Schemas of bodies with more than one of these fields."""
    return [{"required": list(pair)} for pair in combinations(names, 2)]


def none_of(*names: str) -> Schema:
    """The schema of bodies with none of these fields."""
    return {"not": {"anyOf": [{"required": [name]} for name in names]}}


def seconds_check(most: int, least: int = 0) -> Check:
    """A number of seconds, of JSON."""

    def check_value(value: Any, field: str) -> timedelta:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Invalid(field, value, f"give a number of seconds from {least} to {most:,}")
        return timedelta(seconds=value)

    return check_value


def check_rate(value: Any, field: str) -> str:
    """Validates a rate: a number in a time."""
    parse_rate(value, field)
    return str(value)


def choice_check(*words: str) -> Check:
    """Validates a word of a fixed list."""

    def check_value(value: Any, field: str) -> str:
        if value not in words:
            raise Invalid(field, value, f"give one of {', '.join(words)}{did_you_mean(str(value), words)}")
        return str(value)

    return check_value


def check_flag(value: Any, field: str) -> bool:
    """true or false, of JSON."""
    if not isinstance(value, bool):
        raise Invalid(field, value, "give true or false")
    return value


def any_text(value: Any, field: str) -> str:
    """Text of any length."""
    if not isinstance(value, str):
        raise Invalid(field, value, "give text")
    return value


def an_object(value: Any, field: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise Invalid(field, value, "give a JSON object")
    return value


def array_of(check: Check, most: int, least: int = 1) -> Check:
    """A JSON array of at most ``most`` entries."""

    def check_all(value: Any, field: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            shown = Words(f"an array of {len(value):,}") if isinstance(value, list) else value
            raise Invalid(field, shown, f"give a JSON array of {least} to {most:,} entries, also where it is one")
        return [check(each, f"{field}[{place}]") for place, each in enumerate(value)]

    return check_all


def check_key_field(value: Any, field: str) -> str:
    """An idempotency key; too long is wrong here like any other fault, not a matter of size."""
    return check_key(text_check(1, KEY_LIMIT)(value, field), field)


def check_tag_field(value: Any, field: str) -> str:
    """Validates one tag."""
    return check_tag(text_check(1, 100)(value, field), field)


def queue_name(value: Any, field: str) -> str:
    """A queue's name."""
    return check_name(field, value)


def worker_name(value: Any, field: str) -> str:
    """A worker's id."""
    return check_worker_id(field, value)


# ── fields of several operations ──────────────────────────────────────────────────────────────────────────────────
STATES = [state.value for state in JobState]
_WHEN = {"type": "string", "minLength": 1, "maxLength": 40}

QUEUE = Field(
    "queue", {"type": "string", "pattern": NAME_PATTERN}, "Jobs of this queue.", queue_name, example="default"
)
FILTERS = (
    Field(
        "state",
        {"type": "string", "enum": STATES, "title": "JobState"},
        "Jobs in this state; several: in any of them.",
        choice_check(*STATES),
        example="dead",
        many=True,
    ),
    QUEUE,
    Field(
        "task",
        {"type": "string", "pattern": TASK_PATTERN},
        "Jobs of this task; several: of any of them.",
        check_task_name,
        example="email.send",
        many=True,
    ),
    Field(
        "tag",
        {"type": "string", "minLength": 1, "maxLength": 100},
        "Jobs that carry this tag.",
        check_tag_field,
        example="spring",
    ),
    Field(
        "reason",
        {"type": "string", "enum": [reason.value for reason in Reason], "title": "Reason"},
        "Jobs that failed for this reason.",
        choice_check(*Reason),
        example="budget",
    ),
    Field("worker", {"type": "string", "pattern": WORKER_PATTERN}, "Jobs this worker took last.", worker_name),
    Field(
        "error",
        {"type": "string", "minLength": 1, "maxLength": 1000},
        "Jobs whose error contains this text.",
        text_check(1, 1000),
        example="connection refused",
    ),
    Field("since", _WHEN, 'Submitted after: an instant, or how long ago ("2h").', text_check(1, 40), example="2h"),
    Field(
        "until",
        _WHEN,
        'Submitted before: an instant, or how long ago ("7d").',
        text_check(1, 40),
        example="2030-01-31T08:00:00Z",
    ),
)
CURSOR = Field(
    "cursor",
    {"type": "string", "minLength": 1, "maxLength": 100},
    "Continue where an earlier page ended.",
    text_check(1, 100),
)
PAGING = (
    Field(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": PAGE_MOST, "default": 50},
        "Jobs on this page.",
        count(1, PAGE_MOST),
        example=50,
    ),
    CURSOR,
)
