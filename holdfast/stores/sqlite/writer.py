"""The writer: group commit under a fair lock among processes, checkpoints included.

Callers with an event loop hand an operation to the writer's thread; what has gathered while the last commit was under
way shares the next transaction. Callers without one write in their own thread: a hop to another would cost more than
the commit. Either way an operation runs inside one BEGIN IMMEDIATE … COMMIT and its answer is given after the commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.portal import running_loop
from holdfast.stores.sqlite.connection import DRIVER_ERRORS, bare_connection, connect, translate_error
from holdfast.stores.sqlite.identity import FileIdentity
from holdfast.stores.sqlite.notifications import SqliteNotifications

T = TypeVar("T")

_GROUP = 200  # operations that may share a transaction
_CHECKPOINT_PAGES = 1000  # in the log, of whatever program, before they are copied into the file
_WITHDRAW_EVERY = 0.1  # seconds between tries to withdraw a call after its deadline


class Transaction:
    """Transaction of an operation: the connection, one instant for all of it, and the topics to notify."""

    __slots__ = ("connection", "ended", "now_us", "topics")

    def __init__(self, connection: sqlite3.Connection, now_us: int) -> None:
        self.connection = connection
        self.now_us = now_us
        self.topics: set[str] = set()
        self.ended: list[str] = []  # ids of jobs that reached a terminal state

    def notify_topic(self, topic: str) -> None:
        """Adds a topic whose waiters are woken after the commit."""
        self.topics.add(topic)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo the writes inside if it raises, and nothing else of the transaction."""
        self.connection.execute("savepoint batch")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:  # an I/O error has rolled back all of it, savepoints included
                self.connection.execute("rollback to batch")
                self.connection.execute("release batch")
            raise
        self.connection.execute("release batch")


Operation = Callable[[Transaction], T]
Precheck = Callable[[], T | None]


class _PendingChange(Generic[T]):
    """An operation queued for the writer thread."""

    __slots__ = ("_operation", "_claimed", "error", "future", "precheck", "loop", "result", "timer")
    timer: asyncio.TimerHandle

    def __init__(self, operation: Operation[T], precheck: Precheck[T] | None, loop: asyncio.AbstractEventLoop) -> None:
        self._operation = operation
        self._claimed = threading.Lock()  # by its transaction, or by a caller whose deadline has passed
        self.precheck = precheck
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.result: T | None = None
        self.error: Exception | None = None

    def run_operation(self, transaction: Transaction) -> T | None:
        """Runs the operation, unless its caller has withdrawn it."""
        return self._operation(transaction) if self._claimed.acquire(blocking=False) else None

    def fail_pending(self, error: Exception) -> None:
        """Fails the call with this error, unless its transaction has begun."""
        if self._claimed.acquire(blocking=False) and not self.future.done():
            self.future.set_exception(error)


class Writer:
    """The write connection of one open store.

    ``call_deadline``: seconds after which a call from an event loop is withdrawn while another program has the
    write lock.
    """

    def __init__(
        self,
        path: str,
        now: Callable[[], int],
        notifications: SqliteNotifications,
        identity: FileIdentity,
        call_deadline: float | None = None,
    ) -> None:
        self._path = path
        self._identity = identity
        self._now = now
        self._notifications = notifications
        self._call_deadline = call_deadline
        self._locked_out = False  # waiting for the lock
        self.connection = connect(path)
        self._checkpoint_lock = bare_connection(path, timeout=0.0, shared=True)  # has the write lock during checkpoints
        self._fair_lock = FairLock(path)
        self._connection_lock = threading.Lock()  # held while another program writes, so starting has its own
        self._start_lock = threading.Lock()
        self._pending: queue.SimpleQueue[_PendingChange[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._checkpoint_at = _CHECKPOINT_PAGES
        self._wal_header = b""
        self._version = 0

    # ── callers ───────────────────────────────────────────────────────────────────────────────────────────────
    async def call(self, operation: Operation[T], precheck: Precheck[T] | None = None) -> T:
        """Runs ``operation`` in a transaction. ``precheck`` may answer from a reader first, without the write lock."""
        loop = running_loop()
        if loop is None:
            return self.write(operation, precheck)
        if self._thread is None:
            self._start()
        pending = _PendingChange(operation, precheck, loop)
        self._pending.put(pending)
        if self._call_deadline is None:
            return await pending.future
        pending.timer = loop.call_later(self._call_deadline, self._withdraw_call, pending)
        try:
            return await pending.future
        finally:
            pending.timer.cancel()

    def _withdraw_call(self, pending: _PendingChange[Any]) -> None:
        """Withdraw a call that waits for another program; one that waits for our own commits goes on waiting."""
        if self._locked_out:
            text = f"{self._path} is busy: another program has held its write lock for {self._call_deadline:g} s"
            outcome = "nothing was changed"
            pending.fail_pending(Unavailable(f"{text}; {outcome}", outcome=outcome))
        pending.timer = pending.loop.call_later(_WITHDRAW_EVERY, self._withdraw_call, pending)

    def _start(self) -> None:
        with self._start_lock:  # two event loops may come here at once
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-writer", daemon=True)
                self._thread.start()

    def write(self, operation: Operation[T], precheck: Precheck[T] | None = None) -> T:
        """Like ``call``, for a thread without an event loop: runs in this thread."""
        if precheck is not None and (seen := precheck()) is not None:
            return seen
        with self._connection_lock:
            transaction, result = self._transact(operation)
        self._notify_waiters(transaction)
        return result

    def data_version(self) -> int:
        """A number that changes with other programs' commits. Our own are notified as they happen, and a
        worker that took its own heartbeats for news would send one again for each of them."""
        if self._connection_lock.acquire(blocking=False):
            try:
                (self._version,) = self.connection.execute("pragma data_version").fetchone()
            except DRIVER_ERRORS as error:
                raise translate_error(error, self._path) from error
            finally:
                self._connection_lock.release()
        return self._version

    def close(self) -> None:
        """Write the pending operations, then close the file and release the locks."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()
            self._thread = None
            self._fail_late_calls()
        with self._connection_lock:  # not under a blocking caller that is writing
            self._checkpoint_lock.close()
            self.connection.close()
            self._fair_lock.close()

    def _fail_late_calls(self) -> None:
        """Fails calls that came while the store was being closed."""
        late: list[_PendingChange[Any]] = []
        while not self._pending.empty():
            pending = self._pending.get()
            if pending is not None:
                pending.error = HoldfastError("the store was closed before this call could be made")
                late.append(pending)
        _answer(late)

    def drop_lock_files(self) -> None:
        """In a forked child: drop the lock files, lest it holds the parent's locks after the parent's death."""
        self._fair_lock.close()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        is_open = True
        while is_open:
            group = self._next_group()
            if group[-1] is None:
                is_open = False
            members = [each for each in group if each is not None and not each.future.cancelled()]
            left = [each for each in members if not _answered_by_precheck(each)]
            if left:
                self._write_group(left)
            _answer(members)

    def _next_group(self) -> list[_PendingChange[Any] | None]:
        group = [self._pending.get()]
        while group[-1] is not None and len(group) < _GROUP and not self._pending.empty():
            group.append(self._pending.get())
        return group

    def _write_group(self, group: list[_PendingChange[Any]]) -> None:
        try:
            with self._connection_lock:
                if len(group) == 1:
                    transaction, group[0].result = self._transact(group[0].run_operation)
                else:
                    transaction = self._write_in_one_transaction(group)
            self._notify_waiters(transaction)
        except Exception as error:
            for pending in group:
                pending.error = pending.error or error

    # ── transactions ──────────────────────────────────────────────────────────────────────────────────────────
    def _write_in_one_transaction(self, group: list[_PendingChange[Any]]) -> Transaction:
        """Runs the operations in one transaction, each in a savepoint: one that fails undoes none of the others."""

        def run_all(transaction: Transaction) -> None:
            for pending in group:
                transaction.connection.execute("savepoint operation")
                try:
                    pending.result = pending.run_operation(transaction)
                except Exception as error:
                    if not transaction.connection.in_transaction:  # an I/O error has rolled back all operations
                        raise
                    pending.error = translate_error(error, self._path) if isinstance(error, DRIVER_ERRORS) else error
                    transaction.connection.execute("rollback to operation")
                transaction.connection.execute("release operation")

        transaction, _ = self._transact(run_all)
        return transaction

    def _transact(self, operation: Operation[T]) -> tuple[Transaction, T]:
        """Runs one transaction under the fair lock, and the checkpoint that may be due after it."""
        connection = self.connection
        self._locked_out = True
        self._fair_lock.acquire_lock()
        try:
            self._identity.check_files()
            connection.execute("begin immediate")
            self._locked_out = False
            try:
                transaction = Transaction(connection, self._now())
                result = operation(transaction)
                connection.execute("commit")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise
            # Looked at again: a program that opened the file meanwhile may not see this commit; then it is refused.
            try:
                self._identity.check_side_files()
                self._checkpoint_if_due()
            except OSError:  # of looking at the files: the transaction is committed
                pass  # suppress() would take half a microsecond of each commit
            return transaction, result
        except DRIVER_ERRORS as error:
            raise translate_error(error, self._path) from error
        except OSError as error:  # of the lock files, or of looking at the file
            raise Unavailable(f"{self._path} cannot be used right now: {error}") from error
        finally:
            self._locked_out = False
            self._fair_lock.release_lock()

    def _checkpoint_if_due(self) -> None:
        """Copy the log into the file once it is long, whichever programs wrote it.

        Another connection holds SQLite's own write lock meanwhile, so not even an outsider writes; a mode that takes
        the lock itself goes on without it where it is taken. The log keeps its length: a commit that need not lengthen
        a file syncs twice as fast. The first commit after a complete copy begins the log anew. A reader or a writer in
        the way makes it do less, and the log grow on; the next attempt comes after as many pages again.
        """
        if self._wal_header != self._identity.wal_header:
            self._wal_header, self._checkpoint_at = self._identity.wal_header, _CHECKPOINT_PAGES
        if not self._identity.wal_has_frame(self._checkpoint_at):
            return
        self._checkpoint_at += _CHECKPOINT_PAGES
        # A full disk may stop it. The transaction before it is committed and must not be reported as failed; a later
        # commit that fails gets its own error.
        with suppress(*DRIVER_ERRORS):
            self._checkpoint_lock.execute("begin immediate")
            try:
                ((_, pages, _),) = self.connection.execute("pragma wal_checkpoint(passive)").fetchall()
                self._checkpoint_at = pages + _CHECKPOINT_PAGES
            finally:
                self._checkpoint_lock.execute("rollback")

    def _notify_waiters(self, transaction: Transaction) -> None:
        """Wakes waiters after a commit. An error here must not fail the committed operation."""
        try:
            if transaction.ended and self._notifications.has_end_waiters():
                transaction.topics.update(f"job:{job_id}" for job_id in transaction.ended)
            if transaction.topics:
                self._notifications.notify_committed(transaction.topics)
        except Exception:
            logging.getLogger(__name__).exception("waking the waiters failed; they poll the file meanwhile")


def _answered_by_precheck(pending: _PendingChange[Any]) -> bool:
    if pending.precheck is None:
        return False
    try:
        pending.result = pending.precheck()
    except Exception as error:  # whatever it is, it is its caller's, and must not end the writer's thread
        pending.error = error
        return True
    return pending.result is not None


def _answer(group: list[_PendingChange[Any]]) -> None:
    """Makes one call into each loop, for any number of its futures."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_PendingChange[Any]]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, members in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: no waiter is left there
            loop.call_soon_threadsafe(_resolve, members)


def _resolve(members: list[_PendingChange[Any]]) -> None:
    for pending in members:
        if pending.future.done():
            continue
        if pending.error is not None:
            pending.future.set_exception(pending.error)
        else:
            pending.future.set_result(pending.result)


LOCK_TIMEOUT = 2.0  # seconds
_SKIP_FAIRNESS_SECONDS = 5.0
_PAUSES = (0.00005, 0.0001, 0.0002, 0.0005)  # seconds between looks: short at first, a hand-over takes about as long


class FairLock:
    """Two lock files beside the database, of the writer and of the next in line, and a lock among threads."""

    def __init__(self, path: str) -> None:
        self._threads = threading.Lock()
        self._next_lock = _open(path + "-turn")
        self._writer_lock = _open(path + "-lock")
        # Empty once they are closed: another file may have their numbers then.
        self._files: tuple[int, ...] = (self._next_lock, self._writer_lock)
        self._locked = False
        self._skip_fairness_until = 0.0  # after a time-out: a process is frozen, and none waits for it

    def acquire_lock(self) -> None:
        """Returns once this thread may write, or after the time-out, without fairness; ``release_lock`` must follow."""
        self._threads.acquire()
        try:
            now = time.monotonic()
            deadline = now if now < self._skip_fairness_until else now + LOCK_TIMEOUT
            is_next = _take(self._next_lock, deadline)
            self._locked = _take(self._writer_lock, deadline)
            self._skip_fairness_until = 0.0 if is_next and self._locked else time.monotonic() + _SKIP_FAIRNESS_SECONDS
            if is_next:
                fcntl.flock(self._next_lock, fcntl.LOCK_UN)
        except BaseException:  # an interrupt from the keyboard, while it has either file
            with suppress(OSError):
                fcntl.flock(self._writer_lock, fcntl.LOCK_UN)
                fcntl.flock(self._next_lock, fcntl.LOCK_UN)
            self._threads.release()
            raise

    def release_lock(self) -> None:
        """Lets the next writer go on."""
        if self._locked:
            fcntl.flock(self._writer_lock, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Closes the files."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(file: int, deadline: float) -> bool:
    """Returns True if the lock was had before the deadline."""
    tries = 0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1
        else:
            return True
