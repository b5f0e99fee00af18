"""Connections to Redis: opened within a deadline, retried with jitter, dropped when an answer may still be on its way.

Every call has a deadline on our side. A connection whose call was cut short for any reason but an error that the
server answered is never used again: a late answer must not reach the next caller. A call that finds the server away
tries again for ``RETRY_FOR`` seconds, then raises Unavailable; callers that go on for ever (the worker's services) call
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from redis import exceptions as driver

from holdfast.core.errors import ConfigError, HoldfastError, Invalid, StoreMismatch, Unavailable
from holdfast.stores.common.server_store import CONNECT_BACKOFF, ConnectBackoff, check_tls, one_line
from holdfast.stores.connections.redis_protocol import Argument, MessageCallback, RedisConnection
from holdfast.stores.connections.redis_url import Server

T = TypeVar("T")

RETRY_FOR = 1.5  # seconds a call waits for a server that is away: over HTTP its answer comes within two
DEADLINE = 10.0  # seconds a call may take
_CONNECT = 3.0  # seconds until a host that does not answer is given up

_UNREACHABLE = (OSError, TimeoutError, driver.ConnectionError, driver.TimeoutError, driver.InvalidResponse, EOFError)
# What a server answers that cannot serve us now. The driver takes the code off the errors it knows; of those a script
# met the code stands in the middle of the text.
_NOT_SERVING = (driver.ReadOnlyError, driver.ClusterError, driver.TryAgainError, driver.AskError)
_NOT_SERVING_TEXT = re.compile(
    r"\b(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MOVED|ASK|BUSY|UNBLOCKED)\b|read.only replica|replica inst"
)
_MOVED = re.compile(r"MOVED \d+ (.*):(\d+)$")
_FULL_TEXT = "when used memory > 'maxmemory'"
_UNWRITABLE = re.compile(r"\b(MISCONF|NOREPLICAS)\b")
_FORBIDDEN = re.compile(
    r"\b(NOPERM|NOAUTH|WRONGPASS|DENIED|ACL|DB index)\b|permission|non local key|invalid username", re.IGNORECASE
)
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE")


class WriteNotConfirmed(Exception):
    """The write was done, but the disk or the replicas did not confirm it in time."""


class Script(NamedTuple):
    """A script as the server knows it."""

    name: str
    text: str
    sha: str


@cache
def load_scripts(package: str, *fragments: str) -> Mapping[str, Script]:
    """The Lua scripts of a package by name; each is one step that happens whole.

    A line ``-- name: settle (partitions, transitions)`` starts a script, ``-- fragment: transitions`` a part that
    several scripts begin with: all of them with ``fragments``, this one with ``partitions`` and ``transitions`` too.
    ``-- name: submit_one (only basics)`` begins with nothing but ``basics``.
    """
    folder = files(package) / "scripts"
    texts = [entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".lua")]
    parts = [part for text in texts for part in list(_SCRIPT.finditer(text))]
    bodies = {part["name"]: part["text"] for part in parts}
    scripts = {}
    for part in parts:
        if part["kind"] == "name":
            own = part["begins"].split(", ") if part["begins"] else ()
            text = "".join(bodies[each] for each in (*(() if part["only"] else fragments), *own, part["name"]))
            sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            scripts[part["name"]] = Script(part["name"], text, sha)
    return scripts


_SCRIPT = re.compile(
    r"^-- (?P<kind>name|fragment): (?P<name>\w+)(?: \((?P<only>only )?(?P<begins>[\w, ]+)\))?\n"
    r"(?P<text>.*?)(?=^-- (?:name|fragment): |\Z)",
    re.MULTILINE | re.DOTALL,
)


class RedisPool:
    """The connections of one event loop: at most ``max_connections``, made when they are needed."""

    def __init__(
        self,
        server: Server,
        prefix: str,
        *,
        max_connections: int = 8,
        retry_for: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """``prefix``: of every key. ``retry_for``: seconds a call retries while the server is unreachable.

        ``deadline``: seconds a call may take in all, the wait for a connection included. None: the defaults.
        """
        self.server = server
        self._prefix = prefix
        self._retry_for = retry_for
        self._deadline = deadline
        self._idle: deque[RedisConnection] = deque()
        self._room = asyncio.Semaphore(max_connections)
        self._closed = False
        self._busy: set[RedisConnection] = set()
        self._target: tuple[str, int] | None = None  # of the primary, once it was asked for
        self._backoff = ConnectBackoff()

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────
    async def connect(self, on_message: MessageCallback | None = None, **options: Any) -> RedisConnection:
        """A new connection to the primary, or an error of the driver. ``on_message`` receives published messages."""
        given = {**self.server.options, **options}
        if "path" not in given:
            given["host"], given["port"] = await self._primary()
        return await _connected(given, self._connect_in, on_message)

    @property
    def _connect_in(self) -> float:
        """Seconds to connect: fewer than the deadline, so that a try that fails is known for one."""
        return _CONNECT if self._deadline is None else min(_CONNECT, self._deadline * 2 / 3)

    async def _primary(self) -> tuple[str, int]:
        """Returns the address of the primary."""
        if self.server.kind == "direct":
            return self.server.hosts[0]
        if self._target is None:
            self._target = await self._find_primary()
        return self._target

    async def _find_primary(self) -> tuple[str, int]:
        """Returns the primary's address from the first host that knows it; a silent host leaves time for the rest."""
        trouble: Exception = driver.ConnectionError(f"none of them knows a primary called {self.server.service!r}")
        for host, port in self.server.hosts:
            given = {**self.server.options, "host": host, "port": port}
            given.pop("db", None)
            try:
                found = await self._ask_host(given, self._connect_in / len(self.server.hosts))
            except (*_UNREACHABLE, driver.RedisError) as error:
                trouble = error
                continue
            if found is not None:
                return found
        raise trouble

    async def _ask_host(self, given: dict[str, Any], seconds: float) -> tuple[str, int] | None:
        """The answer of one sentinel, or of one node of the cluster."""
        try:
            connection = await _connected(given, seconds)
        except driver.AuthenticationError:
            if self.server.kind != "sentinel" or "password" not in given:
                raise
            # Sentinels mostly have no password of their own, and refuse one that is offered.
            connection = await _connected({**given, "username": None, "password": None}, seconds)
        try:
            async with asyncio.timeout(seconds):
                if self.server.kind == "sentinel":
                    found = await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.server.service)
                    return None if found is None else (found[0].decode(), int(found[1]))
                await connection.send_command("EXISTS", self._prefix)
                return given["host"], given["port"]
        except driver.ResponseError as error:
            moved = _MOVED.match(str(error))
            if moved is None:
                raise
            return moved[1] or given["host"], int(moved[2])
        finally:
            connection.close()

    async def _with_connection(self, operation: Callable[[RedisConnection], Awaitable[T]], give_up: float) -> T:
        """Run ``operation`` on a connection. After any failure but an error the server answered it is thrown away."""
        async with self._room:
            connection = await self._acquire(give_up)
            self._busy.add(connection)
            try:
                result = await operation(connection)
            except BaseException as error:
                if isinstance(error, driver.ResponseError | UnicodeEncodeError):  # the connection is as good as before
                    self._release(connection)
                else:
                    connection.close()
                if isinstance(error, _UNREACHABLE) or is_not_serving(error):
                    self.drop_connections()
                raise
            else:
                self._release(connection)
                return result
            finally:
                self._busy.discard(connection)

    async def _acquire(self, give_up: float) -> RedisConnection:
        if self._closed:
            raise HoldfastError("this store was closed meanwhile")
        while self._idle and not self._idle[-1].is_connected:
            self._idle.pop()
        connection = (
            self._idle.pop() if self._idle else await self._backoff.connect(self.connect, _UNREACHABLE, give_up)
        )
        try:
            connection.is_prepared = connection.is_prepared or await self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _prepare(self, connection: RedisConnection) -> bool:
        """Prepares a new connection before its first call; returns False if that was not possible yet."""
        return True

    def _release(self, connection: RedisConnection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def drop_connections(self) -> None:
        """Closes the idle connections of a server that is gone or takes no writes; the primary is looked up again."""
        self._target = None
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        self._closed = True
        self.drop_connections()
        for connection in list(self._busy):
            connection.close()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def evaluate(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Returns the answer of the script."""
        return (await self.evaluate_each(script, keys, [arguments]))[0]

    async def evaluate_each(
        self,
        script: Script,
        keys: Sequence[str],
        calls: Sequence[Sequence[Argument]],
        *,
        on_uncertain: Callable[[], object] | None = None,
        retry_for: float | None = None,
        extra_time: float = 0.0,
        after: Callable[[RedisConnection], Awaitable[object]] | None = None,
        on_refused: Callable[[list[Any]], object] | None = None,
    ) -> list[Any]:
        """Returns the answer of the script to each of these arguments. They are sent in one pipeline, none before
        Redis can take all of them; an error of one leaves the others done.

        ``on_uncertain``, ``retry_for``, ``extra_time``: see ``call``; ``on_uncertain`` is called only once something
        was sent. ``after`` is awaited on the same connection before any answer counts; ``on_refused`` receives all
        answers if one of them is an error.
        """
        head: tuple[Argument, ...] = ("EVALSHA", script.sha, len(keys), *keys)
        sent: list[bool] = []

        async def run_once(connection: RedisConnection) -> list[Any]:
            sent.append(True)
            commands = [(*head, *arguments) for arguments in calls]
            unsure = len(calls) > 1 and script.sha not in connection.scripts
            if unsure:  # else the first might find it unknown, and a later one, loaded meanwhile, known
                commands.insert(0, ("SCRIPT", "LOAD", script.text))
                connection.scripts.add(script.sha)
            replies = (await connection.ask_each(commands))[int(unsure) :]
            missed = [index for index, reply in enumerate(replies) if isinstance(reply, driver.NoScriptError)]
            if missed:  # flushed, or a new server; EVAL brings the source along, so this cannot miss again
                source = ("EVAL", script.text, *head[2:])
                answers = await connection.ask_each([(*source, *calls[index]) for index in missed])
                for index, answer in zip(missed, answers, strict=True):
                    replies[index] = answer
            refusals = [each for each in replies if isinstance(each, driver.ResponseError)]
            if after is not None and len(refusals) < len(replies):
                await after(connection)
            for error in refusals:
                if on_refused is not None:
                    on_refused(replies)
                if is_not_serving(error) and len(refusals) < len(replies):
                    raise driver.ConnectionError(str(error)) from error  # gone halfway: the answers are lost
                raise error
            return replies

        return await self.call(
            run_once,
            on_uncertain=lambda: on_uncertain() if sent and on_uncertain is not None else None,
            retry_for=retry_for,
            extra_time=extra_time,
        )

    async def run_command(self, *words: Argument) -> Any:
        """Returns the server's answer to one command."""
        return await self.call(lambda connection: connection.send_command(*words))

    async def call(
        self,
        operation: Callable[[RedisConnection], Awaitable[T]],
        *,
        on_uncertain: Callable[[], object] | None = None,
        retry_for: float | None = None,
        extra_time: float = 0.0,
    ) -> T:
        """Run ``operation`` on a connection, again while the server is unreachable. ``on_uncertain`` is called at each
        failure after which it is unknown whether it ran; ``retry_for``: seconds, if fewer than usual;
        ``extra_time``: added to the deadline."""
        usual = RETRY_FOR if self._retry_for is None else self._retry_for
        give_up = time.monotonic() + (usual if retry_for is None else min(retry_for, usual))
        ends = asyncio.get_running_loop().time() + (self._deadline or DEADLINE) + extra_time
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    return await self._with_connection(operation, give_up)
            except driver.AuthenticationError as error:
                raise ConfigError(f"{self.place} refuses us: {one_line(error)}; check the URL and rights") from error
            except WriteNotConfirmed as error:
                if on_uncertain is not None:
                    on_uncertain()
                remedy = "try again, under the same key or id nothing is done twice"
                raise Unavailable(f"{self.place} did it, but {error}; {remedy}") from error
            except asyncio.CancelledError:
                if on_uncertain is not None:
                    on_uncertain()
                raise
            except _UNREACHABLE as error:
                self._target = None
                if on_uncertain is not None:
                    on_uncertain()
                self._check_tls(error)
                if isinstance(error, TimeoutError):
                    self.drop_connections()
                if max(time.monotonic(), self._backoff.connect_at) > give_up or isinstance(error, TimeoutError):
                    mixed = self.server.secure or "closed by server" in str(error)
                    asked = "; does that port speak TLS (rediss://)?" if mixed else ""
                    raise Unavailable(f"{self.place} cannot be reached: {one_line(error)}{asked}") from error
                await asyncio.sleep(CONNECT_BACKOFF * random.uniform(0.5, 1.5))
            except (driver.ResponseError, driver.ClusterError) as error:
                if not is_not_serving(error):
                    raise self._translated(error) from error
                if time.monotonic() > give_up:
                    raise Unavailable(f"{self.place}: {one_line(error)}; try again") from error
                await asyncio.sleep(5 * CONNECT_BACKOFF * random.uniform(0.5, 1.5))
            except UnicodeEncodeError as error:
                raise Invalid("job", error.object, "write it as UTF-8, without lone surrogates") from error
            except driver.RedisError as error:
                raise Unavailable(f"{self.place}: {one_line(error)}") from error

    def _check_tls(self, error: BaseException) -> None:
        """Raises `ConfigError`: no retry mends a certificate that is not trusted, or a port that does not speak TLS."""
        check_tls(error, self.place, "ssl_ca_certs")
        if self.server.secure and _NO_TLS.search(one_line(error)):
            raise ConfigError(f"{self.place} does not speak TLS; write redis://, or give its port for TLS") from error

    def _translated(self, error: Exception) -> HoldfastError:
        text = one_line(error)
        if _FULL_TEXT in text:
            return Unavailable(f"{self.place} is full (maxmemory); make room, or raise maxmemory")
        if _UNWRITABLE.search(text):
            return Unavailable(f"{self.place} takes no writes: {text}")
        if isinstance(error, driver.NoPermissionError) or _FORBIDDEN.search(text):
            return ConfigError(f"{self.place} refuses us: {text}; check the URL and rights")
        if "'SENTINEL'" in text or "`SENTINEL`" in text:
            return ConfigError(f"{self.place} is no sentinel; write redis://, or give the sentinels' hosts and ports")
        if "unknown command" in text.lower():
            return ConfigError(f"{self.place}: {text}; Holdfast needs Redis 6.2 or newer, or Valkey")
        if "WRONGTYPE" in text:
            return StoreMismatch(f"{self.place}: a key of {self._prefix!r} is not ours: {text}")
        return HoldfastError(f"{self.place}: {text}")

    @property
    def place(self) -> str:
        """The server in words."""
        if path := self.server.options.get("path"):
            return f"Redis at {path}"
        hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in self.server.hosts]
        return "Redis at " + ",".join(f"{host}:{port}" for host, port in hosts)


async def _connected(
    given: dict[str, Any], seconds: float, on_message: MessageCallback | None = None
) -> RedisConnection:
    """Opens a connection with these options of the driver; raises its error if that takes longer than ``seconds``."""
    given = {"protocol": 2, "socket_timeout": None, "socket_connect_timeout": seconds, **given}
    connection = given.pop("connection_class")(**given)
    try:
        async with asyncio.timeout(seconds):
            await connection.connect()
        return RedisConnection(connection, on_message)
    except BaseException:
        with suppress(*_UNREACHABLE):
            await connection.disconnect(nowait=True)
        raise


def is_not_serving(error: object) -> bool:
    """Returns True for an error of a server that is no longer the one to ask, or not yet."""
    text = str(error) if isinstance(error, driver.ResponseError) else ""
    return isinstance(error, _NOT_SERVING) or _NOT_SERVING_TEXT.search(text) is not None


def split_parts(items: Sequence[T], most: int) -> Iterable[Sequence[T]]:
    """Yields the items in parts of at most ``most``, for one script call each."""
    for start in range(0, len(items), most):
        yield items[start : start + most]
