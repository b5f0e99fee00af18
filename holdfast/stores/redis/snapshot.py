"""Snapshot of a namespace's keys, and steps of a repair."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from holdfast.core.dependencies import NEVER_US
from holdfast.stores.connections.redis_protocol import Argument

FIELDS = (
    *("state", "spec", "dueTime", "seq", "lost_leases", "key", "endTime", "expiresAt", "pickupTime", "partition"),
    *("waits", "waitNumber", "hasDependents", "members", "failed", "submitting"),
)
"""Fields that are read of a job's hash."""

_SPEC = re.compile(rb"(-?\d+) \S+ (.*?)\n")
_LIMITED = re.compile(rb"\n.*\n\Z", re.DOTALL)
_STATES = frozenset(b"queued scheduled running failed waiting succeeded dead cancelled".split())
_TYPES = {
    b"hash": (
        *(b"counts", b"keys", b"tombstones", b"meta", b"schedules"),
        *(b"limits", b"virtual", b"used", b"unstarted", b"buckets", b"signals"),
    ),
    b"zset": (
        *(b"chunks", b"queues", b"due", b"outlived", b"expiry", b"workers", b"ended:dead", b"ended:cancelled"),
        *(b"failures", b"ticks", b"partitioned_queues", b"refills"),
        *(b"kept:succeeded", b"kept:dead", b"kept:cancelled", b"signals_kept", b"signals_sent"),
    ),
    b"list": (b"ended:succeeded",),
    b"set": (b"paused", b"queues_with_limits"),
    b"string": (b"seq", b"changes", b"history_mark"),
}
_TYPES_OF_MANY = {
    b"priorities:": b"zset",
    b"quarantine:": b"zset",
    **dict.fromkeys((b"partition:", b"start_tags:", b"throttled:", b"full:", b"idle_start_tags:"), b"zset"),
    b"index:": b"hash",
    b"attempts:": b"list",
    b"lines:": b"stream",
    b"steps:": b"hash",
    b"history:": b"hash",
    **dict.fromkeys((b"dependencies:", b"receiver:"), b"hash"),
    **dict.fromkeys((b"dependents:", b"receivers:", b"signals_kept:"), b"zset"),
}
OWN_NAMES = frozenset(
    name.decode().partition(":")[0] for name in (*chain(*_TYPES.values()), *_TYPES_OF_MANY, b"worker:", b"done:")
)
"""The names of keys that cannot be chosen, without what follows a colon."""


class NamespaceKeys:
    """Names and types of a namespace's keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.prefix, self.schedule, self.ready, self.leases, self.job = (key.encode() for key in keys)
        self._types = {self.prefix + name: kind for kind, names in _TYPES.items() for name in names}
        self._types[self.leases] = b"zset"

    def __call__(self, name: str) -> bytes:
        """The whole name of a key of ours."""
        return self.prefix + name.encode()

    def type_of(self, key: bytes) -> bytes | None:
        """Of what type a key must be; None for a foreign one."""
        if b":foreign:" in key:
            return None
        if key in self._types:
            return self._types[key]
        for name, kind in _TYPES_OF_MANY.items():
            if key.startswith(self.prefix + name):
                return kind
        if self.is_schedule(key):
            return b"zset"
        if self.is_ready_list(key):
            return b"list"
        return b"hash" if key.startswith(self.job) else None

    def is_schedule(self, key: bytes) -> bool:
        """Returns True if it is the schedule of some queue."""
        return key == self.schedule or key.startswith(self.schedule + b":")

    def is_ready_list(self, key: bytes) -> bool:
        """Returns True if it is a ready list of some queue and priority."""
        return key == self.ready or key.startswith((self.ready + b":", self.ready + b"@"))

    def schedule_of(self, queue: bytes) -> bytes:
        """The queue's schedule."""
        return self.schedule if queue == b"default" else self.schedule + b":" + queue

    def ready_of(self, queue: bytes, priority: int) -> bytes:
        """The queue's ready list of one priority."""
        key = self.ready if priority == 0 else self.ready + b"@%d" % priority
        return key if queue == b"default" else key + b":" + queue

    def tombstone_key(self, key: bytes, job: bytes) -> bytes:
        """Returns the key of a tombstone: an id in a ready list whose job does not belong there."""
        return key.removeprefix(self.ready) + b" " + job


class IndexedJob(NamedTuple):
    """Index-related fields of a job's hash."""

    state: bytes
    queue: bytes
    priority: int
    run_at: int
    seq: int
    lost_leases: int
    key: bytes | None
    ended: int
    partition: bytes | None = None
    weights: bytes | None = None
    expires: int | None = None
    """When it ends, of one that no worker has taken."""
    waits: int = 0
    wait_number: bytes = b"0"
    has_dependents: bool = False
    has_started: bool = False
    members: int | None = None
    """Of a batch."""
    failed: int = 0
    is_submitting: bool = False

    @property
    def is_scheduled(self) -> bool:
        """Returns True if it stands in the schedule of its queue."""
        return self.state in (b"scheduled", b"failed") or (self.state == b"waiting" and self.run_at < NEVER_US)

    @property
    def stands_in(self) -> bytes | None:
        """The partition in which it is ready; None for a job that is not, or under no limit."""
        return self.partition if self.state == b"queued" and self.lost_leases < 2 else None

    @classmethod
    def from_hash(cls, fields: Sequence[bytes | None]) -> IndexedJob | None:
        """From FIELDS. None for a hash without a state: not ours. ValueError for values that make no sense."""
        state, spec, run_at, seq, lost_leases, key, ended, expires, started, buckets, *wait_fields = fields
        if state is None:
            return None
        match = _SPEC.match(spec or b"")
        if state not in _STATES or match is None:
            raise ValueError(state)
        priority, queue = int(match[1]), match[2]
        numbers = int(run_at or 0), int(seq or 0), int(lost_leases or 0)
        is_limited = buckets is not None and spec is not None and _LIMITED.search(spec)
        partition, _, weights = buckets.partition(b"\n") if buckets is not None and is_limited else (None, b"", b"")
        instant = int(expires) if expires is not None and started is None else None
        waits, wait_number, has_dependents, members, failed, submitting = wait_fields
        indexed = cls(state, queue, priority, *numbers, key, int(ended or 0), partition, weights or None, instant)
        return indexed._replace(
            waits=int(waits or 0),
            wait_number=wait_number or b"0",
            has_dependents=has_dependents is not None,
            has_started=started is not None,
            members=None if members is None else int(members),
            failed=int(failed or 0),
            is_submitting=submitting is not None,
        )


class NamespaceSnapshot(NamedTuple):
    """All that is there, at one instant."""

    names: NamespaceKeys
    now: int
    jobs: Mapping[bytes, IndexedJob | None]
    """By id; None for an unclaimed hash written by hand."""
    corrupt: Sequence[bytes]
    """Keys of another type than they must be, and jobs that make no sense."""
    keys: frozenset[bytes]
    lists: Mapping[bytes, Sequence[bytes]]
    zsets: Mapping[bytes, Mapping[bytes, int]]
    hashes: Mapping[bytes, Mapping[bytes, bytes]]
    sets: Mapping[bytes, frozenset[bytes]]


class RepairStep(NamedTuple):
    """A command, and its purpose."""

    what: str
    command: tuple[Argument, ...]


BACK = "jobs put back where they belong"
OUT = "ids dropped that stood for no job, or where their job is not"
ASIDE = "keys that make no sense moved to …:foreign:…"
COUNTED = "counts corrected"
INDEXED = "places in the index corrected"
KEYED = "idempotency keys corrected"
WAITS_CORRECTED = "waits for other jobs and signals corrected"
FORGOTTEN = "remains of jobs that are gone removed"
