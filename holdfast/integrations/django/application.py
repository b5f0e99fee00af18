"""The application of a Django project: settings ``HOLDFAST``, and jobs in the transactions of its callers."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, Conflict, HoldfastError, Unavailable, quote_value
from holdfast.core.models import NewJob, Submitted
from holdfast.core.validation import did_you_mean
from holdfast.integrations.django.database import RenewedConnections, check_test_access, database_url, is_url_of
from holdfast.settings.settings import SETTINGS
from holdfast.stores.base import Store
from holdfast.worker.executors.thread import ThreadExecutor

T = TypeVar("T")

TARGET = "holdfast.integrations.django.worker:app"
"""The application for workers, their child processes and the command line."""

PROGRAM = "python manage.py holdfast"
"""The command line, as messages name it."""

_MIGRATE = "python manage.py migrate creates them"

_is_blocking: contextvars.ContextVar[bool] = contextvars.ContextVar("holdfast_is_blocking", default=False)
"""True in calls of blocking callers, whose transaction is known already."""


class AfterCommit(NamedTuple):
    """Stands for the connection of a caller whose database does not hold the jobs: they are submitted on commit."""

    alias: str


class CommitCallback:
    """Submits jobs when their transaction has committed."""

    def __init__(self, app: DjangoHoldfast, jobs: Sequence[NewJob], alias: str) -> None:
        self.jobs = jobs
        self.submitter = app._submitter
        """Each test mode has its own."""
        self._app = app
        self._alias = alias
        self._is_under_test = app.under_test

    def __call__(self) -> None:
        """Submits the jobs; in a ``TestCase``, which calls this before its rollback, they are deleted after it.

        HoldfastError: the test mode in which they were enqueued has ended.
        """
        self._app.callbacks.discard(self)
        if self._is_under_test and self.submitter is not self._app._submitter:
            raise HoldfastError(
                "the test mode in which this was enqueued has ended; put the test mode outside: "
                "with testing.inline(app), self.captureOnCommitCallbacks(execute=True)"
            )
        connection = connections[self._alias]
        blocks = [block for block in connection.atomic_blocks if block._from_testcase]
        if blocks and self._app.derives_url and not self._app.under_test:
            self._app.rolled_back.append(RolledBack(connection, blocks[-1], [job.id for job in self.jobs]))
        self._app.run_blocking(self._app._submitter.submit_all(self.jobs))


class RolledBack(NamedTuple):
    """Jobs that a ``TestCase`` submitted to the temporary file: deleted when its transaction has been rolled back."""

    connection: Any
    block: Any
    ids: list[str]


class OfThread(NamedTuple):
    """Stands for the connection of an async caller, which belongs to the thread where asgiref runs the ORM."""

    connection: Any


class TestThread(ThreadExecutor):
    """Runs ``def`` handlers of test modes in the thread of the test: its transaction is found there alone."""

    async def run(self, function: Callable[[], T], context: contextvars.Context, cancel: Callable[[], None]) -> T:
        return await sync_to_async(context.run)(function)


def _given_settings() -> dict[str, Any]:
    """Returns ``HOLDFAST`` of the project, by names in lower case."""
    given = getattr(django_settings, "HOLDFAST", {})
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f'HOLDFAST: {quote_value(given)}; give settings such as {{"CONCURRENCY": 5}}')
    settings = {str(name).lower(): value for name, value in given.items()}
    for name in settings.keys() - SETTINGS.keys() - {"database"}:
        if did_you_mean(name, ["database"]):
            raise ImproperlyConfigured(f'HOLDFAST["{name.upper()}"] is not a setting; did you mean DATABASE?')
    return settings


class DjangoHoldfast(Holdfast):
    """The application of a Django project.

    Jobs submitted inside ``transaction.atomic()`` are part of the transaction if the database holds the jobs. If
    another store does, or the block is of another database, they are submitted by ``transaction.on_commit``.
    """

    def __init__(self) -> None:
        given = _given_settings()
        self.database: str = given.pop("database", "default")
        """Alias of the database whose transactions jobs join."""
        if self.database not in list(connections):
            known = ", ".join(connections)
            raise ImproperlyConfigured(
                f'HOLDFAST["DATABASE"]: {self.database!r} is no alias of DATABASES; give one of: {known}'
            )
        try:
            super().__init__(**{"app": TARGET, **given})
            self.derives_url = self.settings.source_of("url") == "default"
            self.follow_database()
        except ConfigError as error:
            raise ImproperlyConfigured(f"HOLDFAST: {error}") from error
        self.events.program = PROGRAM
        self.callbacks: weakref.WeakSet[CommitCallback] = weakref.WeakSet()
        """Callbacks of open transactions: Django drops those of a transaction that was rolled back."""
        self.rolled_back: list[RolledBack] = []
        self.handler_scope(RenewedConnections)

    # ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def holds_jobs(self) -> bool:
        """Returns True if the database of Django itself holds the jobs."""
        return is_url_of(self.settings.url, self.database)

    def follow_database(self) -> None:
        """Moves to the present database of the alias, if no setting names a store: test runners rename it."""
        if not self.derives_url or self.under_test:
            return
        url = database_url(self.database)
        if url != self.settings.url:
            self.release_database()
            self.settings = self.settings.replace_values(url=url)

    def release_database(self) -> None:
        """Closes the store, for a server that creates, copies or drops its database. The next call opens it again."""
        store, self._store = self._store, None
        if store is not None:
            from holdfast.testing.temporary_stores import close_from_outside  # projects serve requests without it

            close_from_outside(store)

    def _unopened(self) -> Store:
        self.follow_database()
        return super()._unopened()

    async def open_store(self) -> Store:
        self.follow_database()
        store = await super().open_store()
        if self.rolled_back and not self.under_test:
            await self._delete_rolled_back(store)
        return store

    async def _delete_rolled_back(self, store: Store) -> None:
        ended = [each for each in self.rolled_back if each.block not in each.connection.atomic_blocks]
        for each in ended:
            self.rolled_back.remove(each)
            await store.admin.delete(each.ids)

    # ── transactions ──────────────────────────────────────────────────────────────────────────────────────────────
    def _current_connection(self) -> Any:
        connection = connections[self.database]
        if self.derives_url and not self.under_test:
            check_test_access(connection)
        blocks = [
            each.alias
            for each in connections.all(initialized_only=True)
            if not all(block._from_testcase for block in each.atomic_blocks)  # those of a TestCase are not of its code
        ]
        is_manual = not connection.in_atomic_block and connection.connection is not None and not connection.autocommit
        if self.database in blocks or is_manual or (connection.in_atomic_block and not blocks):
            return connection if self.holds_jobs else AfterCommit(self.database)
        if len(blocks) > 1:
            remedy = f'name the one that jobs wait for in HOLDFAST["DATABASE"], now {self.database!r}'
            raise Conflict(f"transactions of {' and '.join(blocks)} are open: enqueue in one alone, or {remedy}")
        return AfterCommit(blocks[0]) if blocks else None

    def run_blocking(self, call: Coroutine[Any, Any, T], *, in_this_thread: bool = False) -> T:
        token = _is_blocking.set(True)
        try:
            return super().run_blocking(call, in_this_thread=in_this_thread)
        finally:
            _is_blocking.reset(token)

    async def _find_connection(self, given: Any) -> Any:
        if given is not None or _is_blocking.get():
            return given
        found = await sync_to_async(self._current_connection)()
        return None if found is None else OfThread(found)

    async def _submitted_within(self, connection: Any, jobs: Sequence[NewJob]) -> list[Submitted]:
        if isinstance(connection, OfThread):
            call = self._submitted_within(connection.connection, jobs)
            return await sync_to_async(self.run_blocking)(call, in_this_thread=True)
        if isinstance(connection, AfterCommit):
            callback = CommitCallback(self, jobs, connection.alias)
            self.callbacks.add(callback)
            transaction.on_commit(callback, using=connection.alias)
            return [Submitted(job.id, created=True) for job in jobs]
        try:
            return await super()._submitted_within(connection, jobs)
        except Unavailable as error:
            if _lacks_tables(connection):
                raise ConfigError(f"the tables of Holdfast are missing in {self.settings.url}: {_MIGRATE}") from error
            raise

    def _waiting_jobs(self) -> list[NewJob]:
        return [job for each in self.callbacks if each.submitter is self._submitter for job in each.jobs]

    def _waiting_jobs_hint(self) -> str:
        number = len(self._waiting_jobs())
        if not number:
            return ""
        waiting = "1 job waits" if number == 1 else f"{number} jobs wait"
        remedy = "wrap the call in captureOnCommitCallbacks(execute=True), and assert after that block has ended"
        return f" {waiting} for the commit: {remedy}."

    # ── test modes ────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_test_loop(self, call: Coroutine[Any, Any, None]) -> None:
        async def await_call() -> None:
            await call

        async_to_sync(await_call)()

    def _new_test_threads(self) -> ThreadExecutor:
        return TestThread(1)


def _lacks_tables(connection: Any) -> bool:
    """Returns True for a SQLite file without Holdfast's tables, which another connection cannot create meanwhile."""
    is_sqlite = isinstance(connection, BaseDatabaseWrapper) and connection.vendor == "sqlite"
    return is_sqlite and "holdfast_job" not in connection.introspection.table_names()
