"""The limits that apply to a job, their use, and the jobs that hold their room."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.errors import Busy, TooBroad
from holdfast.core.limit_options import format_rate
from holdfast.core.limits import BucketUse, Limit, LimitTable, name_bucket, read_weights, split_bucket, split_partition
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.redaction import REDACTED
from holdfast.core.validation import value_at
from holdfast.stores.base import Store
from holdfast.views.formatting import format_moment, format_span
from holdfast.views.limits import describe_scope, describe_values

_PAGE = 200  # running jobs per page
_MAX_READ = 1000  # running jobs that are read
_MAX_NAMED = 5  # jobs that an explanation names


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a bucket that applies to a job.

    value: of the limit's key. weight: of the job. holders: id and queue of running jobs that occupy the bucket.
    has_more: there may be further holders.
    """

    limit: Limit
    value: str | None
    weight: int
    used: int
    free_at_us: int
    paused: bool = False
    holders: tuple[tuple[str, str], ...] = ()
    has_more: bool = False

    @property
    def is_full(self) -> bool:
        """Returns True if the job waits for the end of a running one."""
        limit_size = self.limit.values.concurrency
        return limit_size is not None and self.used + min(self.weight, limit_size) > limit_size

    @property
    def lacks_tokens(self) -> bool:
        """Returns True if the job may wait for more tokens than a job of weight 1."""
        return self.limit.values.rate is not None and self.weight > 1


async def read_limit_uses(store: Store, job: Job) -> tuple[LimitUse, ...]:
    """Reads the use of the limits that apply to a ready job; empty for a job without limits."""
    limits = await store.limits.read_limits()
    if not limits:
        return ()
    table = LimitTable(limits)
    assigned: tuple[str | None, str | None] = (None, None)
    with suppress(ValueError, RecursionError):  # a payload that another program has corrupted
        assigned = table.find_partition(job.task, job.queue, job.payload)
    partition = job.partition or assigned[0]
    if partition is None:
        return ()
    buckets = split_partition(partition)
    weights = read_weights(assigned[1] if partition == assigned[0] else None, len(buckets))
    weight_of = dict(zip(buckets, weights, strict=True))
    known = table.buckets_with_limits(partition)
    uses = await store.limits.bucket_use([bucket for bucket, _ in known])
    return tuple(
        [
            await _read_use(store, limit, weight_of[bucket], use)
            for (bucket, limit), use in zip(known, uses, strict=True)
        ]
    )


async def _read_use(store: Store, limit: Limit, weight: int, use: BucketUse) -> LimitUse:
    value = split_bucket(use.bucket)[1]
    made = LimitUse(
        limit=limit, value=value, weight=weight, used=use.used, free_at_us=use.free_at_us, paused=use.paused
    )
    if not made.is_full:
        return made
    holders, has_more = await _find_holders(store, limit, use.bucket)
    return msgspec.structs.replace(made, holders=holders, has_more=has_more)


async def _find_holders(store: Store, limit: Limit, bucket: str) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Returns some running jobs of a bucket, and True if there may be more."""
    tasks = () if limit.task is None else (limit.task,)
    where = JobFilter(states=(JobState.RUNNING,), queue=limit.queue, tasks=tasks)
    found: list[tuple[str, str]] = []
    cursor = None
    with suppress(TooBroad, Busy):
        for _ in range(0, _MAX_READ, _PAGE):
            page = await store.query.find(where, limit=_PAGE, cursor=cursor)
            running = [job for job in page.jobs if job.partition is not None]
            found += [(job.id, job.queue) for job in running if bucket in split_partition(job.partition or "")]
            cursor = page.cursor
            if cursor is None:
                return tuple(found[:_MAX_NAMED]), len(found) > _MAX_NAMED
            if len(found) > _MAX_NAMED:
                break
    return tuple(found[:_MAX_NAMED]), True


def explain_use(job: Job, use: LimitUse, now_us: int, *, redacted: bool) -> Iterator[tuple[str, str]]:
    """Yields the ways in which a limit holds back a ready job, with remedies. ``job`` is redacted.

    ``redacted``: the reader may not see other queues.
    """
    limit = use.limit
    named = f"limit {limit.name} of {describe_scope(limit)}"
    if use.value is not None:
        named += f", for {limit.by} = {shown_value(job, use)}"
    change = f"holdfast limit set {limit.name}"
    if use.is_full:
        text = f"{named}, has no room: {_describe_holders(job, use, redacted=redacted)}"
        yield text, f"it starts when enough of it is free; or now: {change} --concurrency {use.used + use.weight}"
    if use.free_at_us > now_us:
        wait = format_span(timedelta(microseconds=use.free_at_us - now_us))
        until = f"until {format_moment(use.free_at_us)}, in {wait}"
        if use.paused:
            value = "" if use.value is None else f" {shlex.quote(shown_value(job, use))}"
            by = "by an operator or a handler's RetryAfter"
            yield (
                f"{named}, is paused {until}, {by}",
                f"it goes on then; or now: holdfast limit resume {limit.name}{value}",
            )
        else:
            rate = format_rate(limit.values)
            text = f"{named}, has no token {until}: it lets {rate} start (burst {limit.values.burst:,})"
            yield text, f"to let more start: {change} --rate …"
    elif use.lacks_tokens and not use.is_full:
        values = describe_values(limit.values)
        text = f"{named}, may have fewer than the {use.weight:,} tokens that the job takes: {values}"
        yield text, f"it starts when they have come; to let more start: {change} --rate …"


def _describe_holders(job: Job, use: LimitUse, *, redacted: bool) -> str:
    if redacted and use.limit.queue is None:
        return "jobs of its task hold it"  # some may be of other queues
    limit_size = use.limit.values.concurrency or 0
    takes = f", and it takes {min(use.weight, limit_size):,}" if use.weight > 1 else ""
    jobs = ", ".join(holder for holder, queue in use.holders if not redacted or queue == job.queue)
    others = (" and others" if jobs else "jobs") if use.has_more else ""
    held = f", held by {jobs}{others}" if jobs or others else ""
    return f"{use.used:,} of {limit_size:,} in use{held}{takes}"


def shown_value(job: Job, use: LimitUse) -> str:
    """Returns the value of a limit's key in a redacted job; hidden if its field is."""
    payload: Any = None
    with suppress(ValueError, RecursionError):
        payload = json.loads(job.payload)
    if not isinstance(payload, Mapping) or use.limit.by is None:
        return REDACTED
    value = split_bucket(name_bucket(use.limit, value_at(payload, use.limit.by)))[1]
    return REDACTED if value is None or value != use.value else value
