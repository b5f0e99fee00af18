"""Retry policies: the number of failures determines the delay of the next attempt. Pure.

The delay after the n-th failed execution is ``jitter(min(cap, base * factor ** (n + offset)))``, or the n-th of a
list whose last entry repeats. Jitter is one of

    none           exactly this delay
    full           from 0 to this delay
    add:M          this delay and up to M seconds more
    scale:LO:HI    this delay times a number between LO and HI

A policy may also give the priority that a job has from its first failure on. The number of attempts is
``max_attempts`` of the job, not part of the policy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.validation import check_priority, check_span, did_you_mean, parse_count, parse_duration

MAX_DELAY = timedelta(days=365)
"""Upper bound of every delay: ``now + delay`` stays an instant that every store can represent."""

_MAX_DELAY_SECONDS = MAX_DELAY.total_seconds()
_MAX_FACTOR = 1000.0
_MAX_OFFSET = 100
_MAX_LISTED_DELAYS = 100
_MAX_SCHEDULED_ATTEMPTS = 10_000
_MAX_JITTER_SCALE = 10.0
_MAX_EXPONENT = 10**9  # beyond it a count of failures no longer fits the arithmetic of floats

_FORMS = 'immediate, "exponential:base=5,factor=2,cap=3600,jitter=full", "fixed:10" or "1,5,25,125"'


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A retry policy. ``Retry()`` is the default: 5 s doubling up to an hour, with full jitter.

    Times are seconds; ``exponential``, ``fixed`` and ``from_delays`` take timedeltas and text like ``5m`` too. ``cap``
    None: only the ceiling of 365 days. ``delays`` replace the formula. ``priority`` is the job's from its first failure
    on; None leaves it. Usually made by ``exponential``, ``fixed``, ``from_delays``, ``immediate`` or ``parse``.
    """

    base: float = 5.0
    factor: float = 2.0
    offset: int = -1
    cap: float | None = 3600.0
    delays: tuple[float, ...] = ()
    jitter: str = "full"
    priority: int | None = None

    def __post_init__(self) -> None:
        _number("retry.base", self.base, 0, _MAX_DELAY_SECONDS)
        if _number("retry.factor", self.factor, 0, _MAX_FACTOR) == 0:
            raise Invalid("retry.factor", self.factor, "give more than 0; 1 keeps the delay as it is")
        parse_count(self.offset, "retry.offset", least=-_MAX_OFFSET, most=_MAX_OFFSET, text=False)
        if self.cap is not None and _number("retry.cap", self.cap, 0, _MAX_DELAY_SECONDS) < self.base:
            raise Invalid(
                "retry.cap", self.cap, f"give at least the base, {_format_number(self.base)} seconds, or None"
            )
        _check_delays(self.delays)
        _spread(self.jitter)
        if self.priority is not None:
            check_priority(self.priority, "retry.priority")

    @classmethod
    def exponential(
        cls,
        base: float | timedelta | str = 5,
        factor: float = 2,
        cap: float | timedelta | str | None = 3600,
        *,
        offset: int = -1,
        jitter: str = "full",
        priority: int | None = None,
    ) -> Retry:
        """Returns a policy that grows by ``factor`` from ``base`` to ``cap``. Offset -1: the first is the base."""
        return cls(
            base=_seconds("retry.base", base),
            factor=factor,
            cap=None if cap is None else _seconds("retry.cap", cap),
            offset=offset,
            jitter=jitter,
            priority=priority,
        )

    @classmethod
    def fixed(cls, delay: float | timedelta | str, *, jitter: str = "none", priority: int | None = None) -> Retry:
        """Returns a policy with the same delay each time."""
        return cls.from_delays([delay], jitter=jitter, priority=priority)

    @classmethod
    def from_delays(
        cls, delays: Iterable[float | timedelta | str], *, jitter: str = "none", priority: int | None = None
    ) -> Retry:
        """Returns a policy of listed delays; the last one repeats."""
        seconds = tuple(_seconds("retry.delays", delay) for delay in delays)
        if not seconds:
            raise Invalid("retry.delays", [], "give at least one delay")
        return cls(delays=seconds, jitter=jitter, priority=priority)

    @classmethod
    def immediate(cls, *, priority: int | None = None) -> Retry:
        """Returns a policy without a delay."""
        return cls(base=0, factor=1, offset=0, cap=None, jitter="none", priority=priority)

    @classmethod
    def parse(cls, text: str) -> Retry:
        """Parses a policy as settings and the command line write it.

        ``exponential``, with ``name=value`` after a colon to change single parameters; ``immediate``;
        ``fixed:SECONDS``; or the delays themselves with commas between. Times may be written as ``5m``. Each takes
        ``priority=N``; ``fixed`` and the delays take it, and ``jitter=…``, at the end.
        """
        head, _, tail = _as_text(text).strip().partition(":")
        if head[:1].isdigit():
            return _parse_listed(text.split(","))
        if head == "fixed":
            return _parse_listed(tail.split(","), most=1)
        if head == "immediate":
            return Retry.immediate(**_parse_options(tail, ("priority",)))
        if head != "exponential":
            raise Invalid("retry", text, f"write {_FORMS}{did_you_mean(head, ('exponential', 'immediate', 'fixed'))}")
        return Retry(**_parse_options(tail, _OPTIONS))

    def __str__(self) -> str:
        """Returns the text form that ``parse`` reads."""
        priority = [] if self.priority is None else [f"priority={self.priority}"]
        if self.delays:
            jitter = [] if self.jitter == "none" else [f"jitter={self.jitter}"]
            return ",".join([*map(_format_number, self.delays), *jitter, *priority])
        if self == Retry.immediate(priority=self.priority):
            return ":".join(["immediate", *priority])
        cap = "none" if self.cap is None else _format_number(self.cap)
        formula = f"base={_format_number(self.base)},factor={_format_number(self.factor)},cap={cap}"
        return ",".join([f"exponential:{formula},offset={self.offset},jitter={self.jitter}", *priority])

    def to_builtins(self) -> dict[str, Any]:
        """Returns the stored form: with every field, so that later defaults do not change it. ``priority`` only if
        it is given: workers of earlier versions refuse it."""
        stored = {**msgspec.structs.asdict(self), "delays": list(self.delays)}
        if self.priority is None:
            del stored["priority"]
        return stored

    @classmethod
    def from_builtins(cls, stored: object) -> Retry:
        """Builds a policy from the output of ``to_builtins``; Invalid for a wrong name, type or value."""
        try:
            return msgspec.convert(stored, cls)
        except msgspec.ValidationError as error:
            raise Invalid("retry", stored, f"give a policy as Retry.to_builtins() writes it: {error}") from None

    def delay_after(self, failures: int, rng: random.Random) -> timedelta:
        """Returns the delay after that many failed executions (1 after the first)."""
        nominal = self._nominal(failures)
        low, high, more = _spread(self.jitter)
        least, most = self.delay_bounds(failures)
        jittered = nominal * rng.uniform(low, high) + rng.uniform(0, more)
        # Rounding may exceed a bound by the last digit.
        return min(max(timedelta(seconds=min(jittered, _MAX_DELAY_SECONDS)), least), most)

    def delay_bounds(self, failures: int) -> tuple[timedelta, timedelta]:
        """The shortest and the longest delay that ``delay_after`` can return."""
        nominal = self._nominal(failures)
        low, high, more = _spread(self.jitter)
        return (
            timedelta(seconds=min(nominal * low, _MAX_DELAY_SECONDS)),
            timedelta(seconds=min(nominal * high + more, _MAX_DELAY_SECONDS)),
        )

    def schedule(self, attempts: int) -> list[timedelta]:
        """Returns the delays between that many attempts (one fewer), without jitter."""
        parse_count(attempts, "attempts", least=1, most=_MAX_SCHEDULED_ATTEMPTS, text=False)
        return [timedelta(seconds=self._nominal(failures)) for failures in range(1, attempts)]

    def _nominal(self, failures: int) -> float:
        """Returns seconds before jitter, at most the ceiling."""
        count = min(max(failures, 1), _MAX_EXPONENT)
        if self.delays:
            return self.delays[min(count, len(self.delays)) - 1]
        if self.base == 0:
            return 0.0
        try:
            grown = self.base * self.factor ** (count + self.offset)
        except OverflowError:
            grown = math.inf
        return min(grown, _MAX_DELAY_SECONDS if self.cap is None else self.cap, _MAX_DELAY_SECONDS)


def as_retry(policy: object, field: str = "retry") -> Retry:
    """Returns a policy from a ``Retry`` or from text. Invalid for anything else, with examples as the remedy."""
    if isinstance(policy, Retry):
        return policy
    if isinstance(policy, str):
        return Retry.parse(policy)
    raise Invalid(field, policy, 'give a policy: Retry.fixed(3), or text like "1,5,25"; how often is max_attempts=…')


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise Invalid("retry", value, f"write {_FORMS}")
    return value


def _check_delays(delays: object) -> None:
    if not isinstance(delays, tuple) or len(delays) > _MAX_LISTED_DELAYS:
        raise Invalid("retry.delays", delays, f"give a tuple of at most {_MAX_LISTED_DELAYS} delays")
    for delay in delays:
        _number("retry.delays", delay, 0, _MAX_DELAY_SECONDS)


def _spread(jitter: object) -> tuple[float, float, float]:
    """Returns the effect of a jitter: a factor from ``low`` to ``high``, and up to ``more`` seconds added."""
    mode, *numbers = jitter.split(":") if isinstance(jitter, str) else [""]
    match mode, len(numbers):
        case "none", 0:
            return 1.0, 1.0, 0.0
        case "full", 0:
            return 0.0, 1.0, 0.0
        case "add", 1:
            return 1.0, 1.0, _parse_number("retry.jitter", numbers[0], 0, _MAX_DELAY_SECONDS)
        case "scale", 2:
            low = _parse_number("retry.jitter", numbers[0], 0, _MAX_JITTER_SCALE)
            return low, _parse_number("retry.jitter", numbers[1], low, _MAX_JITTER_SCALE), 0.0
    raise Invalid("retry.jitter", jitter, "write none, full, add:SECONDS or scale:LOW:HIGH")


def _number(field: str, value: object, least: float, most: float) -> float:
    """Validates a number; NaN is out of every range."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        spans = "; exponential(), fixed() and from_delays() take spans" if isinstance(value, str | timedelta) else ""
        raise Invalid(field, value, f"give a number from {least:g} to {_format_number(most)}{spans}")
    return value


def _parse_number(field: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise Invalid(field, text, f"give a number from {least:g} to {_format_number(most)}") from None
    return _number(field, number, least, most)


def _parse_seconds(field: str, text: str) -> float:
    """Parses a number as ``__str__`` writes it (``1e-06``), or a span such as ``5m``."""
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is None:  # not in the clause: its error would be the cause of the next
        return parse_duration(text, field).total_seconds()
    return _number(field, number, 0, _MAX_DELAY_SECONDS)


def _seconds(field: str, delay: float | timedelta | str) -> float:
    return check_span(delay, field).total_seconds()


def _format_number(number: float) -> str:
    """Formats a number exactly, without ``.0`` or, within a policy's range, an exponent."""
    return str(int(number)) if number == int(number) else repr(number)


def _parse_listed(parts: list[str], most: int = _MAX_LISTED_DELAYS) -> Retry:
    delays = [part.strip() for part in parts]
    named = []
    while len(delays) > 1 and delays[-1].startswith(("jitter=", "priority=")):
        named.append(delays.pop())
    if len(delays) > most:
        raise Invalid("retry", ",".join(parts), f"give at most {most} delays")
    options = _parse_options(",".join(named), ("jitter", "priority"))
    return Retry.from_delays([_parse_seconds("retry.delays", delay) for delay in delays], **options)


def _parse_options(text: str, known: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known or name in options:
            hint = f"write name=value, each once, of {', '.join(known)}{did_you_mean(name, known)}"
            raise Invalid("retry", part, hint)
        options[name] = _parse_option(name, value)
    return options


_OPTIONS = ("base", "factor", "cap", "offset", "jitter", "priority")


def _parse_option(name: str, value: str) -> float | int | str | None:
    field = f"retry.{name}"
    if name == "jitter":
        return value
    if name == "priority":
        return parse_count(value, field, least=-100, most=100)
    if name == "factor":
        return _parse_number(field, value, 0, _MAX_FACTOR)
    if name == "offset":
        return parse_count(value, field, least=-_MAX_OFFSET, most=_MAX_OFFSET)
    if name == "cap" and value == "none":
        return None
    return _parse_seconds(field, value)
