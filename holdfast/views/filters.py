"""Which jobs: filters as people give them."""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import Invalid
from holdfast.core.models import JobFilter, JobState, to_datetime
from holdfast.core.validation import check_name, check_tag, check_task_name, parse_duration, parse_instant


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """The filter options of one call, as given."""

    state: tuple[str, ...] = ()
    queue: str | None = None
    task: tuple[str, ...] = ()
    tag: str | None = None
    reason: str | None = None
    worker: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None

    @property
    def given(self) -> bool:
        """Returns True if any was given."""
        return self != Filters()

    async def build_filter(self, app: Holdfast, states: tuple[JobState, ...] = ()) -> JobFilter:
        """The filter; ``states`` where no ``--state`` was given. Invalid names the option that is wrong."""
        return JobFilter(
            states=tuple(JobState(name) for name in self.state) or states,
            queue=None if self.queue is None else check_name("queue", self.queue),
            tasks=tuple(check_task_name(name) for name in self.task),
            tag=None if self.tag is None else check_tag(self.tag),
            reason=self.reason,
            worker=self.worker,
            error=self.error,
            created_after=await _instant(app, "since", self.since),
            created_before=await _instant(app, "until", self.until),
        )


async def _instant(app: Holdfast, field: str, text: str | None) -> datetime | None:
    """An instant, or how long ago; by the store's clock, which is the one the jobs were dated with."""
    if text is None:
        return None
    if re.match(r"\d{4}-", text):
        return parse_instant(text, field)
    try:
        return to_datetime(await (await app.open_store()).health.server_time_us()) - parse_duration(text, field)
    except Invalid:
        raise Invalid(field, text, 'give how long ago ("2h", "7d") or an instant ("2030-01-31T08:00:00Z")') from None
