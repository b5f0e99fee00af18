"""The Redis store: its verb families in one namespace, composed for each event loop."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.models import Finding
from holdfast.stores.common.server_store import Opened, ServedStore
from holdfast.stores.redis import doctor, maintenance, repair
from holdfast.stores.redis.admin import RedisAdmin, RedisMaintenance
from holdfast.stores.redis.encoding import Kinds
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.eviction import EvictionWatch
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.queueing import RedisQueueing
from holdfast.stores.redis.scripts import load_scripts
from holdfast.stores.redis.url import parse_url


class RedisStore(ServedStore["_OpenedRedis"]):
    """A store in one namespace. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one.
    ``patience``: seconds a call takes at most, if a caller waits for its answer."""

    def __init__(self, url: str, *, now: Callable[[], int] | None = None, patience: float | None = None) -> None:
        super().__init__()
        self.patience = patience
        self.address = parse_url(url)
        self.url = self.address.server.shown
        self.now = now
        self.eviction = EvictionWatch()
        self.scripts = load_scripts(files("holdfast.stores.redis") / "scripts")

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _opening(self) -> _OpenedRedis:
        return _OpenedRedis(self)

    async def missing(self) -> str | None:
        links = NamespacePool(self.address, now=None)
        try:
            return await maintenance.missing(links)
        finally:
            await links.close()

    def migration_sql(self, span: str) -> str:
        raise Invalid("migrations", span, "leave it out: Redis has no tables, opening the store is all there is to do")

    # ── care ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def doctor(self) -> list[Finding]:
        return await doctor.run_checks(self._open.links, self.scripts)

    async def durability(self) -> Finding:
        facts = await maintenance.read_server_info(self._open.links)
        if maintenance.may_evict(facts.policy):  # nothing that it keeps is safe
            return doctor.check_eviction(facts)
        return doctor.durability(facts, self.address.durability)

    async def repair(self) -> list[Finding]:
        return await repair.repair(self.address, await self.server_time_us())

    async def backup(self, path: str) -> None:
        raise ConfigError(
            f"Redis is backed up by its own tools: redis-cli -u {self.url.partition('?')[0]} --rdb {path}, or copy its "
            "append-only folder"
        )


class _OpenedRedis(Opened):
    """The connections of one event loop and the verbs on them."""

    links: NamespacePool

    def __init__(self, store: RedisStore) -> None:
        kinds = Kinds()
        self.links = NamespacePool(store.address, now=store.now, lost=store.scripts["lost"], patience=store.patience)
        self.news = RedisNotifications(self.links)
        self.query = read = RedisQuery(self.links, store.scripts, kinds)
        self.queueing = RedisQueueing(self.links, self.news, store.scripts, read, kinds, store.eviction)
        self.admin = RedisAdmin(self.links, self.news, store.scripts, read, kinds, store.eviction)
        self.maintenance = RedisMaintenance(self.links, self.news, store.scripts, kinds, store.eviction)
        self._scripts = store.scripts
        super().__init__()

    async def migrate(self) -> list[str]:
        return await maintenance.migrate(self.links, self._scripts)
