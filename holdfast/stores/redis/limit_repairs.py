"""Repair steps for the keys of limits: partitions, start tags, used slots, buckets."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from holdfast.core.limits import Limit, use_of_running
from holdfast.core.models import NOT_STARTED
from holdfast.stores.redis.snapshot import BACK, COUNTED, OUT, IndexedJob, NamespaceSnapshot, RepairStep

SEPARATOR = b"\x1f"
_PARTITION_SETS = ("start_tags:", "throttled:", "full:")
_MAX_PRIORITY = 1_000_000
_LATEST, _SUBMISSIONS = (1 << 52) - 1, 1 << 36
_STATE = re.compile(rb"(\d{1,16}) (\d{1,16})(?: \d{1,16} \d{1,7})?")
_decode = msgspec.json.Decoder(Limit).decode


def plan_limit_repairs(seen: NamespaceSnapshot, jobs: Mapping[bytes, IndexedJob]) -> Iterator[RepairStep]:
    """Returns the steps that make the keys of limits agree with the jobs."""
    audit = _LimitAudit(seen, jobs)
    yield from audit.check_partitions()
    yield from audit.check_start_tags()
    yield from audit.check_used()
    yield from audit.check_buckets()
    yield from audit.check_queues_with_limits()


def member_of(job: bytes, indexed: IndexedJob) -> bytes:
    """A ready job in the sorted set of its partition, as the scripts write it."""
    rank = _MAX_PRIORITY - max(-_MAX_PRIORITY, min(_MAX_PRIORITY, indexed.priority))
    return b"%06x%013x%09x%s" % (rank, max(0, min(_LATEST, indexed.run_at)), indexed.seq % _SUBMISSIONS, job)


class _LimitAudit:
    """A comparison of the keys of limits with the jobs."""

    def __init__(self, seen: NamespaceSnapshot, jobs: Mapping[bytes, IndexedJob]) -> None:
        self._seen = seen
        self._names = seen.names
        self._jobs = jobs
        self._ready: defaultdict[bytes, defaultdict[bytes, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        for job, indexed in jobs.items():
            if (partition := indexed.stands_in) is not None:
                self._ready[indexed.queue][partition].add(member_of(job, indexed))

    def check_partitions(self) -> Iterator[RepairStep]:
        """Each ready job under limits stands in its partition, at its own place."""
        prefix = self._names("partition:")
        wanted = {
            prefix + queue + SEPARATOR + partition: members
            for queue, partitions in self._ready.items()
            for partition, members in partitions.items()
        }
        for key, members in self._seen.zsets.items():
            if key.startswith(prefix):
                for member in members.keys() - wanted.get(key, set()):
                    yield RepairStep(OUT, ("ZREM", key, member))
        for key, ready in wanted.items():
            there = self._seen.zsets.get(key, {})
            for member in ready:
                if there.get(member) != 0:
                    yield RepairStep(BACK, ("ZADD", key, 0, member))

    def check_start_tags(self) -> Iterator[RepairStep]:
        """Each partition with ready jobs has a start tag, is throttled, or is full."""
        for name in _PARTITION_SETS:
            prefix = self._names(name)
            for key, members in self._seen.zsets.items():
                if key.startswith(prefix):
                    for partition in members.keys() - self._ready.get(key.removeprefix(prefix), {}).keys():
                        yield RepairStep(OUT, ("ZREM", key, partition))
        virtual = self._seen.hashes.get(self._names("virtual"), {})
        limited = self._seen.zsets.get(self._names("partitioned_queues"), {})
        for queue, partitions in self._ready.items():
            start_tags = self._names("start_tags:") + queue
            there = {each for name in _PARTITION_SETS for each in self._seen.zsets.get(self._names(name) + queue, ())}
            for partition in partitions.keys() - there:
                yield RepairStep(BACK, ("ZADD", start_tags, "NX", virtual.get(queue, b"0"), partition))
        wanted_queues = {
            job.queue for job in self._jobs.values() if job.state == b"queued" and job.partition is not None
        }
        for queue in wanted_queues - limited.keys():
            yield RepairStep(BACK, ("ZADD", self._names("partitioned_queues"), 0, queue))

    def check_used(self) -> Iterator[RepairStep]:
        """The weight of running jobs in each bucket, and the number of those that have not started."""
        limited = [job for job in self._jobs.values() if job.partition is not None]
        running = [
            (_text(job.partition), None if job.weights is None else _text(job.weights), 1)
            for job in limited
            if job.state == b"running"
        ]
        unstarted = [(_text(job.partition), None, 1) for job in limited if job.state.decode() in NOT_STARTED]
        for key, jobs in ((self._names("used"), running), (self._names("unstarted"), unstarted)):
            wanted = {bucket.encode("utf-8", "surrogateescape"): each for bucket, each in use_of_running(jobs).items()}
            noted = self._seen.hashes.get(key, {})
            for bucket in noted.keys() - wanted.keys():
                yield RepairStep(COUNTED, ("HDEL", key, bucket))
            for bucket, number in wanted.items():
                if noted.get(bucket) != b"%d" % number:
                    yield RepairStep(COUNTED, ("HSET", key, bucket, number))

    def check_buckets(self) -> Iterator[RepairStep]:
        """Each bucket's state is noted with the instant at which it may be forgotten."""
        key, refills = self._names("buckets"), self._names("refills")
        noted = dict(self._seen.zsets.get(refills, {}))
        for bucket, text in self._seen.hashes.get(key, {}).items():
            state = _STATE.fullmatch(text)
            if state is None:
                yield RepairStep(OUT, ("HDEL", key, bucket))
            elif noted.pop(bucket, None) != (instant := max(int(state[1]), int(state[2]))):
                yield RepairStep(BACK, ("ZADD", refills, instant, bucket))
        for bucket in noted:
            yield RepairStep(OUT, ("ZREM", refills, bucket))

    def check_queues_with_limits(self) -> Iterator[RepairStep]:
        """Queues with limits of their own are noted, as the limits say."""
        queues = set()
        for text in self._seen.hashes.get(self._names("limits"), {}).values():
            with suppress(msgspec.MsgspecError):
                limit = _decode(text.partition(b" ")[2])
                if limit.queue is not None and limit.has_buckets:
                    queues.add(limit.queue.encode())
        key = self._names("queues_with_limits")
        noted = self._seen.sets.get(key, frozenset())
        for name in noted - queues:
            yield RepairStep(OUT, ("SREM", key, name))
        for name in queues - noted:
            yield RepairStep(BACK, ("SADD", key, name))


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "surrogateescape")
