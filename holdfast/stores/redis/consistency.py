"""Consistency of a namespace's keys, and the steps that repair it. Pure.

The jobs' own hashes are believed. Ready lists are never rewritten: an id that should not stand in one is noted as a
tombstone, which the next reader of the list removes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from holdfast.core.models import NOT_STARTED
from holdfast.core.unique import KEY_PREFIX
from holdfast.stores.redis.limit_repairs import plan_limit_repairs
from holdfast.stores.redis.snapshot import (
    ASIDE,
    BACK,
    COUNTED,
    FORGOTTEN,
    INDEXED,
    KEYED,
    OUT,
    IndexedJob,
    NamespaceSnapshot,
    RepairStep,
)
from holdfast.stores.redis.wait_repairs import plan_wait_repairs

INDEX_CHUNK = 64  # jobs a chunk of the index, as in common.lua
_NOT_STARTED = frozenset(state.value.encode() for state in NOT_STARTED)


def plan_repairs(seen: NamespaceSnapshot) -> list[RepairStep]:
    """Returns the steps that make everything agree; empty if everything does."""
    audit = _Audit(seen)
    waits = plan_wait_repairs(seen, audit.jobs)  # first: it changes states
    found = [
        *audit.check_set_aside(),
        *waits,
        *audit.sorted_sets(),
        *audit.ready_lists(),
        *plan_limit_repairs(seen, audit.jobs),
        *audit.check_successes(),
        *audit.check_index(),
        *audit.check_keys(),
        *audit.check_expiries(),
        *audit.check_leftovers(),
        *audit.check_counts(),
        *audit.check_queues(),
    ]
    meta = seen.hashes.get(seen.names("meta"), {})
    flagged = [name for name in (b"orphans", b"foreign", b"lost") if name in meta]
    return [*found, RepairStep("", ("HDEL", seen.names("meta"), *flagged))] if flagged else found


class _Audit:
    """A comparison."""

    def __init__(self, seen: NamespaceSnapshot) -> None:
        self._seen = seen
        self._names = seen.names
        self.jobs = {job: indexed for job, indexed in seen.jobs.items() if indexed is not None}
        self._by_hand = {job for job, indexed in seen.jobs.items() if indexed is None}
        self._scheduled: defaultdict[bytes, dict[bytes, int]] = defaultdict(dict)  # by key, as it will be

    def _hash(self, name: str) -> Mapping[bytes, bytes]:
        return self._seen.hashes.get(self._names(name), {})

    def _zset(self, name: str) -> Mapping[bytes, int]:
        return self._seen.zsets.get(self._names(name), {})

    def check_set_aside(self) -> Iterator[RepairStep]:
        """Sets meaningless entries aside, as the scripts do."""
        for key in self._seen.corrupt:
            yield RepairStep(ASIDE, ("RENAME", key, key + b":foreign:%d" % self._seen.now))

    def sorted_sets(self) -> Iterator[RepairStep]:
        """Schedules, leases, quarantines, ends: each id where its state says, and nowhere else."""
        wanted: defaultdict[bytes, dict[bytes, int]] = defaultdict(dict)
        for job, indexed in self.jobs.items():
            key, score = self._sorted_set_of(job, indexed)
            if key is not None:
                wanted[key][job] = score
        self._scheduled = wanted
        for key, members in self._seen.zsets.items():
            if not self._holds_jobs(key):
                continue
            for job in members:
                by_hand = job in self._by_hand and self._names.is_schedule(key)
                if job not in wanted[key] and not by_hand:
                    yield RepairStep(OUT, ("ZREM", key, job))
        for key, jobs in wanted.items():
            there = self._seen.zsets.get(key, {})
            for job, score in jobs.items():
                if job not in there or (key != self._names.leases and there[job] != score):
                    yield RepairStep(BACK, ("ZADD", key, score, job))

    def _holds_jobs(self, key: bytes) -> bool:
        names = self._names
        exact = (names.leases, names("ended:dead"), names("ended:cancelled"))
        return key in exact or key.startswith(names("quarantine:")) or names.is_schedule(key)

    def _sorted_set_of(self, job: bytes, indexed: IndexedJob) -> tuple[bytes | None, int]:
        """The sorted set a job belongs to, if any, and its score there."""
        names = self._names
        if indexed.state == b"running":  # a lease that is lost has run out: the next sweep finds it
            return names.leases, self._seen.now
        if indexed.is_scheduled:
            return names.schedule_of(indexed.queue), indexed.run_at
        if indexed.state in (b"dead", b"cancelled"):
            return names("ended:" + indexed.state.decode()), indexed.ended
        if indexed.state == b"queued" and indexed.lost_leases >= 2:
            return names("quarantine:") + indexed.queue, indexed.run_at
        return None, 0

    def ready_lists(self) -> Iterator[RepairStep]:
        """Each job that is ready stands in its own list once, and any other id as a tombstone."""
        counts = Counter(
            (key, job) for key, ids in self._seen.lists.items() if self._names.is_ready_list(key) for job in ids
        )
        ready = {
            job: indexed
            for job, indexed in self.jobs.items()
            if indexed.state == b"queued" and indexed.lost_leases < 2 and indexed.partition is None
        }
        lost = [job for job in ready if not counts[self._list_of(job), job]]
        for job in sorted(lost, key=lambda job: (ready[job].run_at, ready[job].seq), reverse=True):
            counts[self._list_of(job), job] += 1
            yield RepairStep(BACK, ("LPUSH", self._list_of(job), job))
        tombstones, ought = self._hash("tombstones"), Counter[bytes]()
        for (key, job), times in counts.items():
            at_home = job in ready and key == self._list_of(job)
            ought[self._names.tombstone_key(key, job)] = 0 if job in self._by_hand else times - at_home
        for tombstone in {*ought, *tombstones}:
            if tombstones.get(tombstone, b"0") == b"%d" % ought[tombstone]:
                continue
            if ought[tombstone]:
                yield RepairStep(OUT, ("HSET", self._names("tombstones"), tombstone, ought[tombstone]))
            else:
                yield RepairStep(BACK, ("HDEL", self._names("tombstones"), tombstone))

    def _list_of(self, job: bytes) -> bytes:
        return self._names.ready_of(self.jobs[job].queue, self.jobs[job].priority)

    def check_successes(self) -> Iterator[RepairStep]:
        """The ends of successes are in a list; stale entries do no harm."""
        key = self._names("ended:succeeded")
        there, retained = set(self._seen.lists.get(key, ())), self._zset("kept:succeeded")
        for job, indexed in sorted(self.jobs.items(), key=lambda each: each[1].ended):
            is_there = job in retained or b"%d:%s" % (indexed.ended, job) in there
            if indexed.state == b"succeeded" and not is_there:
                yield RepairStep(BACK, ("RPUSH", key, b"%d:%s" % (indexed.ended, job)))

    def check_index(self) -> Iterator[RepairStep]:
        """Each job at its own number of submission; one that has none, or another's, gets a new one."""
        last = max([0, *(indexed.seq for indexed in self.jobs.values())])
        taken: dict[int, bytes] = {}
        for job, indexed in self.jobs.items():
            seq = indexed.seq
            if not seq or taken.setdefault(seq, job) != job:
                last = seq = last + 1
                taken[seq] = job
                yield RepairStep(INDEXED, ("HSET", self._names.job + job, "seq", seq))
        prefix = self._names("index:")
        for key, entries in self._seen.hashes.items():
            if key.startswith(prefix):
                for text in entries:
                    seq = int(text) if text.isdigit() else 0
                    if seq not in taken or key != prefix + b"%d" % (seq // INDEX_CHUNK):
                        yield RepairStep(INDEXED, ("HDEL", key, text))
        for seq, job in taken.items():
            key = prefix + b"%d" % (seq // INDEX_CHUNK)
            if self._seen.hashes.get(key, {}).get(b"%d" % seq) != job:
                yield RepairStep(INDEXED, ("HSET", key, seq, job))
        chunks = {seq // INDEX_CHUNK for seq in taken}
        noted = self._zset("chunks")
        for chunk in chunks:
            if noted.get(b"%d" % chunk) != chunk:
                yield RepairStep(INDEXED, ("ZADD", self._names("chunks"), chunk, chunk))
        for text in noted:
            if not text.isdigit() or int(text) not in chunks:
                yield RepairStep(INDEXED, ("ZREM", self._names("chunks"), text))

    def check_keys(self) -> Iterator[RepairStep]:
        """Each key stands for a job that says so, or for one that is gone while its lifetime lasts."""
        owned = self._hash("keys")
        for key, value in owned.items():
            until, _, job = value.partition(b" ")
            if job not in self._seen.jobs and not (until.isdigit() and int(until) > self._seen.now):
                yield RepairStep(KEYED, ("HDEL", self._names("keys"), key))
            elif job not in self._seen.jobs and key not in self._zset("outlived"):
                yield RepairStep(KEYED, ("ZADD", self._names("outlived"), int(until), key))
        for job, indexed in self.jobs.items():
            if indexed.key is None or (
                indexed.key.startswith(KEY_PREFIX.encode()) and indexed.state not in _NOT_STARTED
            ):
                continue  # another job may have had the unique key of one that was started, and be gone
            if owned.get(indexed.key, b"").partition(b" ")[2] not in self._seen.jobs:
                yield RepairStep(KEYED, ("HSET", self._names("keys"), indexed.key, b"0 " + job))

    def check_expiries(self) -> Iterator[RepairStep]:
        """Each job that waits has its instant noted; what is noted of others goes when its instant has come."""
        key, noted = self._names("expiry"), self._zset("expiry")
        for job in noted.keys() - self.jobs.keys():
            yield RepairStep(OUT, ("ZREM", key, job))
        for job, indexed in self.jobs.items():
            if indexed.expires is not None and indexed.state in _NOT_STARTED and noted.get(job) != indexed.expires:
                yield RepairStep(BACK, ("ZADD", key, indexed.expires, job))

    def check_leftovers(self) -> Iterator[RepairStep]:
        """Checks attempt records, log lines, steps and waits without a job."""
        for name in map(self._names, ("attempts:", "lines:", "steps:", "dependencies:", "dependents:", "receiver:")):
            for key in self._seen.keys:
                is_one = key.startswith(name) and self._names.type_of(key) is not None
                if is_one and key.removeprefix(name) not in self._seen.jobs:
                    yield RepairStep(FORGOTTEN, ("DEL", key))

    def check_counts(self) -> Iterator[RepairStep]:
        """Checks the counters by state and queue."""
        found = Counter(b"%s:%s" % (indexed.state, indexed.queue) for indexed in self.jobs.values())
        counted = self._hash("counts")
        for field in {*found, *counted}:
            if not found[field]:
                yield RepairStep(COUNTED, ("HDEL", self._names("counts"), field))
            elif counted.get(field) != b"%d" % found[field]:
                yield RepairStep(COUNTED, ("HSET", self._names("counts"), field, found[field]))

    def check_queues(self) -> Iterator[RepairStep]:
        """Checks the hints where to look: queues and priorities with ready jobs, and the next due instant."""
        known = self._zset("queues")
        for indexed in self.jobs.values():
            if indexed.state != b"queued" or indexed.stands_in is not None:
                continue
            if indexed.queue not in known:
                known = {**known, indexed.queue: 0}
                yield RepairStep(BACK, ("ZADD", self._names("queues"), 0, indexed.queue))
            key = self._names("priorities:") + indexed.queue
            if (
                indexed.priority
                and indexed.lost_leases < 2
                and b"%d" % indexed.priority not in self._seen.zsets.get(key, {})
            ):
                yield RepairStep(BACK, ("ZADD", key, -indexed.priority, indexed.priority))
        first = {
            indexed.queue: min(self._scheduled[self._names.schedule_of(indexed.queue)].values())
            for indexed in self.jobs.values()
            if indexed.is_scheduled
        }
        due = self._zset("due")
        for queue in due.keys() - first.keys():
            yield RepairStep(OUT, ("ZREM", self._names("due"), queue))
        for queue, score in first.items():
            if due.get(queue) != score:
                yield RepairStep(BACK, ("ZADD", self._names("due"), score, queue))
