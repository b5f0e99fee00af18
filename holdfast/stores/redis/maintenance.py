"""Family ``maintenance`` of Redis, and the repair of a namespace whose keys contradict each other."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from redis import exceptions as driver

from holdfast.core.history import COUNT_DELAY, FIRST_WINDOW, HistoryInterval
from holdfast.core.models import TERMINAL, ExpiredJob, Finding, Job
from holdfast.core.waits import SIGNAL_RETENTION
from holdfast.stores.common.requests import EXPIRY_ROUNDS, FORGOTTEN_AFTER
from holdfast.stores.connections.redis import DEADLINE, RedisPool, Script, split_parts
from holdfast.stores.connections.redis_protocol import Argument, RedisConnection
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT
from holdfast.stores.redis.consistency import plan_repairs
from holdfast.stores.redis.encoding import Specs, expired_jobs, shown_jobs, span_us
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool, RedisAddress
from holdfast.stores.redis.server_info import EvictionWatch
from holdfast.stores.redis.snapshot import FIELDS, IndexedJob, NamespaceKeys, NamespaceSnapshot, RepairStep


class RedisMaintenance:
    """Family ``maintenance`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        specs: Specs,
        eviction: EvictionWatch,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._specs = specs
        self._eviction = eviction

    async def promote_due(self, *, limit: int) -> int:
        promoted = 0
        while promoted < limit:
            size = min(MAX_PER_SCRIPT, limit - promoted)
            number = int(await self._pool.run(self._scripts["promote"], size))
            promoted += number
            if number < size:
                break
        self._notifications.wake_local_waiters({"queue:*"} if promoted else ())
        return promoted

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        ended: list[ExpiredJob] = []
        for _ in range(EXPIRY_ROUNDS):
            size = min(MAX_PER_SCRIPT, limit - len(ended))
            examined, flat = await self._pool.run(self._scripts["expire"], size)
            ended += expired_jobs(flat, self._specs)
            if examined < size or len(ended) >= limit:
                break
        self._notifications.wake_local_waiters((), [each.job_id for each in ended])
        return ended

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out. Workers that submit nothing notice here that the server evicts."""
        await self._eviction.read_policy(self._pool)
        found: list[Job] = []
        while len(found) < limit:
            size = min(MAX_PER_SCRIPT, limit - len(found))
            jobs, examined = await self._pool.run(self._scripts["expired_leases"], len(found), size)
            found += [job for _, job in shown_jobs(jobs, self._specs)]
            if examined < size:
                break
        return found

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        pruned = 0
        for state, span in ended_for.items():
            if state not in TERMINAL:
                continue
            pruned += await self._prune_kept(state, span, limit - pruned)
            while pruned < limit:
                size = min(MAX_PER_SCRIPT, limit - pruned)
                number, examined = await self._pool.run(self._scripts["prune"], state, span_us(span), size)
                pruned += number
                if not examined:
                    break
        await self._pool.run(self._scripts["prune_rest"], min(limit, MAX_PER_SCRIPT), span_us(FORGOTTEN_AFTER))
        for _ in range(_KEPT_ROUNDS):
            most = MAX_PER_SCRIPT
            if await self._pool.run(self._scripts["prune_signals"], span_us(SIGNAL_RETENTION), most) < most:
                break
        return pruned

    async def _prune_kept(self, state: str, span: timedelta, limit: int) -> int:
        """Looks again at some of the jobs that were kept beyond their retention."""
        pruned, since = 0, b""
        for _ in range(_KEPT_ROUNDS):
            number, examined, now = await self._pool.run(
                self._scripts["prune_kept"], state, span_us(span), max(0, limit - pruned), since
            )
            pruned, since = pruned + number, since or now
            if examined < MAX_PER_SCRIPT:
                break
        return pruned

    async def count_ended(self, *, limit: int) -> bool:
        intervals = [value for each in HistoryInterval for value in (each.length_us, each.retention_us // 1_000_000)]
        spans = span_us(COUNT_DELAY), span_us(FIRST_WINDOW)
        return bool(await self._pool.run(self._scripts["count_ended"], *spans, min(limit, _COUNTED), *intervals))

    async def reannounce(self) -> int:
        return 0


_COUNTED = 1000  # ended jobs of a state that one script counts
_KEPT_ROUNDS = 5  # scripts a call spends on kept jobs of a state, and on old signals
_ALL = 3600.0  # seconds for everything
_PART = 500  # commands on their way at once, entries read at once
_TRIES = 3
_WATCHED = ("counts", "tombstones", "keys", "seq", "meta", "signals", "changes")
"""No job changes its state without one of these, and no signal is sent or received. Scripts write ``changes`` where
they change what a repair reads and none of the others: a time, an expiry, a partition, a wait, a limit, a bucket."""


async def repair(address: RedisAddress, now: int) -> list[Finding]:
    """Make everything agree; returns the repairs. ``now``: the store's instant."""
    names = NamespaceKeys(address.keys)
    pool = RedisPool(address.server, address.prefix, max_connections=1, deadline=_ALL)
    try:
        for _ in range(_TRIES):
            done = await pool.call(lambda connection: _apply_repairs(connection, names, now))
            if done is not None:
                return _findings(done)
    finally:
        await pool.close()
    remedy = "stop workers and submitters for a moment, and repair again"
    return [Finding("repair", "error", "jobs come and go: nothing was put right", remedy)]


def _findings(done: Sequence[RepairStep]) -> list[Finding]:
    found = Counter(step.what for step in done if step.what)
    return [Finding("repair", "ok", f"{number} {what}") for what, number in found.items()]


async def _apply_repairs(connection: RedisConnection, names: NamespaceKeys, now: int) -> list[RepairStep] | None:
    """The repairs; None: something changed meanwhile, and nothing was done."""
    await _ask(connection, [("WATCH", *(names(name) for name in _WATCHED))])
    found = plan_repairs(await _Reading(connection, names).snapshot(now))
    *_, answers = await _ask(connection, [("MULTI",), *(step.command for step in found), ("EXEC",)])
    if answers is None:
        return None
    refused = [answer for answer in answers if isinstance(answer, driver.ResponseError)]
    if refused:
        raise refused[0]
    return found


async def _ask(connection: RedisConnection, commands: Iterable[tuple[Argument, ...]]) -> list[Any]:
    """The answers to commands that go out together."""
    async with asyncio.timeout(DEADLINE):
        answers = await connection.ask_each(commands)
    for answer in answers:
        if isinstance(answer, driver.ResponseError):
            raise answer
    return answers


class _Reading:
    """A walk through a namespace, a little at a time: other clients are served in between."""

    def __init__(self, connection: RedisConnection, names: NamespaceKeys) -> None:
        self._link = connection
        self._names = names
        self._corrupt: list[bytes] = []

    async def snapshot(self, now: int) -> NamespaceSnapshot:
        """Everything that is there."""
        keys = await self._keys()
        types = await self._types(keys)
        jobs = await self._jobs([key for key in types if key.startswith(self._names.job)])
        rest = {key: kind for key, kind in types.items() if not key.startswith(self._names.job)}
        attempts = self._names("attempts:")
        return NamespaceSnapshot(
            names=self._names,
            now=now,
            jobs=jobs,
            corrupt=self._corrupt,
            keys=keys,
            lists={
                key: await self._list(key)
                for key, kind in rest.items()
                if kind == b"list" and not key.startswith(attempts)
            },
            zsets={key: await self._zset(key) for key, kind in rest.items() if kind == b"zset"},
            hashes={key: await self._hash(key) for key, kind in rest.items() if kind == b"hash"},
            sets={key: frozenset(await self._scanned("SSCAN", key)) for key, kind in rest.items() if kind == b"set"},
        )

    async def _keys(self) -> frozenset[bytes]:
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._names.prefix) + b"*"
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            ((cursor, part),) = await _ask(self._link, [("SCAN", cursor, "MATCH", pattern, "COUNT", _PART)])
            found.update(part)
            if cursor == b"0":
                return frozenset(found)

    async def _types(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Of our keys that are of the type they must be; keys of another type are recorded as corrupt."""
        found: dict[bytes, bytes] = {}
        for part in split_parts([key for key in keys if self._names.type_of(key) is not None], _PART):
            for key, kind in zip(part, await _ask(self._link, [("TYPE", key) for key in part]), strict=True):
                if kind == self._names.type_of(key):
                    found[key] = kind
                elif kind != b"none":  # else it is gone
                    self._corrupt.append(key)
        return found

    async def _jobs(self, keys: Sequence[bytes]) -> dict[bytes, IndexedJob | None]:
        found: dict[bytes, IndexedJob | None] = {}
        for part in split_parts(keys, _PART):
            for key, fields in zip(
                part, await _ask(self._link, [("HMGET", key, *FIELDS) for key in part]), strict=True
            ):
                try:
                    found[key.removeprefix(self._names.job)] = IndexedJob.from_hash(fields)
                except ValueError:
                    self._corrupt.append(key)
        return found

    async def _list(self, key: bytes) -> list[bytes]:
        found: list[bytes] = []
        while True:
            (part,) = await _ask(self._link, [("LRANGE", key, len(found), len(found) + _PART - 1)])
            found += part
            if len(part) < _PART:
                return found

    async def _zset(self, key: bytes) -> dict[bytes, int]:
        flat = await self._scanned("ZSCAN", key)
        return {member: int(float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)}

    async def _hash(self, key: bytes) -> dict[bytes, bytes]:
        flat = await self._scanned("HSCAN", key)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _scanned(self, command: str, key: bytes) -> list[bytes]:
        found: list[bytes] = []
        cursor = b"0"
        while True:
            ((cursor, part),) = await _ask(self._link, [(command, key, cursor, "COUNT", _PART)])
            found += part
            if cursor == b"0":
                return found
