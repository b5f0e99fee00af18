"""Jobs in open transactions of a test: the store does not show them, and a rollback takes them away.

The test's transaction may never be committed: a fixture rolls it back, and commits inside it end savepoints. A job
counts as committed when the session that submitted it has committed, as the application sees it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import Invalid
from holdfast.core.models import Job, JobState, Lease, NewJob, Settled, Submitted
from holdfast.core.portal import call_off_loop, running_loop
from holdfast.stores.connection_adapters import adapt_connection
from holdfast.stores.external_tx import ExternalTransactions

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

RunJobs = Callable[[Sequence[NewJob], bool], Coroutine[Any, Any, Sequence[Job]]]
"""Runs committed jobs; True: their transaction is inside one that is still open, so that the store lacks them."""

_REAL_COMMIT = (
    "tasks that call context.complete or step_in need a real commit in the database of the jobs: test them without a "
    "mode, in Django in a TransactionTestCase, or name the test's database: testing.inline(app, url=…)"
)
_READY = (JobState.QUEUED, JobState.WAITING)  # a job may wait for another one of its submission


@dataclass(frozen=True)
class PendingJob:
    """A job of a transaction that is not known to have ended."""

    new: NewJob
    job: Job
    connection: object
    """Tells whether its transaction is open: of a driver, of SQLAlchemy or of Django."""
    transaction: SessionTransaction | None
    """The transaction of a session that decides about the job; None if there is no session."""


class TrackedTransactions(ExternalTransactions):
    """Submits inside callers' transactions, and follows sessions of SQLAlchemy to their end."""

    def __init__(self, app: Holdfast, *, has_url: bool, run_jobs: RunJobs, is_inline: bool) -> None:
        """``has_url``: the test named the database. ``is_inline``: run the jobs of a session when it commits."""
        super().__init__(app.open_store, app._await_or_block)
        self._app = app
        self._has_url = has_url
        self._run_jobs = run_jobs
        self._is_inline = is_inline
        self._ran: set[str] = set()  # jobs whose copies have run
        self._pending: dict[str, PendingJob] = {}
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._committed: weakref.WeakSet[SessionTransaction] = weakref.WeakSet()

    async def submit(self, connection: object, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Submits on ``connection`` and remembers the created jobs."""
        if self._is_inline:
            jobs = [without_delay(job) for job in jobs]
        try:
            answers = await super().submit(connection, jobs)
        except Invalid as error:
            remedy = "name the test's database: testing.inline(app, url=…) or testing.manual(app, url=…)"
            raise self._with_remedy(error, remedy) from error
        session = _session_of(connection)
        held = await _driver_connection(connection, session)
        transaction = None if session is None else session.get_nested_transaction() or session.get_transaction()
        for job, answer in zip(jobs, answers, strict=True):
            if answer.created:
                self._pending[answer.job_id] = PendingJob(job, draft_pending(self._app, job), held, transaction)
        if session is not None and session not in self._sessions:
            self._follow(session)
        return answers

    async def complete(
        self, connection: object, lease: Lease, result: str | None, worker: str | None = None
    ) -> Settled:
        """Ends a running job on ``connection``."""
        await self.verify_connection(connection)
        return await super().complete(connection, lease, result, worker)

    async def verify_connection(self, connection: object) -> None:
        """Raises Invalid or Conflict for a connection by which a handler cannot complete its job or record a step."""
        try:
            await super().verify_connection(connection)
        except Invalid as error:
            raise self._with_remedy(error, _REAL_COMMIT) from error

    def _with_remedy(self, error: Invalid, remedy: str) -> Invalid:
        """Returns the error with the remedy if the connection is not on the private file of the test."""
        if error.field != "connection" or self._has_url:
            return error
        return Invalid("connection", error.value, remedy, "is not on the private file of this test")

    def find_pending(self) -> list[Job]:
        """Returns the jobs of transactions that are still open."""
        for job_id, each in list(self._pending.items()):
            if each.transaction is None and not is_in_transaction(each.connection):
                del self._pending[job_id]
        return [each.job for each in self._pending.values()]

    async def run_pending(self) -> Collection[str]:
        """Runs the ready jobs that no open session decides about; returns the ids of all jobs whose copies have run."""
        ended = [each for each in self._pending.values() if each.transaction is None]
        await self._run(ended)
        return self._ran

    # ── sessions of SQLAlchemy ────────────────────────────────────────────────────────────────────────────────────
    def _follow(self, session: Session) -> None:
        from sqlalchemy import event

        self._sessions.add(session)
        event.listen(session, "after_commit", self._mark_committed)
        event.listen(session, "after_transaction_end", self._end_transaction)

    def _mark_committed(self, session: Session) -> None:
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is not None:
            self._committed.add(transaction)

    def _end_transaction(self, _: Session, transaction: SessionTransaction) -> None:
        ours = {job_id: each for job_id, each in self._pending.items() if each.transaction is transaction}
        if transaction not in self._committed:
            for job_id in ours:
                del self._pending[job_id]
        elif transaction.parent is not None:
            self._pending |= {job_id: replace(each, transaction=transaction.parent) for job_id, each in ours.items()}
        elif ours:
            self._pending |= {job_id: replace(each, transaction=None) for job_id, each in ours.items()}
            if self._is_inline and self._app.under_test:
                _run_here(self._app, self._run(list(ours.values())))

    async def _run(self, jobs: Sequence[PendingJob]) -> None:
        inside = [each for each in jobs if is_in_transaction(each.connection)]
        committed = [each for each in jobs if each not in inside]
        for each in committed:
            self._pending.pop(each.new.id, None)
        if stored := [each.new for each in committed if self._is_inline and each.new.id not in self._ran]:
            await self._run_jobs(stored, False)
        self._pending |= {each.new.id: replace(each, transaction=None) for each in inside}
        ready = [each.new for each in inside if each.job.state in _READY and each.new.id not in self._ran]
        if ready:
            self._ran |= {job.id for job in ready}
            for job in await self._run_jobs(ready, True):
                self._pending[job.id] = replace(self._pending[job.id], job=job)


def draft_pending(app: Holdfast, new: NewJob) -> Job:
    """Returns the job as its submission by ``app`` would store it now."""
    now = app.now() if app.now is not None else time.time_ns() // 1000
    delay = 0 if new.delay is None else round(new.delay.total_seconds() * 1e6)
    run_at = now + delay if new.run_at_us is None else max(now, new.run_at_us)
    is_later = run_at > now
    return Job(
        id=new.id,
        task=new.task,
        queue=new.queue,
        payload=new.payload,
        claims=0,
        attempts=0,
        max_attempts=new.max_attempts,
        priority=new.priority,
        lost_leases=0,
        run_at_us=run_at,
        created_at_us=now,
        options=new.options,
        state=JobState.WAITING if new.waits else JobState.SCHEDULED if is_later else JobState.QUEUED,
        key=new.key,
    )


def without_delay(job: NewJob) -> NewJob:
    """Returns the job without a delay."""
    return msgspec.structs.replace(job, delay=None, run_at_us=None)


def is_in_transaction(connection: object) -> bool:
    """Returns True if a transaction is open on a connection of a driver, of SQLAlchemy or of Django."""
    with suppress(Exception):  # closed, or given back to its pool
        for name in ("is_in_transaction", "in_transaction", "in_atomic_block"):
            answer = getattr(connection, name, None)
            if answer is not None:
                return bool(answer() if callable(answer) else answer)
        return int(connection.info.transaction_status) in (1, 2, 3)  # type: ignore[attr-defined]  # psycopg; 4: closed
    return False


def _session_of(connection: object) -> Session | None:
    """Returns the session that decides about the transaction, if any."""
    names = {f"{each.__module__}.{each.__name__}" for each in type(connection).__mro__}
    if names & {"sqlalchemy.orm.scoping.scoped_session", "sqlalchemy.ext.asyncio.scoping.async_scoped_session"}:
        connection = connection()  # type: ignore[operator]  # the session of this scope
        names = {f"{each.__module__}.{each.__name__}" for each in type(connection).__mro__}
    if "sqlalchemy.ext.asyncio.session.AsyncSession" in names:
        session: Session = connection.sync_session  # type: ignore[attr-defined]
        return session
    return connection if "sqlalchemy.orm.session.Session" in names else None  # type: ignore[return-value]


async def _driver_connection(connection: object, session: Session | None) -> object:
    """Returns an object that tells whether the outermost transaction is open."""
    if session is None:
        return connection
    physical = (await adapt_connection(connection)).physical
    return physical if physical is not None else session.connection().connection.driver_connection


def _run_here(app: Holdfast, call: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine inside a blocking call of SQLAlchemy, on the event loop of the caller if there is one."""
    from sqlalchemy.util import await_only
    from sqlalchemy.util.concurrency import in_greenlet

    if running_loop() is not None and in_greenlet():
        await_only(call)
    else:
        call_off_loop(lambda: app.run_blocking(call))
