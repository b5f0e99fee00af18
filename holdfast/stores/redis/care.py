"""Opening a namespace and checking the server: how durable it is, whether it evicts, whether it is full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.errors import ConfigError, StoreMismatch
from holdfast.job import Finding
from holdfast.links.redis import Script
from holdfast.stores.redis.address import LEVELS
from holdfast.stores.redis.links import Links

SCHEMA = 1
_INITIAL = "0001_initial"
_OLDEST, _WAITAOF = (6, 2), (7, 2)


class Facts(NamedTuple):
    """What the server says of itself."""

    name: str
    version: tuple[int, ...]
    durability: str
    """One of LEVELS."""
    settings: str
    """The settings that make it so, in words."""
    policy: str
    """``maxmemory-policy``; "" where it is hidden."""
    info: Mapping[str, str]


async def migrate(links: Links, scripts: Mapping[str, Script]) -> list[str]:
    """Check the server and make the namespace ours; the names of what was applied."""
    facts = await look(links)
    _check(facts, links)
    schema = int(await links.run(scripts["open"], SCHEMA))
    if schema < 0:
        raise StoreMismatch(
            f"{links.place}: {links.address.prefix}meta belongs to another program; give another ?namespace=NAME"
        )
    if schema > SCHEMA:
        raise StoreMismatch(f"the namespace is at {schema}, this Holdfast knows {SCHEMA}; upgrade to what wrote it")
    return [] if schema else [_INITIAL]


async def absent(links: Links) -> str | None:
    """What is not there, where opening would make a store; None where there is one."""
    prefix = links.address.prefix
    if await links.command("EXISTS", f"{prefix}meta"):
        return None
    return f"{links.server.shown} has no keys of Holdfast under {prefix!r} yet"


def _check(facts: Facts, links: Links) -> None:
    if facts.version < _OLDEST:
        raise ConfigError(f"{facts.name} is too old; Holdfast needs Redis 6.2 or newer, or Valkey")
    if facts.policy not in ("", "noeviction"):
        raise ConfigError(
            f"{links.place} evicts keys when it is full (maxmemory-policy={facts.policy}) and would drop jobs; "
            "config set maxmemory-policy noeviction"
        )
    declared = links.address.durability
    if declared == "waitaof" and facts.version < _WAITAOF:
        raise ConfigError(f"{facts.name} has no WAITAOF; set appendfsync always and declare ?durability=always")
    needed = "everysec" if declared == "waitaof" else declared
    if LEVELS.index(facts.durability) < LEVELS.index(needed):
        raise ConfigError(
            f"{links.place} keeps less than was declared: {facts.settings}, which is durability={facts.durability}, "
            f"not {declared}; {_REMEDIES[needed]}, or accept it: ?durability={facts.durability}"
        )


_REMEDIES = {
    "always": "config set appendonly yes and appendfsync always",
    "everysec": "config set appendonly yes",
    "none": "",
}


async def look(links: Links) -> Facts:
    """Ask the server; CONFIG may be forbidden, then INFO has to do."""
    info = _parsed(await links.command("INFO"))
    settings = await _settings(links)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:3] if part.isdigit())
    appends = settings.get("appendonly", "yes" if info.get("aof_enabled") == "1" else "no")
    fsync = settings.get("appendfsync", "unknown")
    if appends != "yes":
        durability, text = "none", "appendonly=no"
    elif fsync == "always":
        durability, text = "always", "appendonly=yes appendfsync=always"
    else:
        durability, text = ("none" if fsync == "no" else "everysec"), f"appendonly=yes appendfsync={fsync}"
    policy = settings.get("maxmemory-policy", info.get("maxmemory_policy", ""))
    return Facts(name, version, durability, text, policy, info)


async def _settings(links: Links) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("appendonly", "appendfsync", "maxmemory-policy"):
        try:
            reply = await links.command("CONFIG", "GET", name)
        except ConfigError:  # it is forbidden, or renamed
            return {}
        flat = [word for pair in reply.items() for word in pair] if isinstance(reply, dict) else reply
        found |= {flat[n].decode(): flat[n + 1].decode() for n in range(0, len(flat), 2)}
    return found


def _parsed(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


# ── the doctor ────────────────────────────────────────────────────────────────────────────────────────────────────
async def examine(links: Links, scripts: Mapping[str, Script]) -> list[Finding]:
    """What the server's settings and counters say about this store: effective durability first."""
    facts = await look(links)
    overdue, odd = await links.run(scripts["ailing"])
    return [
        _durability(facts, links.address.durability),
        Finding("version", "ok", facts.name),
        _eviction(facts),
        _memory(facts.info),
        _persistence(facts.info),
        _access(facts.info, links),
        _leases(int(overdue)),
        _odd(*(int(each) for each in odd)),
    ]


_LOSES = {
    "always": "an acknowledged job survives a kill and a power cut",
    "everysec": "a power cut loses the last 1 to 2 seconds; a kill of Redis, while the disk keeps up, nothing",
    "none": "a crash of Redis loses everything since its last snapshot",
}


def _durability(facts: Facts, declared: str) -> Finding:
    effective = "always" if declared == "waitaof" and facts.durability != "none" else facts.durability
    text = f"{facts.settings}{' WAITAOF' if declared == 'waitaof' else ''} (declared {declared}): {_LOSES[effective]}"
    if effective == "none":
        return Finding("durability", "error", text, _REMEDIES["everysec"])
    if LEVELS.index(effective) < LEVELS.index(declared):
        return Finding("durability", "error", text, _REMEDIES["always"])
    return Finding("durability", "ok", text)


def _eviction(facts: Facts) -> Finding:
    if facts.policy in ("", "noeviction"):
        return Finding("eviction", "ok", f"maxmemory-policy={facts.policy or 'hidden'}")
    remedy = "config set maxmemory-policy noeviction"
    return Finding("eviction", "error", f"maxmemory-policy={facts.policy}: a full Redis drops jobs", remedy)


def _memory(info: Mapping[str, str]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        return Finding("memory", "ok", f"{used:,} bytes used, no limit")
    text = f"{used:,} of {most:,} bytes used"
    if used < 0.8 * most:
        return Finding("memory", "ok", text)
    remedy = "raise maxmemory, prune ended jobs, or shorten retention"
    return Finding("memory", "error" if used >= most else "warning", text, remedy)


def _persistence(info: Mapping[str, str]) -> Finding:
    failed = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status") if info.get(name, "ok") != "ok"]
    failed += ["rdb_last_bgsave_status"] if info.get("rdb_last_bgsave_status", "ok") != "ok" else []
    if failed:
        return Finding("disk", "error", f"the last write failed: {', '.join(failed)}", "look into the server's log")
    delayed = int(info.get("aof_delayed_fsync", 0))
    text = f"writes succeed; fsync was late {delayed} times since the start"
    return Finding("disk", "ok" if not delayed else "warning", text, "" if not delayed else "give Redis a quicker disk")


def _access(info: Mapping[str, str], links: Links) -> Finding:
    replicas = info.get("connected_slaves", "0")
    guarded = bool(links.server.options.get("password"))
    text = f"role={info.get('role', '?')}, {replicas} replicas, {'with' if guarded else 'without'} password"
    if not guarded and links.server.hosts[0][0] not in ("localhost", "127.0.0.1", "::1"):
        return Finding(
            "access", "warning", text, "whoever reaches this port owns the queue: set a password or ACL user"
        )
    return Finding("access", "ok", text)


def _leases(overdue: int) -> Finding:
    if not overdue:
        return Finding("leases", "ok", "no job runs under a lease that expired over a minute ago")
    return Finding("leases", "warning", f"{overdue} jobs run under expired leases", "start a worker: it recovers them")


def _odd(orphans: int, foreign: int) -> Finding:
    if not orphans and not foreign:
        return Finding("keys", "ok", "no id without a job, no key of another type was met")
    text = f"{orphans} ids without a job were dropped, {foreign} keys of another type were moved to …:foreign:…"
    return Finding("keys", "warning", text, "find out who else writes here; then delete what was moved")
