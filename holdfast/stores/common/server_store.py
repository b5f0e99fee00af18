"""Base of the stores on a server: one set of resources for each event loop, since connections belong to one."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from holdfast.core.errors import ConfigError, ForkedConnection, HoldfastError
from holdfast.core.portal import Portal, running_loop
from holdfast.stores.base import Admin, External, Health, Limits, Maintenance, Query, Queueing, Schedules, Workflow
from holdfast.stores.common.requests import jobs_of_topics

T = TypeVar("T")
_CLOSE_SECONDS = 5.0  # for a store to close in the event loop of another thread
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\[\]:@]*)(:\d{0,5})?")
CONNECT_BACKOFF, _MAX_BACKOFF = 0.02, 1.0  # seconds between tries to connect, before jitter
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED\S*\s*(?:certificate verify failed: )?([^(]*[^(. ])")
_BAD_FILES = re.compile(r"PEM lib|X509:|KEY_VALUES")
ResourcesT = TypeVar("ResourcesT", bound="LoopResources")


class LoopNotifications(Protocol):
    """Notifications of one event loop: waits for topics."""

    async def wait(self, topics: Sequence[str], timeout: float, is_done: Callable[[], Awaitable[bool]]) -> None: ...
    async def close(self) -> None: ...


class Closing(Protocol):
    """Protocol of an object that can be closed."""

    async def close(self) -> None: ...


class ConnectBackoff:
    """Pauses between failed tries to connect, shared by all calls: a server that comes back is not met by a herd."""

    def __init__(self) -> None:
        self._pause = CONNECT_BACKOFF
        self._last_error = ""
        self.connect_at = 0.0
        """Monotonic time before which there is no try."""

    async def connect(
        self, connect: Callable[[], Awaitable[T]], unreachable: tuple[type[Exception], ...], give_up: float
    ) -> T:
        """Connects after the pause. If that ends after ``give_up``, raises `ConnectionError` at once."""
        if self.connect_at > max(give_up, time.monotonic()):
            raise ConnectionError(self._last_error)
        await asyncio.sleep(max(0.0, self.connect_at - time.monotonic()))
        try:
            connection = await connect()
        except unreachable as error:
            self._last_error = one_line(error)
            self._pause = min(_MAX_BACKOFF, 2 * self._pause)
            self.connect_at = time.monotonic() + self._pause * random.uniform(0.5, 1.5)
            raise
        self._pause = CONNECT_BACKOFF
        return connection


def one_line(error: BaseException) -> str:
    """The text of a driver's error in one line."""
    silent = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return " ".join(str(error).split()).rstrip(".") or silent


def split_server_url(url: str, form: str, field: str = "url") -> SplitResult:
    """The parts of a URL that can only be read in one way, as in ``form``. The messages do not show it: parts of a
    password that was not percent-encoded may stand anywhere."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if "\0" in unquote(url):
        raise ConfigError(f"{field}: it holds a NUL character; write it without")
    hosts = "" if parts is None else parts.netloc.rpartition("@")[2]
    behind = "" if parts is None else parts.path + parts.query
    if parts is None or parts.fragment or "@" in behind or not all(map(_HOST.fullmatch, hosts.split(","))):
        raise ConfigError(
            f"{field}: it cannot be read as {form}; percent-encode : / ? # @ in user and password (as %3A %2F %3F %23 "
            "%40), and @ in path and parameters"
        )
    return parts


def check_tls(error: BaseException, place: str, parameter: str) -> None:
    """Raises `ConfigError` for what no retry mends: a certificate that is not trusted, unusable files of our own.
    ``parameter``: that of the URL for the file of who signed it."""
    text = one_line(error)
    if untrusted := _UNTRUSTED.search(text):
        remedy = f"give the file of who signed it as ?{parameter}=FILE, and the host as the certificate has it"
        if re.search("expired|not yet valid", text):
            remedy = "renew it, or correct the clock here"
        raise ConfigError(f"{place}: its certificate is not trusted: {untrusted[1]}; {remedy}") from error
    if _BAD_FILES.search(text):
        remedy = f"check {parameter}, and that the certificate and the key of this program belong together"
        raise ConfigError(f"{place}: the files given for TLS cannot be used: {text}; {remedy}") from error


class LoopResources(ABC):
    """The open parts of a store in one event loop, closed together. Made in that loop."""

    pool: Closing
    notifications: LoopNotifications
    queueing: Queueing
    maintenance: Maintenance
    admin: Admin
    query: Query
    schedules: Schedules
    limits: Limits
    workflow: Workflow
    health: Health

    def __init__(self) -> None:
        self._watching = asyncio.create_task(self._close_with_loop(), name="holdfast-connections")

    async def _close_with_loop(self) -> None:
        """``asyncio.run`` cancels all tasks before it ends: last chance to close connections cleanly."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.notifications.close()
            await self.pool.close()

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])

    @abstractmethod
    async def migrate(self) -> list[str]:
        """Check that the schema is ours, and bring it up to date; returns the applied migrations."""


class _PendingOpen:
    """A call of ``open`` that is under way, and the number of its callers."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.callers = 0


class ServerStore(ABC, Generic[ResourcesT]):
    """All of ``Store`` but what differs from server to server."""

    external: External | None = None
    """Needs no event loop where a caller's connection needs none."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, ResourcesT] = {}
        self._pending_opens: dict[asyncio.AbstractEventLoop, _PendingOpen] = {}
        self._migrated: list[str] = []  # migrations that opening applied
        self._portal: Portal | None = None
        self._callers = 0  # in the portal
        self._closing: asyncio.Task[None] | None = None  # keeps the task alive
        self._lock = threading.Lock()
        self._process = os.getpid()

    @abstractmethod
    def _make_resources(self) -> ResourcesT:
        """Returns the parts to hold for the running event loop, not connected yet."""

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_process()
        if loop in self._by_loop:
            return
        pending = self._pending_opens.get(loop)
        if pending is None:
            pending = self._pending_opens[loop] = _PendingOpen(loop.create_task(self._open_in(loop), context=Context()))
        pending.callers += 1
        try:
            await asyncio.shield(pending.task)
        finally:
            pending.callers -= 1
            if not pending.callers:
                del self._pending_opens[loop]
                pending.task.cancel()  # if its callers were cancelled
                await asyncio.wait([pending.task])

    async def _open_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Opens the store for all callers in this event loop: connections of each would be too many for the server."""
        resources = self._make_resources()
        try:
            self._migrated += await resources.migrate()
        except BaseException:
            await resources.close()
            raise
        for ended in [each for each in self._by_loop if each.is_closed()]:
            del self._by_loop[ended]
        self._by_loop[loop] = resources

    async def close(self) -> None:
        resources = self._by_loop.pop(asyncio.get_running_loop(), None)
        if resources is not None and self._process == os.getpid():
            await resources.close()
        portal = self._portal
        if portal is not None and self._process == os.getpid() and not portal.is_here():
            self._portal = None
            await asyncio.to_thread(portal.stop_thread)

    def close_in_all_loops(self) -> None:
        """Closes the store in every event loop, for a caller that cannot await ``close`` in each of them."""
        here = running_loop()
        for loop, resources in list(self._by_loop.items()):
            del self._by_loop[loop]
            if loop is here:
                self._closing = loop.create_task(resources.close())
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(resources.close(), loop).result(_CLOSE_SECONDS)
            elif not loop.is_closed() and here is None:
                loop.run_until_complete(resources.close())
        portal, self._portal = self._portal, None
        if portal is not None:
            portal.stop_thread()

    async def migrate(self) -> list[str]:
        applied, self._migrated = self._migrated, []
        return applied + await self._resources.migrate()

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._portal is None or self._process != os.getpid():
                self._portal, self._callers = Portal(at_exit=self.close), 0
            portal = self._portal
            self._callers += 1
        try:
            return portal.run(call)
        finally:
            self._leave(portal)

    def _leave(self, portal: Portal) -> None:
        """A call of ``blocking`` is over. The last one to see the store closed ends the portal and its thread."""
        with self._lock:
            if portal is not self._portal:
                return
            self._callers -= 1
            if not self._callers and portal.loop not in self._by_loop:
                portal.stop_thread()  # while no other can be opened: ``close`` ends the one it finds
                self._portal = None

    @property
    def _resources(self) -> ResourcesT:
        self._check_process()
        resources = self._by_loop.get(asyncio.get_running_loop())
        if resources is None:
            raise HoldfastError("this store is not open; await open() first, or use the application as a context")
        return resources

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ForkedConnection("this store was opened before fork(); make another one in the child process")

    @property
    def queueing(self) -> Queueing:
        return self._resources.queueing

    @property
    def maintenance(self) -> Maintenance:
        return self._resources.maintenance

    @property
    def admin(self) -> Admin:
        return self._resources.admin

    @property
    def query(self) -> Query:
        return self._resources.query

    @property
    def schedules(self) -> Schedules:
        return self._resources.schedules

    @property
    def limits(self) -> Limits:
        return self._resources.limits

    @property
    def workflow(self) -> Workflow:
        return self._resources.workflow

    @property
    def health(self) -> Health:
        return self._resources.health


async def wait_for_topics(
    notifications: LoopNotifications,
    any_finished: Callable[[Sequence[str]], Awaitable[bool]],
    topics: Sequence[str],
    timeout: float,
) -> None:
    """``Queueing.wait``: returns at once if a job that these topics wait for has ended already."""
    job_ids = jobs_of_topics(topics)

    async def is_done() -> bool:
        return bool(job_ids) and await any_finished(job_ids)

    await notifications.wait(topics, timeout, is_done)
