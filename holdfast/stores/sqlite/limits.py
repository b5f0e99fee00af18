"""Family ``limits`` of SQLite, and the claim of jobs under limits."""

from __future__ import annotations

import heapq
import itertools
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.limits import (
    KEEPS_START_TAG,
    START_TAG_STEP,
    Admission,
    Assigned,
    BucketState,
    BucketUse,
    Limit,
    LimitChange,
    LimitTable,
    bucket_use,
    compute_token_times,
    decode_limits,
    encode_limit,
    split_bucket,
    split_partition,
    token_change,
    use_of_running,
)
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.sqlite.encoding import as_json, span_us
from holdfast.stores.sqlite.opened import OpenedSqlite, SqliteFamily
from holdfast.stores.sqlite.writer import Transaction

_ASSIGNED = 500  # jobs that a claim gives partitions at a time
_MAX_ASSIGNED = 10_000  # and in all
_UNBLOCKED = 1000  # partitions that a claim looks at again, as their time has come, and those of quarantined jobs
_PAGE = 100  # partitions that a claim reads at a time
_MAX_QUARANTINED = 10_000  # quarantined jobs that a claim looks at, of partitions that are mostly blocked
_FIRST_JOBS = 32  # of a partition, behind its first one
_NEVER = 1 << 62  # a start tag that never comes


class SqliteLimits(SqliteFamily):
    """Family ``limits`` of SQLite."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.cache = LimitCache(self.read_limits)
        self._known: tuple[object, LimitTable] = (None, LimitTable())  # with their version: replaced together

    async def write_limit(self, change: LimitChange) -> int | None:
        self.cache.mark_stale()
        return await self._opened().writer.call(lambda transaction: self._write_in(transaction, change))

    def _write_in(self, transaction: Transaction, change: LimitChange) -> int | None:
        limit = change.limit
        values = {
            "name": limit.name,
            "document": encode_limit(limit),
            "expected": change.expected,
            "revision": transaction.now_us,
        }
        old = next((each for each in self._read(transaction.connection) if each.name == limit.name), None)
        name = "remove_limit" if change.remove else "replace_limit" if change.expected else "add_limit"
        written = transaction.connection.execute(self._sql[name], values).fetchone()
        if written is None:
            return None
        if tokens := token_change(old, limit):
            values = {"name": limit.name, "now": transaction.now_us, **tokens}
            transaction.connection.execute(self._sql["clamp_buckets"], values)
        if limit.queue is not None:
            transaction.connection.execute(self._sql["add_limited_queue"], (limit.queue,))
        transaction.connection.execute(self._sql["unblock_all_partitions"])
        for (queue,) in transaction.connection.execute(self._sql["limited_queues"]):
            transaction.notify_topic(f"queue:{queue}")
        return int(written[0])

    async def read_limits(self) -> list[Limit]:
        return await self._opened().read(self._read)

    def _read(self, connection: sqlite3.Connection) -> list[Limit]:
        return decode_limits(connection.execute(self._sql["limits"]).fetchall())

    def current_table(self, connection: sqlite3.Connection) -> LimitTable | None:
        """The limits as this connection sees them; None where there are none, and no job was ever under one."""
        number, revisions, had_jobs = connection.execute(self._sql["limits_version"]).fetchone()
        if not number and not had_jobs:
            return None
        version, table = self._known
        if version != (number, revisions):
            table = LimitTable(self._read(connection))
            self._known = ((number, revisions), table)
        return table

    def assign_again(self, connection: sqlite3.Connection, ids: Sequence[str]) -> None:
        """Gives jobs the partitions that the limits now say."""
        table = self.current_table(connection)
        if table is not None:
            rows = connection.execute(self._sql["partitions_of"], {"ids": as_json(ids)}).fetchall()
            write_partitions(connection, self._sql, table, rows)

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> Assigned:
        def run_in_transaction(transaction: Transaction) -> Assigned:
            values = {"queue": queue, "task": task, "after": after, "limit": limit}
            rows = transaction.connection.execute(self._sql["jobs_to_assign"], values).fetchall()
            table = LimitTable(self._read(transaction.connection))
            changed = write_partitions(transaction.connection, self._sql, table, rows)
            for name in {row[2] for row in rows}:
                transaction.notify_topic(f"queue:{name}")
            return Assigned(changed, rows[-1][4] if len(rows) == limit else None)

        return await self._opened().writer.call(run_in_transaction)

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        now_us = self._now()

        def read_use(reader: sqlite3.Connection) -> list[BucketUse]:
            used = use_of_running(reader.execute(self._sql["running_partitions"]))
            states = read_buckets(reader, self._sql, buckets)
            limits = {limit.name: limit for limit in self._read(reader)}
            return [
                bucket_use(
                    bucket,
                    limits.get(split_bucket(bucket)[0]),
                    used.get(bucket, 0),
                    states.get(bucket, BucketState()),
                    now_us,
                )
                for bucket in buckets
            ]

        return await self._opened().read(read_use)

    async def count_unstarted(self, buckets: Sequence[str], *, max_count: int) -> list[int]:
        values = {"buckets": as_json(buckets), "max_count": max_count}
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["count_unstarted"], values).fetchall())
        return [number for (number,) in rows]

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        return await self._opened().writer.call(lambda transaction: self._take_in(transaction, bucket, tokens))

    def _take_in(self, transaction: Transaction, bucket: str, tokens: int) -> timedelta:
        connection, now_us = transaction.connection, transaction.now_us
        limits = {limit.name: limit for limit in self._read(connection)}
        limit = limits.get(split_bucket(bucket)[0])
        state = read_buckets(connection, self._sql, [bucket]).get(bucket, BucketState())
        free_at = state.paused_until_us
        if limit is not None and limit.values.rate is not None:
            full_at, first = compute_token_times(limit.values, state.full_at_us, tokens, now_us)
            free_at = max(free_at, first)
            if free_at <= now_us:
                connection.execute(self._sql["set_bucket"], (bucket, full_at, state.paused_until_us))
        return timedelta(microseconds=max(0, free_at - now_us))

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        def run_in_transaction(transaction: Transaction) -> None:
            states = read_buckets(transaction.connection, self._sql, buckets)
            until = transaction.now_us + span_us(pause_for)
            for bucket in buckets:
                state = states.get(bucket, BucketState())
                paused_until = max(until, state.paused_until_us) if pause_for else until
                values = (bucket, state.full_at_us, paused_until)
                transaction.connection.execute(self._sql["set_bucket"], values)

        await self._opened().writer.call(run_in_transaction)


class LimitedFamily(SqliteFamily):
    """Base of the families that obey limits or give jobs their partitions."""

    def __init__(
        self,
        opened: Callable[[], OpenedSqlite],
        now: Callable[[], int],
        statements: Mapping[str, str],
        path: str,
        limits: SqliteLimits,
    ) -> None:
        super().__init__(opened, now, statements, path)
        self._limits = limits


def read_buckets(
    connection: sqlite3.Connection, statements: Mapping[str, str], buckets: Collection[str]
) -> dict[str, BucketState]:
    """States of the buckets that have one."""
    rows = connection.execute(statements["buckets"], {"names": as_json(buckets)})
    return {name: BucketState(full_at, paused_until) for name, full_at, paused_until in rows}


def write_partitions(
    connection: sqlite3.Connection, statements: Mapping[str, str], table: LimitTable, rows: Sequence[Sequence[Any]]
) -> int:
    """Sets partitions: of each job seq, task, queue, payload, id, partition, weights. Returns how many changed."""
    changed = [
        (seq, *assigned)
        for seq, task, queue, payload, _, *before in rows
        if list(assigned := table.find_partition(task, queue, payload)) != before
    ]
    connection.executemany(statements["set_partition"], changed)
    return len(changed)


class LimitedClaim:
    """A claim's jobs under limits: chosen by start tags, admitted by their buckets."""

    def __init__(
        self, connection: sqlite3.Connection, statements: Mapping[str, str], table: LimitTable, now_us: int
    ) -> None:
        self._connection = connection
        self._sql = statements
        self._table = table
        self._now_us = now_us
        used = use_of_running(connection.execute(statements["running_partitions"]))
        self._states: dict[str, BucketState] = {}
        self._loaded: set[str] = set()
        (self._has_states,) = connection.execute(statements["any_bucket"]).fetchone()
        self._admission = Admission(table.limits, used, self._states, now_us)

    def assign_unassigned(self, queue: str) -> None:
        """Gives partitions to ready jobs that came to a queue with a limit of its own without one."""
        if queue not in self._table.queues:
            return
        for _ in range(0, _MAX_ASSIGNED, _ASSIGNED):
            values = {"queue": queue, "limit": _ASSIGNED}
            rows = self._connection.execute(self._sql["unassigned_jobs"], values).fetchall()
            write_partitions(self._connection, self._sql, self._table, rows)
            if len(rows) < _ASSIGNED:
                return

    def choose_jobs(self, queue: str, max_jobs: int) -> list[int]:
        """Chooses up to ``max_jobs`` jobs of a queue; returns their rows in their order."""
        unblocking = {"queue": queue, "now": self._now_us, "limit": _UNBLOCKED}
        self._connection.execute(self._sql["unblock_partitions"], unblocking)
        row = self._connection.execute(self._sql["queue_virtual_time"], {"queue": queue}).fetchone()
        if row is None or max_jobs <= 0:
            return []
        closed = self._admission.closed
        start_tags = _StartTags(self._connection, self._sql, queue, row[0], self._now_us, max_jobs, closed)
        chosen: list[int] = []
        while len(chosen) < max_jobs and not self._is_closed(queue):
            partition = start_tags.next_partition()
            if partition is None:
                break
            if self._has_states:
                self._load_states(partition)
            step = START_TAG_STEP // self._table.share_of(partition)
            chosen += start_tags.serve(partition, step, self._admission.admit, max_jobs - len(chosen))
        start_tags.save_changes()
        self._save_buckets()
        return chosen

    def _is_closed(self, queue: str) -> bool:
        """Returns True if a limit of the whole queue admits no job any more."""
        limits = [self._table.limits.get(bucket) for bucket in self._admission.closed]
        return any(limit is not None and limit.queue == queue for limit in limits)

    def choose_quarantined(self, queue: str) -> list[int]:
        """Chooses one job that lost two leases in a row, if its buckets have room."""
        values = {"queue": queue, "now": self._now_us, "limit": _MAX_QUARANTINED}
        blocked: set[str] = set()
        for seq, partition, weights in self._connection.execute(self._sql["limited_quarantined"], values):
            if partition in blocked:
                continue
            if self._has_states:
                self._load_states(partition)
            if self._admission.admit(partition, weights, reserves=False) is None:
                self._save_buckets()
                return [seq]
            blocked.add(partition)
            if len(blocked) == _UNBLOCKED:
                break
        return []

    @property
    def due_us(self) -> int | None:
        """When the first heavy job of a partition that keeps its start tag has its tokens."""
        return self._admission.due_us

    def _load_states(self, partition: str) -> None:
        missing = [bucket for bucket in split_partition(partition) if bucket not in self._loaded]
        if missing:
            self._states |= read_buckets(self._connection, self._sql, missing)
            self._loaded.update(missing)

    def _save_buckets(self) -> None:
        rows = [(bucket, *msgspec.structs.astuple(self._states[bucket])) for bucket in self._admission.changed]
        self._connection.executemany(self._sql["set_bucket"], rows)
        self._admission.changed.clear()


class _StartTags:
    """The partitions of a queue in the order of their start tags, read page by page."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        statements: Mapping[str, str],
        queue: str,
        virtual_time: int,
        now_us: int,
        max_jobs: int,
        closed: Collection[str],
    ) -> None:
        self._connection = connection
        self._now_us = now_us
        self._sql = statements
        self._queue = queue
        self._virtual_time = self._began_at = virtual_time
        self._heap: list[tuple[int, int, str]] = []  # start tag, number, partition
        self._read_to: tuple[int, str] | None = (-1, "")  # where the next page begins; None: all were read
        self._page = min(max_jobs, _PAGE)
        self._max_jobs = max_jobs
        self._closed = closed  # buckets, as they are when a page is read
        self._jobs: dict[str, Iterator[tuple[int, str | None]]] = {}
        self._new_start_tags: dict[str, int] = {}
        self._numbers = itertools.count()
        self._start_tag = virtual_time  # of the partition taken out last

    def next_partition(self) -> str | None:
        """Takes out the partition with the lowest start tag; None if there is no other."""
        while self._read_to is not None:
            first = max(self._read_to[0], self._began_at)  # the lowest start tag of a partition that was not read yet
            if self._heap and self._heap[0][0] <= first:
                break
            self._read_page(*self._read_to)
        if not self._heap:
            return None
        self._start_tag, _, partition = heapq.heappop(self._heap)
        return partition

    def serve(
        self, partition: str, step: int, admit: Callable[[str, str | None], int | None], max_jobs: int
    ) -> list[int]:
        """Takes admitted jobs until another partition is first; each moves the start tag by ``step``. Returns rows."""
        start_tag = self._start_tag
        next_start_tag = self._heap[0][0] if self._heap else _NEVER
        if self._read_to is not None:
            next_start_tag = min(next_start_tag, max(self._read_to[0], self._began_at))
        rows: list[int] = []
        for seq, weights in self._jobs[partition]:
            blocked_until = admit(partition, weights)
            if blocked_until is not None:
                break
            rows.append(seq)
            start_tag += step
            if start_tag >= next_start_tag or len(rows) == max_jobs:
                heapq.heappush(self._heap, (start_tag, next(self._numbers), partition))
                break
        else:
            self._drop_partition(partition, start_tag)
            return rows
        if rows:
            self._virtual_time = max(self._virtual_time, start_tag - step)
            self._new_start_tags[partition] = start_tag
        if blocked_until is not None and blocked_until != KEEPS_START_TAG:
            self._block_partition(partition, start_tag, blocked_until)
        return rows

    def _read_page(self, start_tag: int, partition: str) -> None:
        values = {
            "queue": self._queue,
            "start_tag": start_tag,
            "partition": partition,
            "now": self._now_us,
            "limit": self._page,
            "closed": as_json(self._closed),
        }
        rows = self._connection.execute(self._sql["next_partitions"], values).fetchall()
        for name, at, seq, weights in rows:
            heapq.heappush(self._heap, (max(at, self._began_at), next(self._numbers), name))
            self._jobs[name] = self._read_jobs(name, seq, weights)
        self._read_to = (rows[-1][1], rows[-1][0]) if len(rows) == self._page else None
        self._page = min(4 * self._page, _PAGE)

    def _read_jobs(self, partition: str, first: int | None, weights: str | None) -> Iterator[tuple[int, str | None]]:
        if first is None:
            return
        yield first, weights
        size, offset = min(max(4, self._max_jobs // len(self._jobs)), _FIRST_JOBS, self._max_jobs), 1
        while True:
            values = {
                "queue": self._queue,
                "partition": partition,
                "now": self._now_us,
                "limit": size,
                "offset": offset,
            }
            rows = self._connection.execute(self._sql["partition_jobs"], values).fetchall()
            yield from rows
            if len(rows) < size:
                return
            offset += size
            size = min(4 * size, self._max_jobs)

    def _block_partition(self, partition: str, start_tag: int, until: int) -> None:
        """Leaves a partition alone until an instant."""
        self._new_start_tags.pop(partition, None)
        self._connection.execute(self._sql["move_partition"], (self._queue, partition, start_tag, until))

    def _drop_partition(self, partition: str, start_tag: int) -> None:
        """Forgets a partition without ready jobs, now that it is first.

        Forgotten sooner, a key whose jobs come one by one would go first each time.
        """
        self._virtual_time = max(self._virtual_time, start_tag)
        self._new_start_tags.pop(partition, None)
        self._connection.execute(self._sql["drop_partition"], (self._queue, partition))

    def save_changes(self) -> None:
        """Writes the new start tags."""
        moved = [(self._queue, partition, start_tag, None) for partition, start_tag in self._new_start_tags.items()]
        self._connection.executemany(self._sql["move_partition"], moved)
        self._connection.execute(self._sql["set_virtual_time"], (self._queue, self._virtual_time))
