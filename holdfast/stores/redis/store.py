"""The Redis store: its verb families in one namespace, composed for each event loop."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from holdfast.core.errors import Invalid
from holdfast.stores.common.server_store import Opened, ServedStore
from holdfast.stores.connections.redis import load_scripts
from holdfast.stores.redis import schema
from holdfast.stores.redis.admin import RedisAdmin
from holdfast.stores.redis.encoding import Kinds
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.health import RedisHealth
from holdfast.stores.redis.maintenance import RedisMaintenance
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.queueing import RedisQueueing
from holdfast.stores.redis.server_info import EvictionWatch
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
        self.scripts = load_scripts(files("holdfast.stores.redis") / "scripts", "common")

    def _opening(self) -> _OpenedRedis:
        return _OpenedRedis(self)

    async def missing(self) -> str | None:
        links = NamespacePool(self.address, now=None)
        try:
            return await schema.missing(links)
        finally:
            await links.close()

    def migration_sql(self, span: str) -> str:
        raise Invalid("migrations", span, "leave it out: Redis has no tables, opening the store is all there is to do")


class _OpenedRedis(Opened):
    """The connections of one event loop and the verbs on them."""

    links: NamespacePool

    def __init__(self, store: RedisStore) -> None:
        kinds, scripts, eviction = Kinds(), store.scripts, store.eviction
        self.links = links = NamespacePool(store.address, now=store.now, lost=scripts["lost"], patience=store.patience)
        self.news = news = RedisNotifications(links)
        self.query = query = RedisQuery(links, scripts, kinds)
        self.queueing = RedisQueueing(links, news, scripts, query, kinds, eviction)
        self.maintenance = RedisMaintenance(links, news, scripts, kinds, eviction)
        self.admin = RedisAdmin(links, news, scripts, query)
        self.health = RedisHealth(links, scripts, query, store.url)
        self._scripts = store.scripts
        super().__init__()

    async def migrate(self) -> list[str]:
        return await schema.migrate(self.links, self._scripts)
