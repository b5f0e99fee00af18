"""Settings and the types of their values: form, parser and text."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar, overload
from urllib.parse import quote

from holdfast.core.alerts import AlertRule, format_rule, parse_rule
from holdfast.core.errors import Invalid
from holdfast.core.limit_options import draft_limit, format_options, limit_options
from holdfast.core.limits import Limit
from holdfast.core.retry import Retry
from holdfast.core.validation import (
    check_name,
    check_worker_id,
    did_you_mean,
    format_duration,
    format_queues,
    format_size,
    is_printable_line,
    mask_url,
    parse_boolean,
    parse_count,
    parse_duration,
    parse_queues,
    parse_size,
)

T = TypeVar("T")
Bound = TypeVar("Bound", timedelta, int)

PREFIX = "HOLDFAST_"  # of environment variables


class Kind(NamedTuple, Generic[T]):
    """Type of a setting's value: its name in the reference, its parser, its text form."""

    form: str
    parse: Callable[[str, object], T]  # field, value
    show: Callable[[T], str]


def duration(least: str, most: str) -> Kind[timedelta]:
    """Returns the type of a duration within bounds."""
    return _bounded("duration", parse_duration, format_duration, least, most)


def byte_size(least: str, most: str) -> Kind[int]:
    """Returns the type of a number of bytes within bounds."""
    return _bounded("size", parse_size, format_size, least, most)


def _bounded(
    form: str, parse_value: Callable[..., Bound], show: Callable[[Bound], str], least: str, most: str
) -> Kind[Bound]:
    low, high = parse_value(least), parse_value(most)

    def parse(field: str, value: object) -> Bound:
        parsed = parse_value(value, field)
        if not low <= parsed <= high:
            raise Invalid(field, value, f"give from {least} to {most}")
        return parsed

    return Kind(f"{form}, {least} to {most}", parse, show)


def whole_number(least: int, most: int) -> Kind[int]:
    """Returns the type of a whole number within bounds."""
    return Kind(
        f"whole number, {least} to {most}", lambda field, value: parse_count(value, field, least=least, most=most), str
    )


def one_of(*words: str) -> Kind[str]:
    """Returns the type of a word of a fixed list, in any case."""

    def parse(field: str, value: object) -> str:
        for word in words:
            if isinstance(value, str) and value.strip().lower() == word.lower():
                return word
        raise Invalid(field, value, f"write one of {', '.join(words)}{did_you_mean(value, words)}")

    return Kind(" or ".join(words), parse, str)


def name_list(what: str, pattern: str) -> Kind[tuple[str, ...]]:
    """Returns the type of a list of names, or of text with commas; each name matches ``pattern``."""

    def parse(field: str, value: object) -> tuple[str, ...]:
        listed = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple):
            raise Invalid(field, value, 'write a list of names, ["a", "b"], or "a,b"')
        for name in listed:
            if not isinstance(name, str) or not is_printable_line(name) or not re.fullmatch(pattern, name):
                raise Invalid(field, name, f"each entry is {what}")
        return tuple(listed)

    return Kind("names with commas between", parse, ",".join)


def optional(word: str, kind: Kind[T]) -> Kind[T | None]:
    """Returns the type of a ``kind`` or of ``word``, which means None."""

    def parse(field: str, value: object) -> T | None:
        if isinstance(value, str) and value.strip().lower() == word:
            return None
        try:
            return kind.parse(field, value)
        except Invalid as error:
            raise Invalid(error.field, error.value, f'{error.remedy}; or "{word}"') from None

    return Kind(f"{kind.form}, or {word}", parse, lambda value: word if value is None else kind.show(value))


# ── types of single settings ──────────────────────────────────────────────────────────────────────────────────────────
def _url(remedy: str) -> Kind[str]:
    """Returns the type of a URL. ``remedy``: of the error for other text."""

    def parse(field: str, value: object) -> str:
        if not isinstance(value, str) or not re.match(r"[a-z][a-z0-9+.-]*://", value) or not is_printable_line(value):
            raise Invalid(field, mask_url(value) if isinstance(value, str) else value, remedy)
        return value

    return Kind("URL", parse, mask_url)


def _parse_target(field: str, value: object) -> str:
    module, _, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise Invalid(field, value, "write module:attribute, such as shop.jobs:app")
    return f"{module}:{attribute}"


def _parse_retry(field: str, value: object) -> Retry:
    if isinstance(value, Retry):
        return value
    if not isinstance(value, str):
        raise Invalid(field, value, 'write a policy as text, such as "exponential:base=5,cap=3600" or "1,5,25,125"')
    return Retry.parse(value)


def _matching(form: str, pattern: str, remedy: str) -> Kind[str]:
    """Returns the type of a text that matches ``pattern``."""

    def parse(field: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise Invalid(field, value, remedy)
        return value

    return Kind(form, parse, str)


def _parse_task_field(field: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", value):
        raise Invalid(field, value, "write letters, digits and underscores, such as job_type; it begins with a letter")
    if value in _TAKEN_FIELDS:
        raise Invalid(field, value, "give another name, such as task or job_type", "is the name of another field")
    return value


_TAKEN_FIELDS = frozenset(
    {
        *("timestamp", "level", "event", "logger", "job_id", "queue", "attempt", "trace_id", "worker_id", "reason"),
        *("error", "outcome", "seconds", "retry_at", "remedy", "stack", "exception", "dlq_key", "locked_until", "le"),
    }
)


def _parse_file(field: str, value: object) -> str:
    if not isinstance(value, str) or not is_printable_line(value):
        raise Invalid(field, value, "write a file's path")
    return value


def _parse_networks(field: str, value: object) -> tuple[str, ...]:
    listed = name_list("an address or a network, such as 10.0.0.0/8", r"[0-9A-Fa-f.:/]+").parse(field, value)
    for each in listed:
        try:
            ip_network(each)
        except ValueError:
            raise Invalid(field, each, "give an address or a network, such as 10.0.0.0/8") from None
    return listed


def _named_tables(
    setting: str, parse_one: Callable[[str, Mapping[str, object]], T], format_one: Callable[[T], Mapping[str, object]]
) -> Kind[Mapping[str, T]]:
    """Returns the type of a table for each name, ``[setting.NAME]``, or of a JSON object of such tables."""

    def parse(field: str, value: object) -> Mapping[str, T]:
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, Mapping):
            raise Invalid(
                field, value, f"write a table for each, such as [{setting}.mail], or a JSON object of such objects"
            )
        return MappingProxyType({check_name(field, name): parse_table(field, name, value[name]) for name in value})

    def parse_table(field: str, name: str, options: object) -> T:
        location = f"{field}.{name}"
        if not isinstance(options, Mapping):
            raise Invalid(location, options, f"write its options in a table, [{location}]")
        try:
            return parse_one(name, options)
        except Invalid as error:
            option = error.value if error.field == "option" else error.field
            raise Invalid(f"{location}.{option}", error.value, error.remedy) from None

    return Kind(
        f"a table for each, `[{setting}.NAME]`, or JSON",
        parse,
        lambda found: json.dumps({name: format_one(each) for name, each in found.items()}, ensure_ascii=False),
    )


def _mask_webhook(url: str) -> str:
    """Returns the scheme and the host alone: user, path and query of a webhook are secrets."""
    found = _WEBHOOK.fullmatch(url)
    return f"{found[1]}://{found[2]}/***" if found else "***"


def _parse_webhook(field: str, value: object) -> str:
    remedy = "write the URL of a receiver, such as https://alerts.example.com/holdfast"
    found = _WEBHOOK.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or found is None or not _is_host(found[3]) or not 0 < int(found[4] or 443) < 65_536:
        raise Invalid(field, _mask_webhook(value) if isinstance(value, str) else value, remedy)
    return value


_WEBHOOK = re.compile(
    r"(https?)://(?:[!-.0-~]*@)?((?:([A-Za-z0-9._-]+)|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?)(?:[/?][!-~]*)?"
)


def _is_host(name: str | None) -> bool:
    """Returns True for a name that can be looked up: no part of it is empty or too long. None stands for an address."""
    try:
        return name is None or bool(name.encode("idna"))
    except UnicodeError:
        return False


def _parse_program(field: str, value: object) -> tuple[str, ...]:
    remedy = 'write the program and its arguments, ["/usr/local/bin/page", "--team", "mail"], or such text'
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:
        raise Invalid(field, value, remedy) from None
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
        raise Invalid(field, value, remedy)
    if not words[0] or not all(is_printable_line(word) for word in words):
        raise Invalid(field, value, remedy)
    return tuple(words)


FLAG: Kind[bool] = Kind(
    "true or false", lambda field, value: parse_boolean(value, field), lambda flag: str(flag).lower()
)
QUEUES: Kind[Mapping[str, int | None]] = Kind(
    "queues with commas between, * for every one",
    lambda field, value: MappingProxyType(parse_queues(value, field)),
    lambda queues: format_queues(dict(queues)),
)
FILE: Kind[str] = Kind("file", _parse_file, str)
HOST = _matching(
    "address or host name",
    r"[A-Za-z0-9.:_-]{1,253}",
    "write an address or a host name, such as 127.0.0.1, :: or localhost",
)
SERVICE: Kind[str] = Kind("name", check_worker_id, str)
WORKER_ID: Kind[str] = Kind("name", check_worker_id, str)
RETRY: Kind[Retry] = Kind("retry policy", _parse_retry, str)
URL = _url("write a store's URL: sqlite:///holdfast.db, postgresql://user@host/database or redis://host:6379/0")
REDIS_URL = _url("write the URL of a Redis, such as redis://localhost:6379/0")
TARGET: Kind[str] = Kind("module:attribute", _parse_target, str)
VERSION = _matching("version", r"[!-~]{1,64}", "give 1 to 64 visible ASCII characters, such as 2.4.1 or a commit")
REDIS_KEY = _matching("Redis key", r"[!-~]{1,100}", "give 1 to 100 visible ASCII characters, such as shop:jobs")
METRIC_PREFIX = _matching(
    "metric prefix",
    r"([A-Za-z_][A-Za-z0-9_]{0,63})?",
    "write letters, digits and underscores, such as holdfast_; it begins with no digit",
)
TASK_FIELD: Kind[str] = Kind("field name", _parse_task_field, str)
PROGRAMS = name_list("a program's name or path", r"[^,]+")
FOLDERS = name_list("an absolute directory", r"/[^,]*")
VARIABLES = name_list("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*")
HOSTS = name_list("a host name, without a port", r"[A-Za-z0-9._-]{1,253}")
ORIGINS = name_list("an origin, such as https://app.example or http://localhost:3000", r"https?://[a-z0-9.:\[\]-]+")
PATHS = name_list(
    "a dotted path from payload, result, metadata, lines or error, such as payload.card.number",
    r"(payload|result|metadata|lines)(\.[^.,]+)*|error",
)
NETWORKS: Kind[tuple[str, ...]] = Kind("addresses or networks with commas between", _parse_networks, ",".join)
LIMITS: Kind[Mapping[str, Limit]] = _named_tables(
    "limits", lambda name, options: draft_limit(name, limit_options(options)), format_options
)
ALERTS: Kind[Mapping[str, AlertRule]] = _named_tables("alerts", parse_rule, format_rule)
WEBHOOK: Kind[str] = Kind("URL", _parse_webhook, _mask_webhook)
PROGRAM: Kind[tuple[str, ...]] = Kind("program and arguments", _parse_program, shlex.join)
LEVEL = one_of("DEBUG", "INFO", "WARNING", "ERROR")


def resolve_relative(url: object, folder: Path) -> object:
    """Resolves a relative SQLite URL against ``folder``; returns anything else unchanged."""
    path = re.fullmatch(r"sqlite:///((?!/|%2f|:memory:)[^?#]+)", url, re.IGNORECASE) if isinstance(url, str) else None
    return url if path is None else f"sqlite:///{quote(os.fsencode(folder))}/{path[1]}"


class Setting(Generic[T]):
    """Descriptor of a setting; on a ``Settings`` object it is the value."""

    name: str
    default: T

    def __init__(self, kind: Kind[T], default: object, doc: str) -> None:
        self.kind = kind
        self.doc = doc
        self._written_default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.default = self.kind.parse(name, self._written_default)

    @overload
    def __get__(self, settings: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, settings: object, owner: type) -> T: ...
    def __get__(self, settings: object | None, owner: type) -> Setting[T] | T:
        return self  # on the class; the dictionary of a Settings object takes precedence

    @property
    def variable(self) -> str:
        """Returns the name of its environment variable."""
        return PREFIX + self.name.upper()
