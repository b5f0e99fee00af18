"""Options of limits, as code, settings and operators give them, and their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.limits import MAX_CONCURRENCY, MAX_DEPTH, MAX_RATE, MAX_SHARE, MAX_WEIGHT, Limit, LimitValues
from holdfast.core.validation import check_name, check_options, check_task_name, parse_count

_MAX_SHARES = 1000
_RATE = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,5})?([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PATH = re.compile(r"args(\.[^.\x00-\x1f]{1,64}){1,8}")
_BURST_US = 100_000  # a burst is by default a tenth of a second's worth


class LimitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a limit, as code, settings and operators give them.

    queue, task: the jobs it applies to; neither: a bucket that handlers take from, by ``context.limit(name)``.
    by: a path in the payload, like "args.tenant": each value has a bucket of its own, and they take turns.
    concurrency: jobs that run at once. rate: starts, like "10/s", "100/15m"; burst: how many of them may come at once,
    by default a tenth of a second's worth, at least the weight; to be given where the payload says the weight.
    weight: the room and tokens that a job takes, or a path in its payload. shares: turns by value of the key.
    depth: jobs that may wait, of each value with ``by``; submissions beyond it raise `QueueFull`.
    """

    queue: str | None = None
    task: str | None = None
    by: str | None = None
    concurrency: int | None = None
    rate: str | None = None
    burst: int | None = None
    weight: int | str = 1
    shares: Mapping[str, int] | None = None
    depth: int | None = None


_DEFAULTS = LimitOptions()
VALUE_OPTIONS = ("concurrency", "rate", "burst", "weight", "shares", "depth")
"""Options that may change while everything runs."""


def draft_limit(name: str, options: LimitOptions, *, owner: str | None = None) -> Limit:
    """The limit that these options describe. Raises `Invalid`, naming the field."""
    check_name("limit", name)
    if options.queue is not None and options.task is not None:
        raise Invalid("task", options.task, "give a queue or a task; a job obeys the limits of both")
    if options.by is not None:
        _check_path("by", options.by)
    limit = Limit(
        name=name,
        queue=None if options.queue is None else check_name("queue", options.queue),
        task=None if options.task is None else check_task_name(options.task),
        by=options.by,
        values=parse_values({field: getattr(options, field) for field in VALUE_OPTIONS}),
        owner=owner,
    )
    check_has_effect(limit)
    return limit


def check_has_effect(limit: Limit) -> None:
    """Raises `Invalid` for a limit that limits nothing."""
    values = limit.values
    of_handlers = limit.queue is None and limit.task is None
    if of_handlers and (values.rate is None or values.concurrency is not None or limit.by is not None):
        raise Invalid("queue", None, "give a queue or a task; a limit that handlers take from has a rate alone")
    if values.shares and limit.by is None:
        remedy = "give by too, when the limit is added: shares are turns by value of that key"
        raise Invalid("shares", dict(values.shares), remedy)
    if values.depth is not None and of_handlers:
        raise Invalid("depth", values.depth, "give a queue or a task too: it bounds their jobs that wait")
    if not limit.has_buckets and values.depth is None:
        raise Invalid("concurrency", None, "give concurrency, rate, depth, or by, for keys that take turns")


def parse_values(given: Mapping[str, Any]) -> LimitValues:
    """Values of a limit from its options. Raises `Invalid`, naming the field."""
    concurrency, rate, burst, weight, shares, depth = (given.get(field) for field in VALUE_OPTIONS)
    number, period_us = (None, 1_000_000) if rate is None else _parse_rate(rate)
    if burst is not None and number is None:
        raise Invalid("burst", burst, "give rate too")
    weight = _parse_weight(1 if weight is None else weight)
    if burst is None and number is not None and isinstance(weight, str):
        raise Invalid("weight", weight, "give burst too, at least the greatest weight: no job takes more tokens")
    least = 1 if number is None or isinstance(weight, str) else weight  # no job takes more tokens than the burst
    usual = 1 if number is None else _default_burst(number, period_us, least)
    return LimitValues(
        concurrency=None
        if concurrency is None
        else parse_count(concurrency, "concurrency", least=1, most=MAX_CONCURRENCY, text=False),
        rate=number,
        period_us=period_us,
        burst=usual if burst is None else parse_count(burst, "burst", least=least, most=MAX_CONCURRENCY, text=False),
        weight=weight,
        shares=_parse_shares(shares or {}),
        depth=None if depth is None else parse_count(depth, "depth", least=1, most=MAX_DEPTH, text=False),
    )


def _parse_rate(value: object) -> tuple[int, int]:
    """Number and period in microseconds."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Invalid("rate", value, 'give starts in a span: "10/s", "90/m", "100/15m", "500/h", "1/d"')
    number, period = int(match[1]), int(match[2] or 1) * _SECONDS[match[3]]
    if number > MAX_RATE * period:
        raise Invalid("rate", value, f"give at most {MAX_RATE:,} a second")
    return number, period * 1_000_000


def format_rate(values: LimitValues) -> str | None:
    """Rate of a limit as an option: "10/s", "100/15m"."""
    if values.rate is None:
        return None
    seconds = values.period_us // 1_000_000
    unit = next(unit for unit in reversed(_SECONDS) if seconds % _SECONDS[unit] == 0)
    count = seconds // _SECONDS[unit]
    return f"{values.rate}/{'' if count == 1 else count}{unit}"


def _parse_weight(value: object) -> int | str:
    if isinstance(value, str):
        return _check_path("weight", value)
    return parse_count(value, "weight", least=1, most=MAX_WEIGHT, text=False)


def _check_path(field: str, value: object) -> str:
    if not isinstance(value, str) or not _PATH.fullmatch(value):
        raise Invalid(field, value, 'give a place in the payload, like "args.tenant" or "args.order.id"')
    return value


def _parse_shares(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or len(value) > _MAX_SHARES:
        raise Invalid("shares", value, f"give at most {_MAX_SHARES} turns by value of the key: {{'acme': 3}}")
    return {str(key): parse_count(share, "shares", least=1, most=MAX_SHARE, text=False) for key, share in value.items()}


def limit_options(options: Mapping[str, Any]) -> LimitOptions:
    """Options by name; raises `Invalid` for a name that is none."""
    check_options(options, LimitOptions.__struct_fields__)
    return LimitOptions(**options)


def _default_burst(rate: int, period_us: int, weight: int) -> int:
    return max(weight, rate * _BURST_US // period_us)


def has_default_burst(values: LimitValues) -> bool:
    """Returns True if the burst is the one that a limit has when none is given."""
    return values.rate is None or (
        isinstance(values.weight, int) and values.burst == _default_burst(values.rate, values.period_us, values.weight)
    )


def format_values(values: LimitValues) -> dict[str, Any]:
    """Values of a limit as options; ``parse_values`` reads them back."""
    given = {field: getattr(values, field) for field in ("concurrency", "weight", "shares", "depth")}
    return given | {"rate": format_rate(values), "burst": None if values.rate is None else values.burst}


def format_options(limit: Limit) -> dict[str, Any]:
    """Options of a limit, without defaults; ``draft_limit`` reads them back."""
    given = {"queue": limit.queue, "task": limit.task, "by": limit.by} | format_values(limit.values)
    return {field: value for field, value in given.items() if value != getattr(_DEFAULTS, field) and value != {}}
