"""Limits: how many jobs may run at once, how often they may start, and which start next. The time is the store's.

A *limit* applies to jobs of a queue or of a task. It has one *bucket*, or one for each value of a key in the payload.
A *partition* is the jobs of a queue that pass through the same buckets. A claim admits a job if each of its buckets has
room. The partitions of a queue are served by start-time fair queueing, so a blocked one delays no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.core.models import Job, NewJob
from holdfast.core.validation import decode_stored, value_at

MAX_LIMITS = 1000
"""Limits of one store."""
MAX_CONCURRENCY = 1_000_000
MAX_DEPTH = 1_000_000
MAX_RATE = 100_000
"""Starts a second."""
MAX_WEIGHT = 10_000
MAX_SHARE = 1000
START_TAG_STEP = 1_000_000
"""By how much each start raises the start tag of a partition, divided by its share."""
MAX_KEPT_START_TAGS = 20
"""Partitions that lack tokens of a key for a heavy job and keep their start tags; others are throttled."""
SEPARATOR = "\x1f"
"""Between the buckets of a partition."""
KEEPS_START_TAG = 0
"""Answer of ``Admission.admit``: the partition keeps its start tag; a bucket has no room, or is reserved."""
_Count = Annotated[int, Meta(ge=1, le=1 << 62)]
_MAX_VALUE = 64  # characters of a key's value in a bucket's name; a longer one is hashed


class LimitValues(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers of a limit; they may change while everything runs.

    concurrency: jobs that may run at once. rate, period_us: starts in a period; ``burst`` of them may come at once.
    weight: the room and tokens a job takes: a number, or a path in the payload, like "args.pages".
    shares: relative number of starts by value of the key; 1 where it has none.
    depth: jobs that may wait; submissions beyond it are refused.
    """

    concurrency: _Count | None = None
    rate: _Count | None = None
    period_us: _Count = 1_000_000
    burst: _Count = 1
    weight: _Count | str = 1
    shares: dict[str, Annotated[int, Meta(ge=1, le=MAX_SHARE)]] = {}
    depth: _Count | None = None

    @property
    def fill_time_us(self) -> int | None:
        """Microseconds in which an empty bucket fills; None for a limit without a rate."""
        return None if self.interval_us is None else self.burst * self.interval_us

    @property
    def interval_us(self) -> int | None:
        """Microseconds between two tokens; None for a limit without a rate."""
        return None if self.rate is None else -(-self.period_us // self.rate)


class Limit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named limit. ``queue`` or ``task`` says which jobs it applies to; neither: handlers take tokens from it.

    by: a path in the payload, like "args.tenant": each value has a bucket of its own.
    owner: the application whose code declares it; None: an operator made it.
    declared: the values of the code, while values of an operator are in force instead.
    unassigned: queues and tasks, a pair each, whose jobs may not have the partitions of a new limit yet.
    revision grows with each write; a store sets it.
    """

    name: str
    queue: str | None = None
    task: str | None = None
    by: str | None = None
    values: LimitValues = LimitValues()
    owner: str | None = None
    declared: LimitValues | None = None
    unassigned: tuple[tuple[str | None, str | None], ...] = ()
    revision: int = 0

    @property
    def has_buckets(self) -> bool:
        """Returns True if jobs pass through its buckets: not if it only bounds the depth of its queue."""
        values = self.values
        return self.by is not None or values.concurrency is not None or values.rate is not None or self.is_counted

    @property
    def is_counted(self) -> bool:
        """Returns True if its depth bounds the jobs of a bucket, not of a queue."""
        return self.values.depth is not None and (self.by is not None or self.task is not None)


def token_change(old: Limit | None, new: Limit) -> dict[str, int] | None:
    """Parameters of ``clamp_buckets`` for a changed limit; None for one without a rate."""
    fill_time, interval = new.values.fill_time_us, new.values.interval_us
    if fill_time is None or interval is None:
        return None
    before = new.values if old is None or old.values.rate is None else old.values
    return {
        "fill_time": fill_time,
        "interval": interval,
        "old_fill_time": before.fill_time_us or fill_time,
        "old_interval": before.interval_us or interval,
    }


class LimitChange(msgspec.Struct, frozen=True):
    """A write of one limit. ``expected``: the revision it replaces; 0: there is none yet; -1: any."""

    limit: Limit
    expected: int
    remove: bool = False


class Assigned(NamedTuple):
    """Result of one step that gives jobs their partitions.

    changed: jobs with another partition now. after: the id to go on behind; None: those were all. left: jobs that other
    writers held, and that have their partitions as before.
    """

    changed: int
    after: str | None
    left: int = 0


class BucketState(msgspec.Struct, frozen=True):
    """State of a bucket in a store, beside the jobs that run: its tokens, and whether it is paused.

    full_at_us: the instant at which all tokens are back (GCRA's theoretical arrival time, TAT).
    """

    full_at_us: int = 0
    paused_until_us: int = 0


_FRESH_BUCKET = BucketState()


class BucketUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a bucket.

    used: running weight. free_at_us: when a job of weight 1 may start; 0: now. paused: what it waits for is a pause.
    """

    bucket: str
    used: int
    free_at_us: int
    paused: bool = False


def encode_limit(limit: Limit) -> str:
    """A limit as a store keeps it, without its revision."""
    return msgspec.json.encode(msgspec.structs.replace(limit, revision=0)).decode()


_decode = msgspec.json.Decoder(Limit).decode


def decode_limits(rows: Iterable[Sequence[Any]]) -> list[Limit]:
    """Limits of documents and revisions, but for spoiled ones: see ``decode_stored``."""
    return decode_stored("limit", _decode, rows)


class LimitTable:
    """The limits of a store, by the jobs they apply to."""

    def __init__(self, limits: Iterable[Limit] = ()) -> None:
        self.limits = {limit.name: limit for limit in limits}
        self._queues: dict[str, list[Limit]] = {}
        self._tasks: dict[str, list[Limit]] = {}
        self._has_shares = any(limit.values.shares for limit in self.limits.values())
        self.depths: dict[str, int] = {}
        """Jobs that may wait, by queue."""
        self.has_depths = any(limit.values.depth is not None for limit in self.limits.values())
        for limit in self.limits.values():
            if limit.queue is not None and limit.values.depth is not None and not limit.is_counted:
                self.depths[limit.queue] = min(limit.values.depth, self.depths.get(limit.queue, limit.values.depth))
            by_name, name = (self._tasks, limit.task) if limit.queue is None else (self._queues, limit.queue)
            if limit.has_buckets and name is not None:
                by_name.setdefault(name, []).append(limit)

    @property
    def has_tasks(self) -> bool:
        """Returns True if a limit of a task has buckets."""
        return bool(self._tasks)

    def share_of(self, partition: str) -> int:
        """Returns the share of a partition: that of its first bucket with one."""
        for bucket in split_partition(partition) if self._has_shares else ():
            name, value = split_bucket(bucket)
            limit = self.limits.get(name)
            if limit is not None and value is not None and value in limit.values.shares:
                return limit.values.shares[value]
        return 1

    def buckets_with_limits(self, partition: str) -> list[tuple[str, Limit]]:
        """The buckets of a partition with their limits; buckets whose limit is gone are left out."""
        named = [(bucket, self.limits.get(split_bucket(bucket)[0])) for bucket in split_partition(partition)]
        return [(bucket, limit) for bucket, limit in named if limit is not None]

    @property
    def queues(self) -> Set[str]:
        """Queues with a limit of their own: each of their jobs has a partition."""
        return self._queues.keys()

    def bind(self, jobs: Sequence[NewJob]) -> Sequence[NewJob]:
        """Returns the jobs, with partitions where they are under limits."""
        if not self._queues and not self._tasks:
            return jobs
        return [self._bind(job) for job in jobs]

    def _bind(self, job: NewJob) -> NewJob:
        partition, weights = self.find_partition(job.task, job.queue, job.payload)
        if partition is None:
            return job
        return msgspec.structs.replace(job, partition=partition, weights=weights)

    def find_partition(self, task: str, queue: str, payload: str) -> tuple[str | None, str | None]:
        """Returns the partition of a job, and the weights it has in its buckets as JSON; None where all are 1.

        The partition is None for a job under no limit. It begins with the buckets in which stores count unstarted jobs:
        they look in the first two places.
        """
        limits = [*self._queues.get(queue, ()), *self._tasks.get(task, ())]
        if not limits:
            return None, None
        arguments = None
        if any(limit.by is not None or isinstance(limit.values.weight, str) for limit in limits):
            arguments = json.loads(payload)  # unlike msgspec, keeps integers exact and lone surrogates apart
        buckets = sorted(
            (not limit.is_counted, _bucket_of(limit, arguments), _weight_of(limit, arguments)) for limit in limits
        )
        weights = [weight for *_, weight in buckets]
        partition = SEPARATOR.join(bucket for _, bucket, _ in buckets)
        return partition, None if all(weight == 1 for weight in weights) else json.dumps(weights)

    def find_depths(self, job: NewJob, as_stored: Callable[[NewJob], str]) -> Iterator[tuple[str, int]]:
        """Yields "queue NAME" or buckets, by its stored payload, that bound a job, and how many jobs may wait there."""
        if job.queue in self.depths:
            yield f"queue {job.queue}", self.depths[job.queue]
        limits = [*self._queues.get(job.queue, ()), *self._tasks.get(job.task, ())]
        counted = [(limit, limit.values.depth) for limit in limits if limit.is_counted]
        arguments = json.loads(as_stored(job)) if any(limit.by for limit, _ in counted) else None
        yield from ((_bucket_of(limit, arguments), depth) for limit, depth in counted if depth is not None)

    def use_by_jobs(self, jobs: Iterable[Job]) -> dict[str, int]:
        """Use of each bucket by these running jobs, by the weights that the limits say now."""
        return use_of_running([(job.partition, self._weights(job), 1) for job in jobs if job.partition is not None])

    def _weights(self, job: Job) -> str | None:
        limits = [limit for _, limit in self.buckets_with_limits(job.partition or "")]
        if all(limit.values.weight == 1 for limit in limits):
            return None
        partition, weights = self.find_partition(job.task, job.queue, job.payload)
        return weights if partition == job.partition else None


def split_partition(partition: str) -> list[str]:
    """The buckets of a partition."""
    return partition.split(SEPARATOR)


def name_bucket(limit: Limit, value: Any = None) -> str:
    """The bucket of a limit; for one with ``by``, that of a value of the key."""
    if limit.by is None:
        return limit.name
    return f"{limit.name}={_value_text(value)}"


def split_bucket(bucket: str) -> tuple[str, str | None]:
    """The name of a bucket's limit, and the value of its key; None for a limit without one."""
    name, separator, value = bucket.partition("=")
    return name, value if separator else None


class _Demand(NamedTuple):
    """A job in a bucket. ``free_at``: when tokens and pauses let it start; ``free_for_one_at``: one of weight 1.

    ``lacks_slots``: fewer slots are free than its weight; ``is_full``: none is. ``state_after``: once it has started.
    """

    bucket: str
    weight: int
    free_at: int = 0
    free_for_one_at: int = 0
    lacks_slots: bool = False
    is_full: bool = False
    state_after: BucketState | None = None

    @property
    def is_keyed(self) -> bool:
        return "=" in self.bucket


class Admission:
    """Decides which jobs may start now: counts running jobs, takes tokens, says when a bucket has room again.

    A job that does not fit only because it weighs more than 1 reserves its weight: later jobs of the claim leave it.
    """

    def __init__(
        self, limits: Mapping[str, Limit], used: dict[str, int], states: dict[str, BucketState], now_us: int
    ) -> None:
        self._limits = limits
        self._used = used
        self._now_us = now_us
        self._states = states
        self._reserved: dict[str, int] = {}
        self._kept_start_tags = 0
        self.due_us: int | None = None
        """When the first heavy job of a partition that keeps its start tag has its tokens."""
        self.changed: set[str] = set()
        """Buckets whose state ``admit`` changed."""
        self.closed: set[str] = set()
        """Buckets without a key that admit no job any more."""

    def admit(self, partition: str, weights: str | None = None, *, reserves: bool = True) -> int | None:
        """Takes room and tokens for one job of a partition, and returns None; or takes nothing, and returns the instant
        at which the partition may have room, or ``KEEPS_START_TAG``.
        """
        buckets = split_partition(partition)
        if weights is None and not self._states and not self._reserved and self._take_one_slot_each(buckets):
            return None
        demands = [self._read_demand(*each) for each in zip(buckets, read_weights(weights, len(buckets)), strict=True)]
        free_at = max(each.free_at for each in demands)
        if free_at > self._now_us or any(each.lacks_slots for each in demands):
            free_for_one_at = max(each.free_for_one_at for each in demands)
            self.closed.update(
                each.bucket
                for each in demands
                if not each.is_keyed and (each.is_full or each.free_for_one_at > self._now_us)
            )
            if reserves and free_for_one_at <= self._now_us and not any(each.is_full for each in demands):
                self._reserve(demands)
            if free_at <= self._now_us:
                return KEEPS_START_TAG
            if len(buckets) == 1 or not reserves:  # no other partition of its queue shares its bucket
                return free_at
            return free_for_one_at if free_for_one_at > self._now_us else self._keep_start_tag(demands, free_at)
        for bucket, weight, *_, state_after in demands:
            self._used[bucket] = self._used.get(bucket, 0) + weight
            if state_after is not None:
                self._states[bucket] = state_after
                self.changed.add(bucket)
        return None

    def _take_one_slot_each(self, buckets: Sequence[str]) -> bool:
        """Takes room for a job of weight 1 where all buckets have some and none gives tokens, as most often."""
        used = self._used
        for bucket in buckets:
            limit = self._limits.get(split_bucket(bucket)[0])
            if limit is None:
                continue
            most = limit.values.concurrency
            if limit.values.rate is not None or (most is not None and used.get(bucket, 0) >= most):
                return False
        for bucket in buckets:
            used[bucket] = used.get(bucket, 0) + 1
        return True

    def _read_demand(self, bucket: str, weight: int) -> _Demand:
        now, state = self._now_us, self._states.get(bucket, _FRESH_BUCKET)
        free_at = free_for_one_at = state.paused_until_us
        limit, reserved = self._limits.get(split_bucket(bucket)[0]), self._reserved.get(bucket, 0)
        if limit is None:
            return _Demand(bucket, weight, free_at, free_for_one_at)
        values, free_slots, state_after = limit.values, MAX_WEIGHT, None
        if values.concurrency is not None:
            free_slots = values.concurrency - self._used.get(bucket, 0) - reserved
        if values.rate is not None:
            full_at = max(state.full_at_us, now) + min(reserved, values.burst) * (values.interval_us or 0)
            free_at = max(free_at, compute_token_times(values, full_at, weight, now)[1])
            free_for_one_at = max(free_for_one_at, compute_token_times(values, full_at, 1, now)[1])
            state_after = BucketState(
                compute_token_times(values, state.full_at_us, weight, now)[0], state.paused_until_us
            )
        return _Demand(
            bucket,
            weight,
            free_at,
            free_for_one_at,
            free_slots < min(weight, values.concurrency or 1),
            free_slots < 1,
            state_after,
        )

    def _reserve(self, demands: Sequence[_Demand]) -> None:
        """Reserves the job's weight: in the buckets of its keys until it fits them, then in all of them."""
        of_keys = any(each.is_keyed and (each.lacks_slots or each.free_at > self._now_us) for each in demands)
        for each in demands:
            if each.weight > 1 and (each.is_keyed or not of_keys):
                self._reserved[each.bucket] = self._reserved.get(each.bucket, 0) + each.weight

    def _keep_start_tag(self, demands: Sequence[_Demand], free_at: int) -> int:
        """Keeps the start tag of a partition that lacks tokens; if they are of a key, only of a few partitions."""
        self._kept_start_tags += any(each.is_keyed and each.free_at > self._now_us for each in demands)
        if self._kept_start_tags > MAX_KEPT_START_TAGS:
            return free_at
        self.due_us = free_at if self.due_us is None else min(self.due_us, free_at)
        return KEEPS_START_TAG


def compute_token_times(values: LimitValues, full_at_us: int, tokens: int, now_us: int) -> tuple[int, int]:
    """Returns when all tokens will be back after these are taken, and the earliest instant at which they can be."""
    interval = values.interval_us or 0
    tokens = min(tokens, values.burst)  # more than it ever holds: all of them
    full_at = max(full_at_us, now_us) + tokens * interval
    return full_at, full_at - values.burst * interval


_decode_weights = msgspec.json.Decoder(list[Annotated[int, Meta(ge=1)]]).decode


def read_weights(text: str | None, number: int) -> list[int]:
    """A job's weight in each of its buckets; 1 where another program spoiled the text."""
    if text is not None:
        with suppress(msgspec.DecodeError):
            weights = _decode_weights(text)
            if len(weights) == number:
                return weights
    return [1] * number


def bucket_use(bucket: str, limit: Limit | None, used: int, state: BucketState, now_us: int) -> BucketUse:
    """Use of a bucket, from the weight of its running jobs and its state."""
    has_token_at = now_us
    if limit is not None and limit.values.rate is not None:
        _, has_token_at = compute_token_times(limit.values, state.full_at_us, 1, now_us)
    free_at = max(has_token_at, state.paused_until_us)
    paused = free_at > max(now_us, has_token_at)
    return BucketUse(bucket=bucket, used=used, free_at_us=free_at if free_at > now_us else 0, paused=paused)


def use_of_running(rows: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Use of each bucket: from partition, weights and number of the running jobs."""
    used: dict[str, int] = {}
    for partition, weights, number in rows:
        buckets = split_partition(partition)
        for bucket, weight in zip(buckets, read_weights(weights, len(buckets)), strict=True):
            used[bucket] = used.get(bucket, 0) + number * weight
    return used


def _bucket_of(limit: Limit, arguments: Any) -> str:
    return name_bucket(limit, None if limit.by is None else value_at(arguments, limit.by))


def _weight_of(limit: Limit, arguments: Any) -> int:
    """The weight of a job; 1 where the payload has no whole number from 1 at that place."""
    weight = limit.values.weight
    if isinstance(weight, str):
        weight = value_at(arguments, weight)
        if not isinstance(weight, int) or isinstance(weight, bool) or weight < 1:
            return 1
    return min(weight, MAX_WEIGHT)


def parse_value(value: Any) -> Any:
    """Returns the value of a key that an operator names: null is a missing one, a JSON string its content."""
    if isinstance(value, str) and (value == "null" or value.startswith('"')):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _value_text(value: Any) -> str:
    """Text of a value in the name of its bucket. 1 and "1" have one text; the string "null" is quoted."""
    is_bare_text = isinstance(value, str) and value != "null" and not value.startswith('"')
    text = value if is_bare_text else json.dumps(value, sort_keys=True, separators=(",", ":"))
    if len(text) <= _MAX_VALUE and text.isprintable():
        return text
    digest = hashlib.sha256(json.dumps(text).encode()).hexdigest()[:24]
    shown = "".join(each for each in text[: _MAX_VALUE - 25] if each.isprintable() and each != "#")
    return f"{shown}#{digest}"
