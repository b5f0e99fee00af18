"""Findings of a server about itself and of its keys about each other, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.errors import ConfigError
from holdfast.core.models import Finding
from holdfast.stores.connections.redis import Script
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.maintenance import repair
from holdfast.stores.redis.pool import LEVELS, NamespacePool
from holdfast.stores.redis.server_info import ServerInfo, may_evict, read_server_info


class RedisHealth:
    """Family ``health`` of Redis."""

    def __init__(self, pool: NamespacePool, scripts: Mapping[str, Script], query: RedisQuery, url: str) -> None:
        self._pool = pool
        self._scripts = scripts
        self._query = query
        self._url = url

    async def doctor(self) -> list[Finding]:
        pool = self._pool
        facts = await read_server_info(pool)
        expired_leases, anomalies, sizes, nameless = await pool.run(self._scripts["doctor"])
        return [
            durability(facts, pool.address.durability),
            Finding("version", "ok", facts.name),
            check_eviction(facts),
            _memory(facts.info),
            _persistence(facts.info),
            _log(facts),
            _failover(facts.info, pool),
            _access(pool),
            _leases(int(expired_leases)),
            _keys(*(int(each) for each in anomalies[:2])),
            _losses(int(anomalies[2])),
            _agreement([(name.decode(), int(counted), int(stored)) for name, counted, stored in sizes]),
            _nameless_queue(int(nameless), pool.address.keys[2]),
        ]

    async def durability(self) -> Finding:
        facts = await read_server_info(self._pool)
        if may_evict(facts.policy):  # nothing that it keeps is safe
            return check_eviction(facts)
        return durability(facts, self._pool.address.durability)

    async def repair(self) -> list[Finding]:
        return await repair(self._pool.address, await self.server_time_us())

    async def backup(self, path: str) -> None:
        raise ConfigError(
            f"Redis is backed up by its own tools: redis-cli -u {self._url.partition('?')[0]} --rdb {path}, or copy "
            "its append-only folder"
        )

    async def server_time_us(self) -> int:
        return await self._query.server_time_us()


_LOSES = {
    "always": "an acknowledged job survives a kill and a power cut",
    "everysec": "a power cut loses the last 1 to 2 seconds; a kill of Redis, while the disk keeps up, nothing",
    "none": "a crash of Redis loses everything since its last snapshot",
    "unsynced": "a power cut loses what the system had not written by itself, half a minute or more",
}


def durability(facts: ServerInfo, declared: str) -> Finding:
    """Compares the durability in effect with the declared one."""
    effective = "always" if declared == "waitaof" and facts.durability != "none" else facts.durability
    loses = _LOSES["unsynced" if effective == "none" and facts.settings.startswith("appendonly=yes") else effective]
    text = f"{facts.settings}{' WAITAOF' if declared == 'waitaof' else ''} (declared {declared}): {loses}"
    if effective == "none":
        return Finding("durability", "error", text, facts.durability_remedy("everysec"))
    if LEVELS.index(effective) < LEVELS.index(declared):
        return Finding("durability", "error", text, facts.durability_remedy("always"))
    if "unknown" in facts.persistence.values():
        remedy = "give the user the right +config|get: how it syncs its log is taken for granted"
        return Finding("durability", "warning", text, remedy)
    return Finding("durability", "ok", text)


def check_eviction(facts: ServerInfo) -> Finding:
    """Finding about the eviction policy."""
    if not may_evict(facts.policy):
        return Finding("eviction", "ok", f"maxmemory-policy={facts.policy or 'hidden'}")
    dropped = facts.info.get("evicted_keys", "0")
    text = f"maxmemory-policy={facts.policy}: a full Redis drops jobs ({dropped} keys evicted since it started)"
    return Finding("eviction", "error", text, "config set maxmemory-policy noeviction")


def _memory(info: Mapping[str, str]) -> Finding:
    used, maximum = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not maximum:
        return Finding("memory", "ok", f"{used:,} bytes used, no limit")
    text = f"{used:,} of {maximum:,} bytes used"
    if used < 0.8 * maximum:
        return Finding("memory", "ok", text)
    remedy = "raise maxmemory, prune ended jobs, or shorten retention"
    return Finding("memory", "error" if used >= maximum else "warning", text, remedy)


def _persistence(info: Mapping[str, str]) -> Finding:
    failed = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status") if info.get(name, "ok") != "ok"]
    failed += ["rdb_last_bgsave_status"] if info.get("rdb_last_bgsave_status", "ok") != "ok" else []
    if failed:
        return Finding("disk", "error", f"the last write failed: {', '.join(failed)}", "look into the server's log")
    delayed = int(info.get("aof_delayed_fsync", 0))
    text = f"writes succeed; fsync was late {delayed} times since the start"
    return Finding("disk", "ok" if not delayed else "warning", text, "" if not delayed else "give Redis a quicker disk")


def _log(facts: ServerInfo) -> Finding:
    torn = facts.version < (7,) and facts.info.get("aof_enabled") == "1"
    if not torn or facts.info.get("aof_last_rewrite_time_sec") != "-1":
        return Finding("log", "ok", "a script that a crash tore off is not in it")
    text = f"{facts.name} leaves half a script in its log where a crash tore it off, and runs that at the next start"
    return Finding("log", "warning", text, "after each crash: redis-cli bgrewriteaof; or take Redis 7, or Valkey")


def _failover(info: Mapping[str, str], pool: NamespacePool) -> Finding:
    there, waited = int(info.get("connected_slaves", "0")), pool.address.replicas
    text = f"role={info.get('role', '?')}, {there} replicas, {waited} waited for"
    if info.get("slave_read_only") == "1":  # only replicas say so
        return Finding("failover", "error", f"{text}: it takes no writes", "name the primary in the URL")
    if there < waited:
        return Finding("failover", "error", f"{text}: nothing is acknowledged", "start replicas, or wait for fewer")
    if waited and there == waited:
        remedy = "start one more: while one of these is away nothing is acknowledged"
        return Finding("failover", "warning", text, remedy)
    if there and not waited and pool.address.server.kind != "direct":
        text = f"{text}: a failover loses what had not reached the replica"
        return Finding("failover", "warning", text, "?replicas=1 acknowledges when a replica has it; have two of them")
    return Finding("failover", "ok", text)


def _access(pool: NamespacePool) -> Finding:
    has_auth = bool(pool.address.server.options.get("password"))
    text = f"{'with' if has_auth else 'without'} password, {'with' if pool.address.server.secure else 'without'} TLS"
    near = ("localhost", "127.0.0.1", "::1")
    if not has_auth and any(host not in near for host, _ in pool.address.server.hosts):
        remedy = "every client that reaches this port owns the queue: set a password or ACL user"
        return Finding("access", "warning", text, remedy)
    return Finding("access", "ok", text)


def _leases(expired_leases: int) -> Finding:
    if not expired_leases:
        return Finding("leases", "ok", "no job runs under a lease that expired over a minute ago")
    return Finding(
        "leases", "warning", f"{expired_leases} jobs run under expired leases", "start a worker: it recovers them"
    )


def _keys(orphans: int, foreign: int) -> Finding:
    if not orphans and not foreign:
        return Finding("keys", "ok", "no id without a job, no key of another type was met")
    text = f"{orphans} ids without a job were dropped, {foreign} keys of another type were moved to …:foreign:…"
    remedy = f"find out who else writes here; then delete what was moved, and {_REPAIR}"
    return Finding("keys", "warning", text, remedy)


def _losses(lost: int) -> Finding:
    if not lost:
        return Finding("lost_leases", "ok", "every acknowledged job is here")
    text = f"at least {lost} acknowledged writes are gone: Redis crashed, or a replica took over, without them"
    remedy = f"submit again what is missing; declare ?durability=always or ?replicas=1; then {_REPAIR} forgets this"
    return Finding("lost_leases", "error", text, remedy)


def _nameless_queue(count: int, ready: str) -> Finding:
    if not count:
        return Finding("queue names", "ok", "no id waits in a ready list with an empty queue name")
    text = f"{count} ids wait in {ready}:, the ready list of a queue with an empty name, which no worker reads"
    remedy = f"move each to queue default: redis-cli -r {count} rpoplpush '{ready}:' '{ready}'"
    return Finding("queue names", "error", text, remedy)


_REPAIR = "holdfast doctor --repair"


def _agreement(sizes: Sequence[tuple[str, int, int]]) -> Finding:
    """Checks that each job has its index entries, and no more."""
    wrong = [
        f"{counted} jobs are {name} and {stored} stand there" for name, counted, stored in sizes if counted != stored
    ]
    if not wrong:
        return Finding("structures", "ok", "each structure holds as many jobs as are counted")
    stranded = any(stored < counted for _, counted, stored in sizes)
    remedy = f"{_REPAIR} puts back what no claim would find" if stranded else f"wait for a claim, or {_REPAIR}"
    return Finding("structures", "error" if stranded else "warning", "; ".join(wrong), remedy)
