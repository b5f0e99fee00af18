"""Text for people: safe to print, short, the same in the CLI and the HTTP API; and filters given as text."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import msgspec

from holdfast.app import Holdfast
from holdfast.core.error_groups import check_error_group
from holdfast.core.errors import Invalid
from holdfast.core.models import JobFilter, JobState, to_datetime
from holdfast.core.validation import check_name, check_tag, check_task_name, parse_duration, parse_instant

# Characters that move the cursor, colour, reorder or hide text; a payload must not do that to its reader.
_ABOVE_ASCII = "\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
UNSAFE = re.compile(f"[\x00-\x1f{_ABOVE_ASCII}]")
_UNSAFE_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_ABOVE_ASCII}]")
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def safe_text(text: object, *, lines: bool = False) -> str:
    """Escapes control, bidirectional and invisible characters; ``lines`` keeps line ends and tabs."""
    return (_UNSAFE_IN_LINES if lines else UNSAFE).sub(_escape_found, str(text))


def _escape_found(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _NAMES.get(found[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def clip_text(text: str, limit: int = 120) -> str:
    """Returns the first line of ``text``, escaped, at most ``limit`` characters."""
    first = safe_text(text.strip().split("\n", 1)[0])
    return first if len(first) <= limit else first[: limit - 1] + "…"


def format_timestamp(us: int) -> str:
    """Formats microseconds since 1970 as RFC 3339 in UTC."""
    return to_datetime(us).isoformat(timespec="microseconds").replace("+00:00", "Z")


def format_moment(us: int | None) -> str:
    """Formats an instant for people: to the second; ``-`` for none."""
    return "-" if us is None else to_datetime(us).strftime("%Y-%m-%d %H:%M:%SZ")


def format_decimal(number: float) -> str:
    """Formats a number for people: three digits; from 100 on whole, with thousands separators."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def format_span(length: timedelta | float) -> str:
    """Formats a span for people: its two largest units."""
    seconds = length.total_seconds() if isinstance(length, timedelta) else length
    if abs(seconds) < 10:
        return f"{seconds:.3g}s"
    sign, left = ("-" if seconds < 0 else ""), round(abs(seconds))
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return sign + " ".join(parts[:2])


def format_memory(size: int | None) -> str:
    """Formats an amount of memory for people: whole mebibytes; ``-`` if it is not known."""
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"


def count_noun(number: int, thing: str) -> str:
    """Returns ``1 job``, ``2 jobs``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """The filter options of a call, as text."""

    state: tuple[str, ...] = ()
    queue: str | None = None
    task: tuple[str, ...] = ()
    tag: str | None = None
    reason: str | None = None
    worker: str | None = None
    error: str | None = None
    error_group: str | None = None
    since: str | None = None
    until: str | None = None
    not_started_after: str | None = None

    @property
    def given(self) -> bool:
        """Returns True if any option was given."""
        return self != Filters()

    async def build_filter(self, app: Holdfast, states: tuple[JobState, ...] = ()) -> JobFilter:
        """Returns the filter; ``states``: the default for ``--state``. Invalid names the option that is wrong."""
        after, before = await _instant(app, "since", self.since), await _instant(app, "until", self.until)
        if after is not None and before is not None and after >= before:
            raise Invalid("since", self.since, f"until is {self.until!r}: give an earlier since", "is not before until")
        return JobFilter(
            states=tuple(JobState(name) for name in self.state) or states,
            queue=None if self.queue is None else check_name("queue", self.queue),
            tasks=tuple(check_task_name(name) for name in self.task),
            tag=None if self.tag is None else check_tag(self.tag),
            reason=self.reason,
            worker=self.worker,
            error=self.error,
            error_group=None if self.error_group is None else check_error_group(self.error_group),
            created_after=after,
            created_before=before,
            not_started_after=await _instant(app, "not_started_after", self.not_started_after),
        )


async def _instant(app: Holdfast, field: str, text: str | None) -> datetime | None:
    """Parses an instant or an age, by the store's clock, which dates the jobs."""
    if text is None:
        return None
    if re.match(r"\d{4}-", text):
        return parse_instant(text, field)
    try:
        return to_datetime(await (await app.open_store()).health.server_time_us()) - parse_duration(text, field)
    except Invalid:
        raise Invalid(field, text, 'give how long ago ("2h", "7d") or an instant ("2030-01-31T08:00:00Z")') from None
