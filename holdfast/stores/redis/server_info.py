"""Facts that a Redis server reports about itself, and a watch on its eviction policy, which may change at any time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.stores.redis.pool import NamespacePool

LOOK_EVERY = 5.0  # seconds


class ServerInfo(NamedTuple):
    """Facts that the server reports about itself."""

    name: str
    version: tuple[int, ...]
    durability: str
    """One of LEVELS."""
    persistence: Mapping[str, str]
    """The settings that make it so; ``unknown`` where they are hidden."""
    policy: str
    """``maxmemory-policy``; "" where it is hidden."""
    info: Mapping[str, str]

    @property
    def settings(self) -> str:
        """Returns the relevant settings as text."""
        known = self.persistence
        shown = list(known) if known[_NO_SYNC] == "yes" else [_APPENDS, _SYNCS]
        return " ".join(f"{name}={known[name]}" for name in (shown if known[_APPENDS] == "yes" else shown[:1]))

    def durability_remedy(self, level: str) -> str:
        """Returns the server settings that this level needs."""
        wanted = {_APPENDS: "yes"}
        if level == "always" or self.persistence[_SYNCS] == "no":
            wanted[_SYNCS] = level if level == "always" else "everysec"
        if self.persistence[_NO_SYNC] == "yes":
            wanted[_NO_SYNC] = "no"
        wrong = [f"{name} {value}" for name, value in wanted.items() if self.persistence[name] != value]
        return f"config set {' and '.join(wrong)}"


_APPENDS, _SYNCS, _NO_SYNC = "appendonly", "appendfsync", "no-appendfsync-on-rewrite"


def may_evict(policy: str) -> bool:
    """Returns True if a full server with this ``maxmemory-policy`` drops keys; False for "", a hidden policy."""
    return policy not in ("", "noeviction")


async def read_server_info(pool: NamespacePool) -> ServerInfo:
    """Ask the server; CONFIG may be forbidden, then INFO has to do."""
    info = parse_info(await pool.run_command("INFO"))
    settings = await _settings(pool)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:3] if part.isdigit())
    log = {name: settings.get(name, "unknown") for name in (_APPENDS, _SYNCS, _NO_SYNC)}
    if log[_APPENDS] == "unknown":
        log[_APPENDS] = "yes" if info.get("aof_enabled") == "1" else "no"
    policy = settings.get("maxmemory-policy", info.get("maxmemory_policy", ""))
    return ServerInfo(name, version, _level(log), log, policy, info)


def _level(log: Mapping[str, str]) -> str:
    if log[_APPENDS] != "yes" or log[_SYNCS] == "no" or log[_NO_SYNC] == "yes":  # in a rewrite nothing is synced then
        return "none"
    return "always" if log[_SYNCS] == "always" else "everysec"


async def _settings(pool: NamespacePool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (_APPENDS, _SYNCS, _NO_SYNC, "maxmemory-policy"):
        try:
            reply = await pool.run_command("CONFIG", "GET", name)
        except ConfigError:  # it is forbidden, or renamed
            return {}
        flat = [word for pair in reply.items() for word in pair] if isinstance(reply, dict) else reply
        found |= {flat[n].decode(): flat[n + 1].decode() for n in range(0, len(flat), 2)}
    return found


def parse_info(text: bytes) -> dict[str, str]:
    """Parses the answer to INFO."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


class EvictionWatch:
    """The eviction policy as of the last look. Event loops of one store share it: a change is logged once."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._policy = ""  # "" unless it evicts

    async def refuse_evicting(self, pool: NamespacePool) -> None:
        """Raises Unavailable while the server evicts: it might drop the job that it acknowledges."""
        await self.read_policy(pool)
        if self._policy:
            raise Unavailable(f"{_description(pool, self._policy)}; config set maxmemory-policy noeviction")

    async def read_policy(self, pool: NamespacePool) -> None:
        """Reads the policy unless that was done within ``LOOK_EVERY``; logs a change."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        info = parse_info(await pool.run_command("INFO", "memory"))
        policy = info.get("maxmemory_policy", "")
        before, self._policy = self._policy, policy if may_evict(policy) else ""
        log = logging.getLogger(__name__)
        if self._policy and not before:
            text = "%s; submissions are refused: config set maxmemory-policy noeviction"
            log.error(text, _description(pool, self._policy))
        elif before and not self._policy:
            log.warning("%s evicts no keys any more; submissions are accepted", pool.place)


def _description(pool: NamespacePool, policy: str) -> str:
    return f"{pool.place} evicts keys when it is full (maxmemory-policy={policy}) and would drop jobs"
