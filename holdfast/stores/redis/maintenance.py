"""Opening a namespace and checking the server: how durable it is, whether it evicts, whether it is full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.core.errors import ConfigError, StoreMismatch
from holdfast.stores.connections.redis import Script
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.url import LEVELS

SCHEMA = 1
_INITIAL = "0001_initial"
_OLDEST, _WAITAOF = (6, 2), (7, 2)


class ServerInfo(NamedTuple):
    """Facts that the server reports about itself."""

    name: str
    version: tuple[int, ...]
    durability: str
    """One of LEVELS."""
    log: Mapping[str, str]
    """The settings that make it so; ``unknown`` where they are hidden."""
    policy: str
    """``maxmemory-policy``; "" where it is hidden."""
    info: Mapping[str, str]

    @property
    def settings(self) -> str:
        """Returns the relevant settings as text."""
        told = list(self.log) if self.log[_SPARED] == "yes" else [_APPENDS, _SYNCS]
        return " ".join(f"{name}={self.log[name]}" for name in (told if self.log[_APPENDS] == "yes" else told[:1]))

    def durability_remedy(self, level: str) -> str:
        """Returns the server settings that this level needs."""
        wanted = {_APPENDS: "yes"}
        if level == "always" or self.log[_SYNCS] == "no":
            wanted[_SYNCS] = level if level == "always" else "everysec"
        if self.log[_SPARED] == "yes":
            wanted[_SPARED] = "no"
        wrong = [f"{name} {value}" for name, value in wanted.items() if self.log[name] != value]
        return f"config set {' and '.join(wrong)}"


_APPENDS, _SYNCS, _SPARED = "appendonly", "appendfsync", "no-appendfsync-on-rewrite"


async def migrate(links: NamespacePool, scripts: Mapping[str, Script]) -> list[str]:
    """Check the server and make the namespace ours; the names of what was applied."""
    facts = await read_server_info(links)
    _check(facts, links)
    schema = int(await links.run(scripts["open"], SCHEMA))
    if schema < 0:
        raise StoreMismatch(
            f"{links.place}: {links.address.prefix}meta belongs to another program; give another ?namespace=NAME"
        )
    if schema > SCHEMA:
        raise StoreMismatch(f"the namespace is at {schema}, this Holdfast knows {SCHEMA}; upgrade to what wrote it")
    return [] if schema else [_INITIAL]


async def missing(links: NamespacePool) -> str | None:
    """What is not there, where opening would make a store; None where there is one."""
    prefix = links.address.prefix
    if await links.run_command("EXISTS", f"{prefix}meta"):
        return None
    return f"{links.server.shown} has no keys of Holdfast under {prefix!r} yet"


def _check(facts: ServerInfo, links: NamespacePool) -> None:
    if facts.version < _OLDEST:
        raise ConfigError(f"{facts.name} is too old; Holdfast needs Redis 6.2 or newer, or Valkey")
    if may_evict(facts.policy):
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
            f"not {declared}; {facts.durability_remedy(needed)}, or accept it: ?durability={facts.durability}"
        )


def may_evict(policy: str) -> bool:
    """Returns True if a full server with this ``maxmemory-policy`` drops keys; False for "", a hidden policy."""
    return policy not in ("", "noeviction")


async def read_server_info(links: NamespacePool) -> ServerInfo:
    """Ask the server; CONFIG may be forbidden, then INFO has to do."""
    info = parse_info(await links.run_command("INFO"))
    settings = await _settings(links)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:3] if part.isdigit())
    log = {name: settings.get(name, "unknown") for name in (_APPENDS, _SYNCS, _SPARED)}
    if log[_APPENDS] == "unknown":
        log[_APPENDS] = "yes" if info.get("aof_enabled") == "1" else "no"
    policy = settings.get("maxmemory-policy", info.get("maxmemory_policy", ""))
    return ServerInfo(name, version, _level(log), log, policy, info)


def _level(log: Mapping[str, str]) -> str:
    if log[_APPENDS] != "yes" or log[_SYNCS] == "no" or log[_SPARED] == "yes":  # in a rewrite nothing is synced then
        return "none"
    return "always" if log[_SYNCS] == "always" else "everysec"


async def _settings(links: NamespacePool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (_APPENDS, _SYNCS, _SPARED, "maxmemory-policy"):
        try:
            reply = await links.run_command("CONFIG", "GET", name)
        except ConfigError:  # it is forbidden, or renamed
            return {}
        flat = [word for pair in reply.items() for word in pair] if isinstance(reply, dict) else reply
        found |= {flat[n].decode(): flat[n + 1].decode() for n in range(0, len(flat), 2)}
    return found


def parse_info(text: bytes) -> dict[str, str]:
    """Parses the answer to INFO."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    return {name: value for name, _, value in lines}
