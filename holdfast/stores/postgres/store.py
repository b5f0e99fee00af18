"""The PostgreSQL store: its verb families on one schema, composed for each event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.resources import files

from holdfast.core.errors import ConfigError
from holdfast.core.models import (
    DeliveredClaim,
    Finding,
    JobState,
    Lease,
    NewJob,
    Overtaken,
    Settled,
    Submitted,
    TxOutcome,
)
from holdfast.stores.base import StatementFlow
from holdfast.stores.common.named_sql import chosen_migrations, load_migrations, load_statements
from holdfast.stores.common.requests import WorkerClaim
from holdfast.stores.common.server_store import Opened, ServedStore
from holdfast.stores.postgres import external_tx, maintenance
from holdfast.stores.postgres.admin import PostgresAdmin, PostgresMaintenance
from holdfast.stores.postgres.doctor import durability, run_checks
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool, parse_url
from holdfast.stores.postgres.query import PostgresQuery
from holdfast.stores.postgres.queueing import PostgresQueueing
from holdfast.stores.postgres.statements import number_parameters
from holdfast.stores.postgres.transport_queries import Announcing


class PostgresStore(ServedStore["_OpenedPostgres"]):
    """A store in one schema. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one.
    ``patience``: seconds a call takes at most, if a caller waits for its answer."""

    dialect = "postgresql"

    def __init__(self, url: str, *, now: Callable[[], int] | None = None, patience: float | None = None) -> None:
        super().__init__()
        self.patience = patience
        self.address = parse_url(url)
        self.url = self.address.shown
        self.now = now
        here = files("holdfast.stores.postgres")
        self.sql = number_parameters(load_statements(here / "queries.sql"), self.address.schema)
        self.migrations = load_migrations(here / "migrations")
        self._identity: external_tx.Identity | None = None

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _opening(self) -> _OpenedPostgres:
        return _OpenedPostgres(self)

    async def missing(self) -> str | None:
        links = PostgresPool(self.address, now=None)
        try:
            return await maintenance.missing(links)
        finally:
            await links.close()

    def migration_sql(self, span: str) -> str:
        return maintenance.render_migrations(chosen_migrations(self.migrations, span), self.address.schema)

    # ── inside the caller's transaction ───────────────────────────────────────────────────────────────────────
    async def verify(self) -> StatementFlow[None]:
        if self._identity is None:
            self._identity = await external_tx.database_identity(self._open.links, self.sql)
        return external_tx.verify(self.sql, self._identity, self.url)

    def submit_steps(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        return external_tx.submit_steps(self.sql, jobs, None if self.now is None else self.now())

    def complete_steps(self, lease: Lease, result: str | None) -> StatementFlow[Settled]:
        return external_tx.complete_steps(self.sql, lease, result, None if self.now is None else self.now())

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        return await external_tx.tx_outcome(self._open.links, self.sql, lease)

    # ── for a transport ───────────────────────────────────────────────────────────────────────────────────────
    async def claim_delivered(
        self,
        worker: str,
        wants: Mapping[str, int],
        ids: Sequence[str],
        *,
        limit: int,
        lease_for: timedelta,
        startable: int,
        elsewhere: bool = False,
    ) -> DeliveredClaim:
        wish = WorkerClaim(worker, wants, limit, lease_for, startable, False, ids, False, elsewhere)
        return await self._open.queueing.claim_delivered(wish)

    async def make_ready(self, queues: Sequence[str] | None, *, limit: int) -> dict[str, list[str]]:
        return await self._open.maintenance.make_ready(queues, limit=limit)

    async def ready_queues(self) -> list[str]:
        return await self._open.announcing.ready_queues()

    async def count_ready(self, mosts: Mapping[str, int]) -> dict[str, int]:
        return await self._open.announcing.count_ready(mosts)

    async def oldest_ready(self, queue: str, *, limit: int, aged: timedelta) -> list[str]:
        return await self._open.announcing.oldest_ready(queue, limit=limit, aged=aged)

    async def find_overtaken(self, queue: str, front: Sequence[str], *, margin: timedelta, limit: int) -> Overtaken:
        return await self._open.announcing.find_overtaken(queue, front, margin=margin, limit=limit)

    async def locate_jobs(self, job_ids: Sequence[str]) -> dict[str, tuple[str, JobState]]:
        return await self._open.announcing.locate_jobs(job_ids)

    async def dead_queues(self) -> list[str]:
        return await self._open.announcing.dead_queues()

    async def newest_dead(self, queue: str, *, limit: int) -> list[str]:
        return await self._open.announcing.newest_dead(queue, limit=limit)

    async def wake_waiters(self, topics: Sequence[str]) -> None:
        self._open.news.notify_committed(topics)

    # ── care ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def doctor(self) -> list[Finding]:
        return await run_checks(self._open.links, self.sql)

    async def durability(self) -> Finding:
        return await self._open.links.call(durability)

    async def repair(self) -> list[Finding]:
        return []  # the database's own constraints hold

    async def backup(self, path: str) -> None:
        schema = self.address.schema
        raise ConfigError(
            f"PostgreSQL is backed up by its own tools; for the queue alone: pg_dump --format=custom --schema={schema} "
            f"--file={path} '{self.address.libpq}'"
        )


class _OpenedPostgres(Opened):
    """The connections of one event loop and the verbs on them."""

    links: PostgresPool
    news: PostgresNotifications
    queueing: PostgresQueueing
    admin: PostgresAdmin
    maintenance: PostgresMaintenance

    def __init__(self, store: PostgresStore) -> None:
        self.links = PostgresPool(store.address, now=store.now, patience=store.patience)
        self.news = PostgresNotifications(self.links)
        self.queueing = PostgresQueueing(self.links, self.news, store.sql)
        self.admin = PostgresAdmin(self.links, self.news, store.sql, self.queueing.claim_ready)
        self.maintenance = PostgresMaintenance(self.links, self.news, store.sql, self.queueing.claim_ready)
        self.query = PostgresQuery(self.links, store.sql)
        self.announcing = Announcing(self.links, store.sql)
        self._migrations = store.migrations
        super().__init__()

    async def migrate(self) -> list[str]:
        return await maintenance.migrate(self.links, self._migrations)
