"""Validation of single values, the same for client, CLI, HTTP, settings and import.

``check_…`` takes what a program gives, ``parse_…`` text too (or a typed value); most return the value in the form that
is stored. Both raise Invalid, which names the field, the value and the remedy. ``field`` is the user's name for it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import ipaddress
import json
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.core.errors import Invalid, TooLarge

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)

MAX_KEY_LENGTH = 512
"""Characters of an idempotency key."""
MAX_TAG_LENGTH = 100
"""Characters of one tag."""
MAX_TAGS = 100
"""Tags of one job."""
MAX_METADATA_BYTES = 16 * 1024
"""Bytes of a job's metadata as JSON."""
MAX_NESTING = 64
"""Maximum nesting of objects and arrays, the outermost included. Interpreters have different limits of their own."""
MAX_TIMEOUT = timedelta(days=30)
LONGEST = timedelta(days=175 * 366)
"""Longest span: the instant after it is one that every store can represent."""
FIRST_INSTANT = datetime(2000, 1, 1, tzinfo=UTC)
LAST_INSTANT = datetime(2199, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)

RATE_PATTERN = "^([1-9][0-9]{0,5})/([smhd])$"
"""Form of a rate: a number and a unit of time."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]{0,127}")
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INSTANT = re.compile(
    r"(?P<year>\d{4})-\d\d-\d\d[Tt ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:[0-5]\d)", re.ASCII
)
_DURATION = re.compile(r"(-?\d{1,12}(?:\.\d{1,9})?)\s*(ms|s|m|h|d)?", re.ASCII)
_RATE = re.compile(RATE_PATTERN)
_SIZE = re.compile(r"(\d{1,18})\s*(B|KiB|MiB|GiB)?", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MASKED = "(?:pass(?:word|wd|phrase)|pwd|secret|token|authorization|cookie|credentials?|(?:api|access|private)[_-]?key)"
"""Pattern of the last part of names whose values are masked."""
_SECRET = re.compile(rf"{MASKED}\s*=\s*", re.IGNORECASE)

_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_SIZES = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024, "B": 1}

# Categories of characters that hide, reorder or break text: control, format (bidi, zero-width), surrogate,
# line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def check_name(field: str, text: object) -> str:
    """Validates the name of a queue, schedule, limit or worker: lower-case ASCII, so no two names look alike."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise Invalid(field, text, "use 1 to 64 of a-z 0-9 . _ - and begin with a letter or a digit")
    return text


def check_task_name(text: object, field: str = "task") -> str:
    """Validates the name of a task."""
    if not isinstance(text, str):
        raise Invalid(field, text, "give the task's name, as text")
    if not _TASK_NAME.fullmatch(text):
        raise Invalid(field, text, "use 1 to 128 of A-Z a-z 0-9 . _ - : / and begin with a letter, a digit or _")
    return text


def check_worker_id(field: str, text: object) -> str:
    """Validates a worker's id in the store."""
    if not isinstance(text, str) or not _WORKER_ID.fullmatch(text):
        raise Invalid(field, text, "use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or a digit")
    return text


def check_key(text: object, field: str = "key", *, limit: int = MAX_KEY_LENGTH) -> str:
    """Validates an idempotency key. Keys are compared character by character: composed and decomposed ``é`` differ."""
    return _check_text(field, text, limit)


def check_tag(text: object, field: str = "tag") -> str:
    """Validates one tag of a job."""
    return _check_text(field, text, MAX_TAG_LENGTH)


def check_tags(tags: Iterable[object], field: str = "tags") -> tuple[str, ...]:
    """Validates a job's tags; returns each once, in order."""
    if isinstance(tags, str | bytes):
        raise Invalid(field, tags, f"give a list of tags: [{tags!r}]")
    if not isinstance(tags, Iterable):
        raise Invalid(field, tags, "give a list of tags")
    unique = tuple(dict.fromkeys(check_tag(tag, field) for tag in tags))
    if len(unique) > MAX_TAGS:
        raise Invalid(field, f"{len(unique)} tags", f"give at most {MAX_TAGS}")
    return unique


def _check_text(field: str, text: object, limit: int) -> str:
    if not isinstance(text, str):
        raise Invalid(field, text, "give text")
    if not text.strip():
        raise Invalid(field, text, "give at least one visible character")
    if len(text) > limit:
        raise TooLarge(field, text, f"give at most {limit} characters; these are {len(text)}")
    for position, character in enumerate(text):
        if unicodedata.category(character) in _UNSEEN:
            what = f"U+{ord(character):04X} at character {position + 1}"
            raise Invalid(field, text, f"remove {what}: control, bidirectional and invisible characters are refused")
    if unicodedata.combining(text[0]):
        raise Invalid(field, text, "do not begin with a combining mark")
    return text


def check_priority(value: object, field: str = "priority") -> int:
    """Validates a priority; higher runs first."""
    return parse_count(value, field, least=-100, most=100, text=False)


def check_timeout(value: object, field: str = "timeout") -> timedelta:
    """Validates the timeout of an attempt: a span as ``check_span`` takes it, above 0 and at most 30 days."""
    _refuse_bare_number(value, field)
    return parse_timeout(value, field)


def parse_timeout(value: object, field: str = "timeout") -> timedelta:
    """Parses the timeout of an attempt, also from a command line: a bare ``"5"`` is five seconds."""
    span = _as_span(value, field)
    if span is None or not timedelta(0) < span <= MAX_TIMEOUT:
        given = format_duration(value) if isinstance(value, timedelta) else value
        raise Invalid(field, given, "give more than 0 seconds and at most 30 days; leave it out for no timeout")
    return span


def check_metadata(value: object, field: str = "metadata") -> dict[str, Any]:
    """Validates metadata, a JSON object. Returns a copy, so later changes to the argument have no effect."""
    if not isinstance(value, dict):
        raise Invalid(field, value, "give a JSON object")
    try:
        encoded = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        copy: dict[str, Any] = json.loads(encoded)
        faithful = copy == value
    except (TypeError, ValueError, RecursionError) as error:
        # The value itself may be impossible to show (endless, too deep), so the message names only the cause.
        raise Invalid(field, f"{type(error).__name__}: {error}", "give only what JSON can hold") from None
    if len(encoded) > MAX_METADATA_BYTES:
        raise TooLarge(field, f"{len(encoded)} bytes", f"give at most {MAX_METADATA_BYTES} bytes of JSON")
    if not faithful:
        raise Invalid(field, value, "use text for keys and lists instead of tuples: JSON would change the rest")
    if is_too_deep(copy):
        raise Invalid(field, f"an object nested deeper than {MAX_NESTING} levels", f"nest at most {MAX_NESTING} levels")
    return copy


def is_too_deep(value: object) -> bool:
    """Returns True if JSON values stand inside one another in more than ``MAX_NESTING`` levels."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def decode_stored(kind: str, decode: Callable[[str | bytes], S], rows: Iterable[Sequence[Any]]) -> list[S]:
    """Schedules or limits of their documents and revisions. One that another program spoiled is left out, with a
    warning: it cannot be read, or computed with."""
    found = []
    for document, revision in rows:
        try:
            found.append(replace(decode(document), revision=int(revision)))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            text = "a stored %s cannot be read, and is left out: %s; declare it, or add it, again"
            logging.getLogger(__name__).warning(text, kind, error)
    return found


def parse_instant(value: object, field: str = "run_at") -> datetime:
    """Converts an aware datetime, or RFC 3339 text with an offset, to UTC; years 2000 to 2199."""
    when = _as_datetime(value)
    if when is None or when.utcoffset() is None:
        raise Invalid(field, value, "give a date, a time and an offset, such as 2030-01-31T08:00:00Z or …+01:00")
    # The year first: near the ends of the calendar the conversion to UTC overflows.
    if not 1999 <= when.year <= 2200 or not FIRST_INSTANT <= (utc := when.astimezone(UTC)) <= LAST_INSTANT:
        raise Invalid(field, value, "give an instant from 2000-01-01 to 2199-12-31 UTC")
    return utc


def check_offset(value: object, field: str) -> None:
    """Refuses what is not an aware datetime."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise Invalid(field, value, "give an aware datetime, such as datetime.now(UTC)")


def check_texts(field: str, values: object, known: Sequence[str] = ()) -> None:
    """Refuses what is not a tuple of texts, each one of those known if there are any."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise Invalid(field, values, f"give a tuple: {field}=({values!r},)")
    for value in values:
        if known and value not in known:
            raise Invalid(field, value, f"name any of {', '.join(known)}{did_you_mean(value, known)}")
        if not isinstance(value, str):
            raise Invalid(field, value, f"give names as text: {field}=('mail.send',)")


def _as_datetime(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not _INSTANT.fullmatch(value):
        return None
    try:
        return datetime.fromisoformat(value.upper())
    except ValueError:  # 30 February, +25:00
        return None


def parse_duration(value: object, field: str = "duration") -> timedelta:
    """Parses a span of at most 175 years: seconds, ``"30s"``, ``"500ms"``, ``"5m"``, ``"7d"``, or a timedelta."""
    span = _as_span(value, field)
    if span is None or not timedelta(0) <= span <= LONGEST:
        raise Invalid(field, value, "give between 0 seconds and 175 years")
    return span


def _as_span(value: object, field: str) -> timedelta | None:
    """Parses a span without bounds; None if it is not a number or exceeds a timedelta."""
    number = value
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        number = float(match[1]) * _UNITS[match[2] or "s"].total_seconds()
    if not isinstance(number, timedelta | int | float) or isinstance(number, bool):
        raise Invalid(field, value, 'write a number of seconds, or a span such as "30s", "5m", "2h" or "7d"')
    try:
        return number if isinstance(number, timedelta) else timedelta(seconds=number)
    except (ValueError, OverflowError):
        return None


def parse_rate(value: object, field: str = "rate") -> timedelta:
    """Returns the interval of a rate such as ``"10/s"``, ``"90/m"``, ``"500/h"`` or ``"1/d"``."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Invalid(field, value, 'give how many in a second, minute, hour or day: "10/s", "90/m", "500/h", "1/d"')
    return _UNITS[match[2]] / int(match[1])


def check_span(value: object, field: str) -> timedelta:
    """Validates a span given by code: seconds, a timedelta, or text with a unit. Bare ``"5"`` is refused: the caller
    probably forgot to convert it."""
    _refuse_bare_number(value, field)
    return parse_duration(value, field)


def _refuse_bare_number(value: object, field: str) -> None:
    if isinstance(value, str) and not value.strip()[-1:].isalpha():
        raise Invalid(field, value, 'give seconds as a number, a timedelta, or text with a unit such as "5m"')


def format_duration(span: timedelta) -> str:
    """Formats ``span`` in the largest exact unit; ``parse_duration`` reads it back."""
    if not span:
        return "0s"
    for unit, length in _UNITS.items():
        if not span % length:
            return f"{span // length}{unit}"
    whole, rest = divmod(span, _UNITS["s"])
    return f"{whole}.{rest.microseconds:06d}".rstrip("0") + "s"


def parse_size(value: object, field: str = "size") -> int:
    """Parses a number of bytes: a whole number, or ``"64KiB"``, ``"1MiB"``, ``"2GiB"``."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        units = {unit.lower(): length for unit, length in _SIZES.items()}
        return int(match[1]) * units[(match[2] or "B").lower()]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Invalid(field, value, 'write a number of bytes, or a size such as "256KiB" or "1MiB"')


def format_size(size: int) -> str:
    """Formats ``size`` in the largest exact unit; ``parse_size`` reads it back."""
    for unit, length in _SIZES.items():
        if size >= length and size % length == 0:
            return f"{size // length}{unit}"
    return "0B"


def parse_boolean(value: object, field: str = "value") -> bool:
    """Parses ``true`` or ``false``."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise Invalid(field, value, "write true or false")


def parse_count(value: object, field: str = "value", *, least: int, most: int, text: bool = True) -> int:
    """Parses a whole number from ``least`` to ``most``; digits as text only if ``text`` is True."""
    number = value
    if text and isinstance(value, str) and _COUNT.fullmatch(value.strip()):
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise Invalid(field, value, f"give a whole number from {least} to {most}")
    return number


def parse_queues(value: object, field: str = "queues") -> dict[str, int | None]:
    """Parses queues and their caps on concurrent jobs: ``"mail:10,default"``, or a mapping of names to numbers.

    None: no cap. The name ``*``: every queue.
    """
    if isinstance(value, str):
        pairs = [(name.strip(), cap.strip() if colon else None) for name, colon, cap in _split_queues(value)]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        raise Invalid(field, value, 'write "mail:10,default:5", or "*" for every queue')
    queues: dict[str, int | None] = {}
    for name, cap in pairs:
        if name != "*":
            check_name(field, name)
        if name in queues:
            raise Invalid(field, value, f"name the queue {name} once")
        queues[name] = None if cap is None else parse_count(cap, f"{field}.{name}", least=1, most=10_000)
    if not queues:
        raise Invalid(field, value, 'name at least one queue, or "*" for every queue')
    return queues


def _split_queues(text: str) -> list[tuple[str, str, str]]:
    return [part.partition(":") for part in text.split(",")] if text.strip() else []


def format_queues(queues: Mapping[str, int | None]) -> str:
    """Returns the text form that ``parse_queues`` reads."""
    return ",".join(name if cap is None else f"{name}:{cap}" for name, cap in queues.items())


def mask_url(url: str) -> str:
    """Returns ``url`` with ``***`` for every password, also for one that lacks percent-encoding.

    In doubt it hides too much: from the first colon after the scheme to the last ``@``, and the values of query
    parameters (or connection keywords) with a name such as password, secret or token.
    """
    scheme = _SCHEME.match(url)
    start = scheme.end() if scheme else 0
    spans = [(match.end(), _until(url, "&", match.end())) for match in _SECRET.finditer(url)]
    colon, at = url.find(":", start), url.rfind("@")
    if start <= colon < at and not url.startswith("sqlite://"):
        spans.append((colon + 1, at))
    masked, shown_from = "", 0
    for first, last in sorted(spans):
        if first > shown_from or not masked:
            masked += url[shown_from:first] + "***"
        shown_from = max(shown_from, last)
    return masked + url[shown_from:]


def _until(text: str, stop: str, start: int) -> int:
    found = text.find(stop, start)
    return len(text) if found < 0 else found


def is_loopback(host: str) -> bool:
    """Returns True for a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


PEER_OPTIONS = {
    **dict.fromkeys(("countdown", "schedule_in", "defer_by", "_defer_by"), "here it is delay=…"),
    **dict.fromkeys(("eta", "at", "schedule_at", "defer_until", "_defer_until"), "here it is run_at=…"),
    **dict.fromkeys(("task_id", "job_id", "_job_id", "lock", "queueing_lock"), "here it is id=…, key=… or unique=…"),
    **dict.fromkeys(("max_retries", "retries"), "here it is max_attempts=…, which counts the first execution, too"),
    **dict.fromkeys(
        ("time_limit", "soft_time_limit", "job_timeout", "task_time_limit", "task_soft_time_limit"),
        'here it is timeout=…; it ends the work of a def handler only with executor="process"',
    ),
    **dict.fromkeys(("link", "depends_on"), "here it is after=…"),
    **dict.fromkeys(("link_error", "on_failure"), 'submit a job with .options(after=Dependency(job.id, "failure"))'),
    **dict.fromkeys(("exchange", "routing_key"), "name the queue: queue=…"),
    **dict.fromkeys(("retry_backoff", "retry_backoff_max", "retry_jitter"), "here it is retry=Retry.exponential(…)"),
    **dict.fromkeys(("args", "kwargs"), "give arguments as in a call of the function: enqueue(1, name=2)"),
    **dict.fromkeys(("broker", "broker_url"), "here it is the url of the store, and there is no broker"),
    **dict.fromkeys(("backend", "result_backend"), "leave it out: results are kept in the store"),
    **dict.fromkeys(("include", "imports"), "import the modules with tasks where the application is imported"),
    **dict.fromkeys(("acks_late", "task_acks_late"), "leave it out: a job is acknowledged when it has ended"),
    **dict.fromkeys(("task_routes", "task_default_queue"), "name the queue at the task: @app.task(queue=…)"),
    **dict.fromkeys(("visibility_timeout", "broker_transport_options"), "here it is lease=…, which workers renew"),
    "autoretry_for": "here it is retry_on=…",
    "beat_schedule": "declare each entry: app.schedule(…)",
    "base": "leave it out: what tasks share is a function, or @app.middleware",
    "bind": "leave it out: annotate the first parameter with Context",
    "compression": "leave it out: keep large data elsewhere and pass where it is",
    "default_retry_delay": "here it is retry=Retry.fixed(…)",
    "dont_autoretry_for": "here it is dead_on=…",
    "headers": "pass the values as arguments",
    "ignore_result": "leave it out: a result is kept as long as its job",
    **dict.fromkeys(("rate_limit", "task_default_rate_limit"), "declare it: app.limit(…, rate=…)"),
    "reject_on_worker_lost": "leave it out: a job whose worker is lost runs again",
    **dict.fromkeys(("ttl", "max_age"), "here it is expires=…"),
    **dict.fromkeys(("result_expires", "result_ttl"), "settings: keep_succeeded=…, keep_dead=… and keep_cancelled=…"),
    "meta": "here it is metadata=…",
    "retry_kwargs": "here it is max_attempts=… and retry=…",
    "schedule": "declare it: app.schedule(…), with cron=… or every=…",
    "serializer": "leave it out: arguments are stored as JSON and checked against the task's signature",
    "shadow": "leave it out",
    "task_always_eager": "in tests, write: with testing.inline(app)",
    "task_annotations": "give each task its own: @app.task(timeout=…), app.limit(…, rate=…)",
    "task_queues": "leave it out: a queue comes with its first job",
    "throws": "leave it out, or say dead_on=… for errors that no further attempt mends",
    "timezone": "give zone=… to each schedule with cron=…",
    "track_started": "leave it out: a job that runs is in the state running",
    "worker_concurrency": "here it is concurrency=…",
    "worker_max_memory_per_child": "here it is recycle_memory=…",
    "worker_max_tasks_per_child": "here it is recycle_jobs=…",
    "worker_prefetch_multiplier": "here it is prefetch=False, for at most one job a slot",
}
"""Options of other queues that have another name here."""


def peer_option_hint(name: str) -> str:
    """Returns ``; here it is …`` for an option of another queue, else ``""``. Appended to a remedy."""
    return f"; {PEER_OPTIONS[name]}" if name in PEER_OPTIONS else ""


def explain_attribute(owner: object, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """Returns the error of a missing attribute, with what to write here if other queues have one of that name."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(text + (f"; {elsewhere[name]}" if name in elsewhere else ""), name=name, obj=owner)


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Returns ``; did you mean …?`` if one of ``words`` is close to ``word``, else ``""``. Appended to a remedy."""
    text = str(word).lower()
    close = difflib.get_close_matches(text, words, n=3)
    close.sort(key=lambda each: sorted(each) != sorted(text))  # swapped letters are the likeliest mistake
    return f"; did you mean {close[0]}?" if close else ""


def check_options(given: Iterable[str], known: Sequence[str], field: str = "option") -> None:
    """Raises `Invalid` for a name that is none of the known ones."""
    for name in sorted(set(given) - set(known)):
        hint = peer_option_hint(name) or did_you_mean(name, known)
        raise Invalid(field, name, f"there are these: {', '.join(known)}{hint}")


def with_suggestions(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function: for a misspelt keyword argument its error suggests the nearest one."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            wrong = min(set(kwargs) - known)
            name, hint = function.__name__, peer_option_hint(wrong) or did_you_mean(wrong, known)
            raise TypeError(f"{name}() got an unexpected keyword argument {wrong!r}{hint}")
        return function(*args, **kwargs)

    return checked_call


def is_printable_line(text: str) -> bool:
    """Returns True if text is one line without control characters or lone surrogates."""
    return bool(text) and not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", text)


def value_at(payload: object, path: str) -> Any:
    """Returns the value of a payload at a path like "args.order.id"; "args" is all of it. None if it is missing."""
    value: Any = payload
    for name in path.split(".")[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    return value
