"""Opening a namespace: whether it is ours, and whether the server is as durable as declared."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.errors import ConfigError, StoreMismatch
from holdfast.stores.connections.redis import Script
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.server_info import ServerInfo, may_evict, read_server_info
from holdfast.stores.redis.url import LEVELS

SCHEMA = 1
_INITIAL = "0001_initial"
_OLDEST, _WAITAOF = (6, 2), (7, 2)


async def migrate(links: NamespacePool, scripts: Mapping[str, Script]) -> list[str]:
    """Check the server and make the namespace ours; the names of the applied migrations."""
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
    """Words for a missing store, which opening would make; None where there is one."""
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
