"""Connections to PostgreSQL: opened within a deadline, retried with jitter, dropped while an answer may be under way.

Every statement has a deadline on our side. A connection whose statement failed for any reason but a refusal by the
server is never used again: a late answer must not reach the next caller. A call that finds the server away tries again
for ``RETRY_FOR`` seconds, then raises Unavailable; callers that go on for ever (the worker's services) call again.
If a caller waits for the answer, over HTTP, a call has one deadline for all that it waits for: a server that is
frozen, or a network that swallows everything, refuses no connection.
"""

from __future__ import annotations

import asyncio
import configparser
import os
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from holdfast.core.errors import Busy, ConfigError, HoldfastError, Invalid, StoreMismatch, TooBroad, Unavailable
from holdfast.stores.common.server_store import CONNECT_BACKOFF, ConnectBackoff, check_tls, one_line, split_server_url
from holdfast.stores.common.unconfirmed import perhaps_done
from holdfast.stores.postgres.commit_status import Commit, begun_commit, is_committed
from holdfast.stores.postgres.encoding import NumberedStatement

T = TypeVar("T")
Connection: TypeAlias = Any  # asyncpg.Connection: the driver ships no types
Rows: TypeAlias = list[Any]
Fetch = Callable[..., Awaitable[Rows]]
"""Runs a named statement inside a transaction."""

RETRY_FOR = 1.5  # seconds a call waits for a server that is away: over HTTP its answer comes within two
DEADLINE = 10.0  # seconds a statement may take
_CONNECT = 3.0  # seconds until a host that does not answer is given up
_CLOSED = "this store was closed meanwhile"
_NEEDLESS = re.compile(
    "channel_binding|connect_timeout|fallback_application_name|gssencmode|keepalives.*|tcp_user_timeout"
)
_UNSUPPORTED = re.compile(
    "(channel_binding|gssencmode)=require|target_session_attrs=(read-only|standby)|sslrootcert=system"
)
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_SEARCH, _SEARCH_WAIT = 0.65, 0.2  # of the call deadline: for a search, and for the wait for its slot
_CANCEL_SECONDS = 0.5  # seconds to have the server give up what was given up here
_LOCK = 0.8  # of the call deadline: for the wait for a locked row
_CONFLICTS = 8  # times a deadlock or serialization failure is tried again

_UNREACHABLE = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,
)
_CONFLICT = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
_FULL = (asyncpg.InsufficientResourcesError, asyncpg.OperatorInterventionError)
_MISFITS = (asyncpg.UndefinedObjectError, asyncpg.InvalidParameterValueError, asyncpg.CantChangeRuntimeParamError)
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)


class RowLocked(Unavailable):
    """Another transaction has held a row for longer than the statement waits."""

    affects_all = False


class SearchKind(Enum):
    """Purpose of a search by a filter. Of each kind few go at a time, if a caller waits: the other connections are
    for all others, and what may take long is in the way of its own kind only.
    """

    CHANGE = "change"
    UNSUCCESSFUL = "unsuccessful"  # mostly quick
    OTHER = "other"


_MAX_SEARCHES = {SearchKind.CHANGE: 2, SearchKind.UNSUCCESSFUL: 1, SearchKind.OTHER: 2}


class UniqueViolation(HoldfastError):
    """A row of that key is there already."""


class PostgresAddress(NamedTuple):
    """Address of the jobs: the parts of a PostgreSQL URL."""

    dsn: str
    schema: str
    pooled: bool
    """Behind a pooler in transaction mode: no prepared statements, no LISTEN; workers poll."""
    shown: str
    """The URL without its password."""
    libpq: str
    """The same for PostgreSQL's own programs, which do not know our parameters."""


def parse_url(url: str) -> PostgresAddress:
    """``postgresql://user@host:port,host:port/database?schema=holdfast&pooled=1``; other parameters are libpq's."""
    parts = split_server_url(url, "postgresql://user:password@host:port/database")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    places = f"{parts.netloc.rpartition('@')[2]},{options.get('port', '')}"
    if any(int(port) > 65_535 for port in re.findall(r"[:,](\d+)(?=,|$)", places)):  # resolvers take it modulo 65536
        raise ConfigError(f"url: {places.rstrip(',')!r} has a port over 65535; correct it")
    schema = options.pop("schema", "holdfast")
    if not schema.isascii() or not schema.replace("_", "a").isalnum() or schema[0].isdigit() or len(schema) > 48:
        raise ConfigError(f"url: schema={schema!r} is not valid; give a name of ASCII letters, digits and _, up to 48")
    pooled = options.pop("pooled", "0")
    if pooled not in ("0", "1"):
        raise ConfigError(f"url: pooled={pooled!r} is not valid; give 1 behind a pooler in transaction mode, else 0")
    given = {"schema": schema} if schema != "holdfast" else {}
    given |= {"pooled": "1"} if pooled == "1" else {}
    for name, value in options.items():
        if "password" in name:
            raise ConfigError(f"url: {name}: give the password before the host (user:password@host) or as PGPASSWORD")
        if _UNSUPPORTED.fullmatch(f"{name}={value}"):
            raise ConfigError(f"url: {name}={value} is not supported; remove it")
        if value and name in _FILES and options.get("sslmode") != "disable" and not Path(value).is_file():
            raise ConfigError(f"url: {name}={value!r}: there is no such file")
        if value and name == "service":
            _check_service(value)
    sent = {name: value for name, value in options.items() if not _NEEDLESS.fullmatch(name)}
    dsn = _joined(parts.netloc, parts.path, sent)
    user, _, hosts = parts.netloc.rpartition("@")
    name = f"{quote(unquote(user.partition(':')[0]), safe='')}@".removeprefix("@")  # no user, but a password: no @
    shown = _joined(name + hosts, parts.path, options | given)
    return PostgresAddress(dsn, schema, pooled == "1", shown, _joined(name + hosts, parts.path, options))


def _joined(place: str, path: str, options: Mapping[str, str]) -> str:
    return f"postgresql://{place}{path}{'?' if options else ''}{urlencode(options)}"


def _check_service(name: str) -> None:
    """Raises `ConfigError` for a service that no file defines: the driver would ignore it and connect elsewhere."""
    file = Path(os.environ.get("PGSERVICEFILE") or Path.home() / ".pg_service.conf")
    parser = configparser.ConfigParser()
    try:
        parser.read(file)
    except (configparser.Error, ValueError) as error:
        raise ConfigError(f"url: service={name!r}: {file} cannot be read: {one_line(error)}") from error
    if name not in parser.sections():
        raise ConfigError(f"url: service={name!r}: {file} does not define it")


class PostgresPool:
    """The connections of one event loop: at most ``max_connections``, made when they are needed.

    ``call_deadline``: seconds for a whole call, the wait for a connection included, if a caller waits for its answer.
    """

    def __init__(
        self,
        address: PostgresAddress,
        *,
        now: Callable[[], int] | None,
        max_connections: int = 8,
        call_deadline: float | None = None,
    ) -> None:
        self.address = address
        self._now = now
        self._call_deadline = call_deadline
        self._searches = {kind: asyncio.Semaphore(number) for kind, number in _MAX_SEARCHES.items()}
        self._idle: deque[Connection] = deque()
        self._room = asyncio.Semaphore(max_connections)
        self._closed = False
        self._busy: set[Connection] = set()
        self._terminating: set[Connection] = set()
        self._backoff = ConnectBackoff()

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────
    async def connect(self) -> Connection:
        """A new connection, to the host that takes writes; an error of the driver if there is none."""
        address = self.address
        try:
            return await asyncpg.connect(
                address.dsn,
                timeout=_CONNECT if self._call_deadline is None else _SEARCH * self._call_deadline,
                command_timeout=DEADLINE,
                target_session_attrs=SessionAttribute("read-write" if "," in unquote(address.dsn) else "any"),
                statement_cache_size=0 if address.pooled else 100,
                server_settings={} if address.pooled else _session(self._call_deadline),
            )
        except asyncpg.TargetServerAttributeNotMatched as error:
            raise ConnectionError("no host of the URL takes writes") from error
        except _MISFITS as error:
            raise ConfigError(f"url: the server refuses a parameter of it: {one_line(error)}") from None
        except asyncpg.ObjectNotInPrerequisiteStateError as error:  # of the database: allow_connections is false
            raise ConnectionError(one_line(error)) from error
        except asyncpg.ProtocolViolationError as error:
            if "startup parameter" not in str(error):
                raise
            raise ConfigError(f"url: a pooler is in between ({one_line(error)}); add ?pooled=1 to the URL") from error
        except OSError as error:  # first: that of a certificate is a ValueError, too
            check_tls(error, self._place(), "sslrootcert")
            raise
        except (ValueError, OverflowError) as error:
            if "values to unpack" in str(error):  # the driver splits the lines of the passfile
                raise ConfigError("passfile: a line is not host:port:database:user:password; correct it") from error
            raise ConfigError(f"url: {one_line(error)}") from error

    async def _with_connection(self, operation: Callable[[Connection], Awaitable[T]], give_up: float) -> T:
        """Run ``operation`` on a connection. After any failure but a refusal, by the server or by us, it is closed."""
        async with self._room:
            connection = await self._acquire(give_up)
            self._busy.add(connection)
            try:
                result = await operation(connection)
            except BaseException as error:
                if isinstance(error, asyncpg.PostgresError | HoldfastError) and not isinstance(error, _UNREACHABLE):
                    self._give_back(connection)
                elif isinstance(error, asyncio.CancelledError) and self._call_deadline is not None:
                    self._terminate_later(connection)
                else:
                    connection.terminate()
                if isinstance(error, _UNREACHABLE):
                    self._drop_idle()
                if self._closed and isinstance(error, AttributeError):  # the driver's, whose connection we took away
                    raise HoldfastError(_CLOSED) from error
                raise
            finally:
                self._busy.discard(connection)
            self._give_back(connection)
            return result

    async def _acquire(self, give_up: float) -> Connection:
        if self._closed:
            raise HoldfastError(_CLOSED)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._backoff.connect(self.connect, _UNREACHABLE, give_up)

    def _terminate_later(self, connection: Connection) -> None:
        """Leave a connection whose call was given up, once the driver has had time to have the server give it up too:
        else abandoned calls would go on there, on more and more connections."""
        self._terminating.add(connection)

        def close_link() -> None:
            self._terminating.discard(connection)
            connection.terminate()

        asyncio.get_running_loop().call_later(_CANCEL_SECONDS, close_link)

    def _give_back(self, connection: Connection) -> None:
        if self._closed:
            connection.terminate()
        else:
            self._idle.append(connection)

    def _drop_idle(self) -> None:
        """The server has gone, or takes no more writes: so have these."""
        while self._idle:
            self._idle.pop().terminate()

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.close(timeout=1.0)
            except _UNREACHABLE:
                connection.terminate()
        for connection in [*self._busy, *self._terminating]:
            connection.terminate()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def fetch(
        self,
        query: NumberedStatement,
        *,
        on_uncertain: Callable[[], object] | None = None,
        retry_for: float | None = None,
        extra_time: float = 0.0,
        **values: Any,
    ) -> Rows:
        """The rows of one statement, as a transaction of its own."""
        arguments = self._arguments(query, values)
        sent: list[bool] = []

        async def run_once(connection: Connection) -> Rows:
            sent.append(True)
            rows: Rows = await connection.fetch(query.sql, *arguments)
            return rows

        return await self.call(
            run_once,
            on_uncertain=lambda: on_uncertain() if sent and on_uncertain is not None else None,
            retry_for=retry_for,
            extra_time=extra_time,
        )

    async def search(
        self, query: NumberedStatement, kind: SearchKind, *, seconds: float | None = None, **values: Any
    ) -> Rows:
        """The rows of a statement that may have to look at every job there is. If a caller waits, the server ends it
        after so many seconds, and a few of them cannot take all connections."""
        call_deadline = self._call_deadline
        if call_deadline is None:
            return await self.fetch(query, **values)
        arguments = self._arguments(query, values)
        if seconds is None:
            seconds, wait_seconds = _SEARCH * call_deadline, _SEARCH_WAIT * call_deadline
        else:
            await self.check_alive()
            wait_seconds = call_deadline

        async def run_once(connection: Connection) -> Rows:
            await connection.execute(f"begin read only; set local statement_timeout = {1000 * seconds:.0f}")
            try:
                rows: Rows = await connection.fetch(query.sql, *arguments)
            except asyncpg.PostgresError:
                if not connection.is_closed():
                    await connection.execute("rollback")
                raise
            await connection.execute("commit")
            return rows

        try:
            async with asyncio.timeout(wait_seconds):
                await self._searches[kind].acquire()
        except TimeoutError:
            raise Busy(f"{self._place()} is busy: others look for jobs by a filter; try again") from None
        try:
            return await self.call(run_once, extra_time=seconds - _SEARCH * call_deadline)
        except Unavailable as error:
            if isinstance(error.__cause__, asyncpg.QueryCanceledError):
                raise TooBroad(seconds) from error
            raise
        finally:
            self._searches[kind].release()

    async def check_alive(self) -> None:
        """Pings the server before a long query if the caller has a deadline."""
        if self._call_deadline is not None:
            await self.call(lambda connection: connection.execute("select 1"))

    async def transaction(
        self, work: Callable[[Callable[..., Awaitable[Rows]]], Awaitable[T]], *, extra_time: float = 0.0
    ) -> T:
        """Run ``work(fetch)`` in one transaction. It may run more than once, but never again once it is committed.
        An error that it raises undoes all of it."""
        unanswered: list[tuple[Commit, T]] = []  # a commit that was perhaps sent, and what it would mean

        async def run_once(connection: Connection) -> T:
            async def fetch(query: NumberedStatement, **values: Any) -> Rows:
                rows: Rows = await connection.fetch(query.sql, *self._arguments(query, values))
                return rows

            if unanswered:
                commit, result = unanswered[0]
                if await is_committed(connection, commit):
                    return result
                unanswered.clear()
            transaction = connection.transaction()
            await transaction.start()
            try:
                result = await work(fetch)
                unanswered.append((await begun_commit(connection), result))
            except (asyncpg.PostgresError, HoldfastError):
                if not connection.is_closed():
                    await transaction.rollback()
                raise
            await transaction.commit()
            return result

        try:
            return await self.call(run_once, extra_time=extra_time)
        except Unavailable as error:
            if not unanswered:
                raise
            raise perhaps_done(error) from error

    @property
    def instant(self) -> int | None:
        """For statements: the store's instant; None for the server's own."""
        return None if self._now is None else self._now()

    def _arguments(self, query: NumberedStatement, values: Mapping[str, Any]) -> list[Any]:
        now = self.instant
        return [now if name == "now" else values[name] for name in query.names]

    async def call(
        self,
        operation: Callable[[Connection], Awaitable[T]],
        *,
        on_uncertain: Callable[[], object] | None = None,
        retry_for: float | None = None,
        extra_time: float = 0.0,
    ) -> T:
        """Run ``operation`` on a connection, again while the server is unreachable or transactions conflict with it.

        ``on_uncertain`` is called at each failure after which it is unknown whether the server has done it;
        ``retry_for``: seconds, if fewer than usual; ``extra_time``: added to the call deadline, for large calls.
        """
        give_up = time.monotonic() + (RETRY_FOR if retry_for is None else min(retry_for, RETRY_FOR))
        ends = self._call_deadline and asyncio.get_running_loop().time() + self._call_deadline + extra_time
        conflicts = 0
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    return await self._with_connection(operation, give_up)
            except _CONFLICT as error:
                conflicts += 1
                if conflicts >= _CONFLICTS:
                    raise Unavailable(f"{self._place()}: {one_line(error)}; try again") from error
                await asyncio.sleep(random.uniform(0, 0.01 * 2**conflicts))
            except _UNREACHABLE as error:
                writes = not isinstance(error, asyncpg.ReadOnlySQLTransactionError)
                if on_uncertain is not None and writes:
                    on_uncertain()
                silent = isinstance(error, TimeoutError)
                if silent:
                    self._drop_idle()
                if max(time.monotonic(), self._backoff.connect_at) > give_up or silent:
                    trouble = "cannot be reached" if writes else "takes no writes"
                    raise Unavailable(f"{self._place()} {trouble}: {one_line(error)}") from error
                await asyncio.sleep(CONNECT_BACKOFF * random.uniform(0.5, 1.5))
            except asyncpg.LockNotAvailableError as error:
                raise RowLocked(f"{self._place()}: {one_line(error)}") from error
            except _FULL as error:
                raise Unavailable(f"{self._place()}: {one_line(error)}") from error
            except _REFUSED as error:
                raise ConfigError(f"{self._place()} refuses us: {one_line(error)}; check the URL and rights") from error
            except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.InvalidSchemaNameError) as error:
                raise StoreMismatch(f"{self._place()}: {one_line(error)}; run: holdfast migrate") from error
            except (asyncpg.DataError, UnicodeEncodeError) as error:
                raise Invalid("value", one_line(error), "it does not fit into PostgreSQL") from error
            except asyncpg.UniqueViolationError as error:
                raise UniqueViolation(f"{self._place()}: {one_line(error)}") from error
            except asyncpg.PostgresError as error:
                raise HoldfastError(f"{self._place()}: {one_line(error)}") from error

    def _place(self) -> str:
        """The server in words: its hosts, as the driver finds them."""
        parts = urlsplit(self.address.shown)
        options = dict(parse_qsl(parts.query))
        host = options.get("host") or options.get("service") or os.environ.get("PGHOST") or "its default place"
        port = options.get("port") or os.environ.get("PGPORT")
        return f"PostgreSQL at {parts.netloc.rpartition('@')[2] or (f'{host}:{port}' if port else host)}"


# What our statements rest on, whatever the role, the database or the server has by default. Every plan is made once,
# without the values: made for the first ones, it would rest on statistics of a moment when nothing was running, and
# compare every row with every other.
_SESSION = {
    "application_name": "holdfast",
    "default_transaction_isolation": "read committed",
    "standard_conforming_strings": "on",
    "idle_session_timeout": "0",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "statement_timeout": "30s",
    "lock_timeout": "8s",  # sooner than DEADLINE: then the connection can go on, and the error says what was waited for
    "idle_in_transaction_session_timeout": "30s",
}


def _session(call_deadline: float | None) -> dict[str, str]:
    """The same if a caller waits: a row that others hold is an error of its own before the call's deadline."""
    return _SESSION if call_deadline is None else _SESSION | {"lock_timeout": f"{1000 * _LOCK * call_deadline:.0f}ms"}
