"""Repair of what jobs wait for: dependencies, receivers and signals. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.core.batches import batch_result, describe_failed_members
from holdfast.core.dependencies import describe_failed_dependency
from holdfast.core.models import TERMINAL, Reason
from holdfast.stores.redis.snapshot import OUT, WAITS_CORRECTED, IndexedJob, NamespaceSnapshot, RepairStep

_EDGE = re.compile(rb"(success|failure|end) (open|met|failed) (\d+)")
_ENDED = frozenset(state.value.encode() for state in TERMINAL)


def plan_wait_repairs(seen: NamespaceSnapshot, jobs: dict[bytes, IndexedJob]) -> list[RepairStep]:
    """Returns the steps. Changes ``jobs`` to what they are after these steps."""
    audit = _WaitAudit(seen, jobs)
    return [
        *audit.check_dependencies(),
        *audit.check_dependents(),
        *audit.check_receivers(),
        *audit.check_kept_jobs(),
        *audit.check_signals(),
    ]


class _Edge(NamedTuple):
    """A dependency. ``wait``: 0, or the number of the wait for which its waiter started the child."""

    condition: bytes
    state: bytes
    wait: bytes

    @classmethod
    def parse(cls, text: bytes) -> _Edge | None:
        match = _EDGE.fullmatch(text)
        return None if match is None else cls(match[1], match[2], match[3])

    def resolved_by(self, how: bytes) -> _Edge:
        """Returns the edge after the end of its job."""
        is_met = self.condition == b"end" or (self.condition == b"success") == (how == b"succeeded")
        return self._replace(state=b"met" if is_met else b"failed")

    @property
    def text(self) -> bytes:
        return b" ".join(self)


class _WaitAudit:
    """A comparison."""

    def __init__(self, seen: NamespaceSnapshot, jobs: dict[bytes, IndexedJob]) -> None:
        self._seen = seen
        self._names = seen.names
        self._jobs = jobs
        self._edges: dict[bytes, dict[bytes, _Edge]] = {}  # by waiter and job
        self._waiters: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by job
        self._failures: dict[bytes, tuple[bytes, bytes]] = {}  # by waiter: a job, and how it ended

    def _each(self, name: str) -> Iterator[tuple[bytes, Mapping[bytes, bytes]]]:
        """Hashes whose names begin so, by the rest of the name."""
        prefix = self._names(name)
        for key, fields in self._seen.hashes.items():
            if key.startswith(prefix):
                yield key.removeprefix(prefix), fields

    def _each_zset(self, name: str) -> Iterator[tuple[bytes, bytes, Mapping[bytes, int]]]:
        prefix = self._names(name)
        for key, members in self._seen.zsets.items():
            if key.startswith(prefix):
                yield key, key.removeprefix(prefix), members

    # ── dependencies ──────────────────────────────────────────────────────────────────────────────────────────
    def check_dependencies(self) -> Iterator[RepairStep]:
        """Resolves dependencies on ended or deleted jobs, level by level; then checks the jobs that still wait."""
        for waiter, fields in self._each("dependencies:"):
            if waiter in self._jobs:
                yield from self._read_edges(waiter, fields)
        for job, indexed in self._jobs.items():
            if indexed.members is not None:
                self._edges.setdefault(job, {})
        unresolved = [*self._edges]
        known: set[bytes] = set()  # each end is passed on once: ended jobs may have waited for each other in a circle
        while unresolved:
            ended = set()
            for waiter in unresolved:
                yield from self._resolve(waiter)
                if self._jobs[waiter].members is not None:
                    yield from self._check_batch(waiter)
                elif waiter in self._failures and self._is_unstarted_waiter(waiter):
                    yield self._cancel(waiter)
                if self._jobs[waiter].state in _ENDED and waiter not in known:
                    ended.add(waiter)
            known |= ended
            unresolved = [*{waiter for job in ended for waiter in self._waiters[job]}]
        for job, indexed in [*self._jobs.items()]:
            if indexed.state == b"waiting" and indexed.members is None:
                yield from self._check_waits(job, indexed)

    def _read_edges(self, waiter: bytes, fields: Mapping[bytes, bytes]) -> Iterator[RepairStep]:
        edges = self._edges[waiter] = {}
        for job, text in fields.items():
            edge = _Edge.parse(text)
            if edge is not None:
                edges[job] = edge
                self._waiters[job].add(waiter)
            elif not text.startswith(b"held "):  # JOB, for which there is an edge of its own
                yield RepairStep(OUT, ("HDEL", self._names("dependencies:") + waiter, job))

    def _resolve(self, waiter: bytes) -> Iterator[RepairStep]:
        key = self._names("dependencies:") + waiter
        for job, edge in [*self._edges[waiter].items()]:
            other = self._jobs.get(job)
            if other is None and job in self._seen.jobs:  # written by hand
                continue
            how = b"deleted" if other is None else other.state
            resolved = edge.resolved_by(how) if edge.state == b"open" and (other is None or how in _ENDED) else edge
            if resolved.state == b"failed":
                self._failures.setdefault(waiter, (job, how))
            if other is None:
                self._waiters[job].discard(waiter)
            if (
                resolved != edge
            ):  # that on a deleted job stays: a failed one holds its waiter back, a child is started once
                self._edges[waiter][job] = resolved
                yield RepairStep(WAITS_CORRECTED, ("HSET", key, job, resolved.text))

    def _is_unstarted_waiter(self, waiter: bytes) -> bool:
        indexed = self._jobs[waiter]
        return indexed.state == b"waiting" and not indexed.has_started

    def _cancel(self, waiter: bytes) -> RepairStep:
        job, how = self._failures[waiter]
        error = describe_failed_dependency(job.decode("utf-8", "replace"), how.decode())
        return self._end(waiter, b"cancelled", "error", error)

    def _end(self, waiter: bytes, state: bytes, name: str, text: str) -> RepairStep:
        """Ends a job that waits, with the text of its error or result, which is ASCII."""
        self._jobs[waiter] = self._jobs[waiter]._replace(state=state, ended=self._seen.now)
        change = "state", state, "reason", Reason.DEPENDENCY.value, "endTime", self._seen.now
        pieces = (name, text[:64], *_pieces(name, text), *(("errorGroup", "batch") if state == b"dead" else ()))
        return RepairStep(WAITS_CORRECTED, ("HSET", self._names.job + waiter, *change, *pieces))

    def _check_batch(self, batch: bytes) -> Iterator[RepairStep]:
        """The numbers of a batch are those of its members, and it has ended if they have."""
        indexed, states = self._jobs[batch], Counter(edge.state for edge in self._edges[batch].values())
        members, failed, waits = states.total(), states[b"failed"], states[b"open"] + indexed.is_submitting
        if (members, failed, waits) != (indexed.members, indexed.failed, indexed.waits):
            numbers = ("members", members, "failed", failed, "waits", waits)
            yield RepairStep(WAITS_CORRECTED, ("HSET", self._names.job + batch, *numbers))
        if indexed.state == b"waiting" and not waits and failed:
            yield self._end(batch, b"dead", "error", describe_failed_members(failed, members))
        elif indexed.state == b"waiting" and not waits:
            yield self._end(batch, b"succeeded", "result", batch_result(members))

    def _check_waits(self, job: bytes, indexed: IndexedJob) -> Iterator[RepairStep]:
        """A waiting job waits for as much as it says, and is due if that is nothing."""
        edges = self._edges.get(job, {}).values()
        receiver = self._seen.hashes.get(self._names("receiver:") + job, {})
        has_receiver = receiver.get(b"claims", b"0") != b"0"
        wait = indexed.wait_number if indexed.has_started else b"0"
        waits = 1 if has_receiver else sum(edge.state != b"met" and edge.wait == wait for edge in edges)
        if waits != indexed.waits:
            yield RepairStep(WAITS_CORRECTED, ("HSET", self._names.job + job, "waits", waits))
        if not waits:
            self._jobs[job] = indexed._replace(state=b"scheduled", run_at=self._seen.now)
            change = ("state", "scheduled", "dueTime", self._seen.now)
            yield RepairStep(WAITS_CORRECTED, ("HSET", self._names.job + job, *change))

    def check_dependents(self) -> Iterator[RepairStep]:
        """Each job knows those that wait for it, and no others."""
        for key, job, members in self._each_zset("dependents:"):
            for waiter in members.keys() - self._waiters[job]:
                yield RepairStep(OUT, ("ZREM", key, waiter))
        for job, waiters in self._waiters.items():
            indexed = self._jobs.get(job)
            if indexed is None or not waiters:
                continue
            key = self._names("dependents:") + job
            for waiter in waiters - self._seen.zsets.get(key, {}).keys():
                yield RepairStep(WAITS_CORRECTED, ("ZADD", key, 0, waiter))
            if not indexed.has_dependents:
                yield RepairStep(WAITS_CORRECTED, ("HSET", self._names.job + job, "hasDependents", 1))

    def check_kept_jobs(self) -> Iterator[RepairStep]:
        """Removes jobs from the sets of retained jobs of a state in which they are not."""
        for key, state, members in self._each_zset("kept:"):
            for job in members:
                if job not in self._jobs or self._jobs[job].state != state:
                    yield RepairStep(OUT, ("ZREM", key, job))

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    def check_receivers(self) -> Iterator[RepairStep]:
        """Each waiting receiver is among those of its topic. A running one may change meanwhile."""
        topics: dict[bytes, bytes | None] = {}
        for job, fields in self._each("receiver:"):
            is_listed = fields.get(b"claims") != b"0"
            topics[job] = topic = fields.get(b"topic") if is_listed else None
            indexed = self._jobs.get(job)
            if topic is not None and indexed is not None and indexed.state == b"waiting":
                key = self._names("receivers:") + topic
                if job not in self._seen.zsets.get(key, {}):
                    yield RepairStep(WAITS_CORRECTED, ("ZADD", key, _number(fields.get(b"since")), job))
        for key, topic, members in self._each_zset("receivers:"):
            for job in members:
                indexed = self._jobs.get(job)
                if topics.get(job) != topic and (indexed is None or indexed.state != b"running"):
                    yield RepairStep(OUT, ("ZREM", key, job))

    def check_signals(self) -> Iterator[RepairStep]:
        """Each signal has an instant at which it was sent; those without a receiver are in order, by topic too."""
        signals = self._seen.hashes.get(self._names("signals"), {})
        sent = self._seen.zsets.get(self._names("signals_sent"), {})
        stored_positions = self._seen.zsets.get(self._names("signals_kept"), {})
        for signal in sent.keys() - signals.keys():
            yield RepairStep(OUT, ("ZREM", self._names("signals_sent"), signal))
        for signal in signals.keys() - sent.keys():
            yield RepairStep(WAITS_CORRECTED, ("ZADD", self._names("signals_sent"), self._seen.now, signal))
        topics = {signal: topic for signal, text in signals.items() if (topic := _topic_of(text)) is not None}
        positions, last = {}, max(stored_positions.values(), default=0)
        for signal in sorted(topics, key=lambda each: (stored_positions.get(each, last + 1), sent.get(each, 0), each)):
            last = last if signal in stored_positions else last + 1
            positions[signal] = stored_positions.get(signal, last)
        yield from self._compare(self._names("signals_kept"), positions)
        by_topic: defaultdict[bytes, dict[bytes, int]] = defaultdict(dict)
        for signal, topic in topics.items():
            by_topic[self._names("signals_kept:") + topic][signal] = positions[signal]
        for key in {*by_topic, *(key for key, _, _ in self._each_zset("signals_kept:"))}:
            yield from self._compare(key, by_topic[key])

    def _compare(self, key: bytes, wanted: Mapping[bytes, int]) -> Iterator[RepairStep]:
        there = self._seen.zsets.get(key, {})
        for member in there.keys() - wanted.keys():
            yield RepairStep(OUT, ("ZREM", key, member))
        for member, score in wanted.items():
            if there.get(member) != score:
                yield RepairStep(WAITS_CORRECTED, ("ZADD", key, score, member))


def _pieces(name: str, text: str) -> list[str]:
    """Names and values of the further pieces of an ASCII text, as the scripts cut it."""
    rest = [text[start : start + 64] for start in range(64, len(text), 64)]
    return [word for number, piece in enumerate(rest, 1) for word in (f"{name}{number}", piece)]


def _topic_of(text: bytes) -> bytes | None:
    """Topic of a signal that no job has received."""
    length, colon, rest = text.partition(b":")
    return rest[: int(length)] if colon and length.isdigit() else None


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
