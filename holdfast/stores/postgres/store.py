"""The PostgreSQL store: its verb families on one schema, composed for each event loop."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from holdfast.stores.base import TransportQueries
from holdfast.stores.common.named_sql import chosen_migrations, load_migrations, load_statements
from holdfast.stores.common.server_store import Opened, ServedStore
from holdfast.stores.postgres import schema
from holdfast.stores.postgres.admin import PostgresAdmin
from holdfast.stores.postgres.encoding import number_parameters
from holdfast.stores.postgres.external_tx import PostgresExternal
from holdfast.stores.postgres.health import PostgresHealth
from holdfast.stores.postgres.maintenance import PostgresMaintenance
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool, parse_url
from holdfast.stores.postgres.query import PostgresQuery
from holdfast.stores.postgres.queueing import PostgresQueueing
from holdfast.stores.postgres.transport_queries import PostgresTransportQueries


class PostgresStore(ServedStore["_OpenedPostgres"]):
    """A store in one schema. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one.
    ``patience``: seconds a call takes at most, if a caller waits for its answer."""

    def __init__(self, url: str, *, now: Callable[[], int] | None = None, patience: float | None = None) -> None:
        super().__init__()
        self.patience = patience
        self.address = parse_url(url)
        self.url = self.address.shown
        self.now = now
        here = files("holdfast.stores.postgres")
        self.sql = number_parameters(load_statements(here / "queries.sql"), self.address.schema)
        self.migrations = load_migrations(here / "migrations")
        self.external = PostgresExternal(lambda: self._open.links, self.sql, now, self.url)

    def _opening(self) -> _OpenedPostgres:
        return _OpenedPostgres(self)

    async def missing(self) -> str | None:
        links = PostgresPool(self.address, now=None)
        try:
            return await schema.missing(links)
        finally:
            await links.close()

    def migration_sql(self, span: str) -> str:
        return schema.render_migrations(chosen_migrations(self.migrations, span), self.address.schema)

    @property
    def transport_queries(self) -> TransportQueries:
        return self._open.transport_queries


class _OpenedPostgres(Opened):
    """The connections of one event loop and the verbs on them."""

    links: PostgresPool
    news: PostgresNotifications

    def __init__(self, store: PostgresStore) -> None:
        self.links = links = PostgresPool(store.address, now=store.now, patience=store.patience)
        self.news = news = PostgresNotifications(links)
        sql = store.sql
        self.query = query = PostgresQuery(links, sql)
        self.queueing = queueing = PostgresQueueing(links, news, sql, query)
        self.maintenance = maintenance = PostgresMaintenance(links, news, sql, queueing.claim_ready)
        self.admin = PostgresAdmin(links, news, sql, queueing.claim_ready)
        self.health = PostgresHealth(links, sql, query)
        self.transport_queries = PostgresTransportQueries(links, news, sql, queueing, maintenance)
        self._migrations = store.migrations
        super().__init__()

    async def migrate(self) -> list[str]:
        return await schema.migrate(self.links, self._migrations)
