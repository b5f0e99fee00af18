"""The Redis store: its verb families in one namespace, composed for each event loop, and its schema's version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.errors import ConfigError, Invalid, StoreMismatch
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.server_store import LoopResources, ServerStore
from holdfast.stores.connections.redis import Script, load_scripts
from holdfast.stores.redis.admin import RedisAdmin
from holdfast.stores.redis.encoding import Specs
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.health import RedisHealth
from holdfast.stores.redis.limits import PartitionAssigner, RedisLimits, read_limits
from holdfast.stores.redis.maintenance import RedisMaintenance
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import LEVELS, NamespacePool, parse_url
from holdfast.stores.redis.queueing import RedisQueueing
from holdfast.stores.redis.schedules import RedisSchedules
from holdfast.stores.redis.server_info import EvictionWatch, ServerInfo, may_evict, read_server_info
from holdfast.stores.redis.workflow import RedisWorkflow


class RedisStore(ServerStore["_RedisResources"]):
    """A store in one namespace. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one.
    ``call_deadline``: seconds a call takes at most, if a caller waits for its answer."""

    def __init__(self, url: str, *, now: Callable[[], int] | None = None, call_deadline: float | None = None) -> None:
        super().__init__()
        self.call_deadline = call_deadline
        self.address = parse_url(url)
        self.url = self.address.server.shown
        self.now = now
        self.eviction = EvictionWatch()
        self.scripts = load_scripts("holdfast.stores.redis", "basics", "common")

    def _make_resources(self) -> _RedisResources:
        return _RedisResources(self)

    async def missing(self) -> str | None:
        pool = NamespacePool(self.address, now=None)
        try:
            return await describe_missing(pool)
        finally:
            await pool.close()

    def migration_sql(self, span: str) -> str:
        raise Invalid("migrations", span, "leave it out: Redis has no tables, opening the store is all there is to do")


class _RedisResources(LoopResources):
    """The connections of one event loop and the verbs on them."""

    pool: NamespacePool

    def __init__(self, store: RedisStore) -> None:
        specs, scripts, eviction = Specs(), store.scripts, store.eviction
        self.pool = pool = NamespacePool(
            store.address, now=store.now, lost=scripts["lost_writes"], call_deadline=store.call_deadline
        )
        self.notifications = notifications = RedisNotifications(pool)
        self.query = query = RedisQuery(pool, scripts, specs)
        cache = LimitCache(lambda: read_limits(pool))
        assigner = PartitionAssigner(pool, scripts, specs)
        self.queueing = RedisQueueing(pool, notifications, scripts, query, specs, eviction, cache, assigner)
        self.maintenance = RedisMaintenance(pool, notifications, scripts, specs, eviction)
        self.admin = RedisAdmin(pool, notifications, scripts, query, assigner)
        self.schedules = RedisSchedules(pool, notifications, scripts, eviction, cache)
        self.workflow = RedisWorkflow(pool, notifications, scripts, eviction, cache)
        self.limits = RedisLimits(pool, notifications, scripts, query, assigner, cache)
        self.health = RedisHealth(pool, scripts, query, store.url)
        self._scripts = store.scripts
        super().__init__()

    async def migrate(self) -> list[str]:
        return await apply_migrations(self.pool, self._scripts)


# ── the schema's version ──────────────────────────────────────────────────────────────────────────────────────────────
SCHEMA = 1
_INITIAL = "0001_initial"
_OLDEST, _WAITAOF = (6, 2), (7, 2)


async def apply_migrations(pool: NamespacePool, scripts: Mapping[str, Script]) -> list[str]:
    """Check the server and make the namespace ours; the names of the applied migrations."""
    facts = await read_server_info(pool)
    _check(facts, pool)
    schema = int(await pool.run(scripts["open"], SCHEMA))
    if schema < 0:
        raise StoreMismatch(
            f"{pool.place}: {pool.address.prefix}meta belongs to another program; give another ?namespace=NAME"
        )
    if schema > SCHEMA:
        raise StoreMismatch(f"the namespace is at {schema}, this Holdfast knows {SCHEMA}; upgrade to what wrote it")
    return [] if schema else [_INITIAL]


async def describe_missing(pool: NamespacePool) -> str | None:
    """Text for a missing store, which opening would make; None where there is one."""
    prefix = pool.address.prefix
    if await pool.run_command("EXISTS", f"{prefix}meta"):
        return None
    return f"{pool.server.shown} has no keys of Holdfast under {prefix!r} yet"


def _check(facts: ServerInfo, pool: NamespacePool) -> None:
    if facts.version < _OLDEST:
        raise ConfigError(f"{facts.name} is too old; Holdfast needs Redis 6.2 or newer, or Valkey")
    if may_evict(facts.policy):
        raise ConfigError(
            f"{pool.place} evicts keys when it is full (maxmemory-policy={facts.policy}) and would drop jobs; "
            "config set maxmemory-policy noeviction"
        )
    declared = pool.address.durability
    if declared == "waitaof" and facts.version < _WAITAOF:
        raise ConfigError(f"{facts.name} has no WAITAOF; set appendfsync always and declare ?durability=always")
    needed = "everysec" if declared == "waitaof" else declared
    if LEVELS.index(facts.durability) < LEVELS.index(needed):
        raise ConfigError(
            f"{pool.place} keeps less than was declared: {facts.settings}, which is durability={facts.durability}, "
            f"not {declared}; {facts.durability_remedy(needed)}, or accept it: ?durability={facts.durability}"
        )
