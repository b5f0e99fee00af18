"""Connections to Redis: opened within a deadline, retried with jitter, dropped at the first doubt.

Every call has a deadline on our side. A connection whose call was cut short for any reason but an error that the
server answered is never used again: a late answer must not reach the next caller. A call that finds the server away
tries again for ``PATIENCE`` seconds, then raises Unavailable; whoever must go on for ever (the worker's services) calls
again.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from redis import exceptions as driver
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection as PlainConnection
from redis.asyncio.sentinel import Sentinel

from holdfast.errors import ConfigError, HoldfastError, Invalid, StoreMismatch, Unavailable
from holdfast.stores.redis.address import Address
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.wire import Argument, Heard, Wire

T = TypeVar("T")

PATIENCE = 2.0  # seconds a call waits for a server that is away
DEADLINE = 10.0  # seconds a call may take
_CONNECT = 3.0  # seconds until a host that does not answer is given up
_BACKOFF, _BACKOFF_MOST = 0.02, 1.0  # seconds between tries, before jitter
_SYNCED = 5000  # milliseconds WAITAOF waits for the disk

_AWAY = (OSError, TimeoutError, driver.ConnectionError, driver.TimeoutError, driver.InvalidResponse, EOFError)
# What a server answers that cannot serve us now. The driver takes the code off the errors it knows; of those a script
# met the code stands in the middle of the text.
_ELSEWHERE = (
    driver.ReadOnlyError,
    driver.MasterDownError,
    driver.ClusterDownError,
    driver.ClusterError,
    driver.TryAgainError,
    driver.AskError,
)
_ELSEWHERE_TEXT = re.compile(
    r"\b(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MOVED|ASK|BUSY|UNBLOCKED)\b|read.only replica"
)
_FULL_TEXT = "when used memory > 'maxmemory'"
_UNWRITABLE = re.compile(r"\b(MISCONF|NOREPLICAS)\b")
_FORBIDDEN = re.compile(
    r"\b(NOPERM|NOAUTH|WRONGPASS|DENIED|ACL)\b|permission|non local key|invalid username", re.IGNORECASE
)


class Links:
    """The connections of one event loop: at most ``most``, made when they are needed."""

    def __init__(self, address: Address, *, now: Callable[[], int] | None, most: int = 8) -> None:
        self.address = address
        self.name = uuid4().hex[:12]
        """Who calls: the scripts tell others of what we did, and we know what we said ourselves."""
        self._now = now
        self._idle: deque[Wire] = deque()
        self._room = asyncio.Semaphore(most)
        self._closed = False
        self._busy: set[Wire] = set()
        self._target: tuple[str, int] | None = None  # of the primary, once it was asked for
        self._failures = 0  # to connect, one after another
        self._connect_at = 0.0  # not before

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────
    async def connect(self, heard: Heard | None = None, **options: Any) -> Wire:
        """A new connection to the primary, or an error of the driver. ``heard`` is told what is published."""
        given = {
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": _CONNECT,
            **self.address.options,
            **options,
        }
        make = given.pop("connection_class", PlainConnection)
        if "path" not in given:
            given["host"], given["port"] = await self._primary()
        link = make(**given)
        try:
            async with asyncio.timeout(_CONNECT):
                await link.connect()
            return Wire(link, heard)
        except BaseException:
            await _discard(link)
            raise

    async def _primary(self) -> tuple[str, int]:
        """Where the primary is now, or is said to be."""
        if self.address.kind == "direct":
            return self.address.hosts[0]
        if self._target is None:
            async with asyncio.timeout(_CONNECT):
                self._target = await (self._ask_sentinels() if self.address.kind == "sentinel" else self._ask_cluster())
        return self._target

    async def _ask_sentinels(self) -> tuple[str, int]:
        options = {name: value for name, value in self.address.options.items() if name not in ("host", "port", "db")}
        secure = bool(options.pop("connection_class", None))
        known = {**options, "ssl": secure, "socket_timeout": _CONNECT}
        sentinel = Sentinel(self.address.hosts, sentinel_kwargs=known)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self.address.service)
        finally:
            for each in sentinel.sentinels:
                await each.aclose()
        return str(host), int(port)

    async def _ask_cluster(self) -> tuple[str, int]:
        options = {name: value for name, value in self.address.options.items() if name not in ("host", "port", "db")}
        secure = bool(options.pop("connection_class", None))
        nodes = [ClusterNode(host, port) for host, port in self.address.hosts]
        try:
            async with RedisCluster(startup_nodes=nodes, ssl=secure, **options) as cluster:
                node = cluster.get_node_from_key(self.address.prefix)
        except driver.RedisClusterException as error:
            raise driver.ConnectionError(str(error)) from error
        if node is None:
            raise driver.ConnectionError("no node of the cluster serves the slot of our keys")
        return str(node.host), int(node.port)

    async def _with_link(self, once: Callable[[Wire], Awaitable[T]]) -> T:
        """Run ``once`` on a connection. After any failure but an error the server answered it is thrown away."""
        async with self._room:
            link = await self._taken()
            self._busy.add(link)
            try:
                result = await once(link)
            except BaseException as error:
                if isinstance(error, driver.ResponseError | UnicodeEncodeError):  # the connection is as good as before
                    self._give_back(link)
                else:
                    link.close()
                if isinstance(error, _AWAY) or _is_elsewhere(error):
                    self.forget()
                raise
            else:
                self._give_back(link)
                return result
            finally:
                self._busy.discard(link)

    async def _taken(self) -> Wire:
        if self._closed:
            raise HoldfastError("this store was closed meanwhile")
        while self._idle:
            link = self._idle.pop()
            if link.is_connected:
                return link
        await asyncio.sleep(max(0.0, self._connect_at - time.monotonic()))
        try:
            link = await self.connect()
        except _AWAY:
            # However many calls there are: a server that comes back is not met by a herd.
            self._failures += 1
            pause = min(_BACKOFF_MOST, _BACKOFF * 2**self._failures)
            self._connect_at = time.monotonic() + pause * random.uniform(0.5, 1.5)
            self._target = None
            raise
        self._failures = 0
        return link

    def _give_back(self, link: Wire) -> None:
        if self._closed:
            link.close()
        else:
            self._idle.append(link)

    def forget(self) -> None:
        """The server has gone, or takes no more writes: so have these. The primary is looked for anew."""
        self._target = None
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        """Let go of every connection; calls under way fail."""
        self._closed = True
        self.forget()
        for link in list(self._busy):
            link.close()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(
        self,
        script: Script,
        *arguments: Argument,
        doubt: Callable[[], object] | None = None,
        patience: float | None = None,
        synced: bool = False,
    ) -> Any:
        """What the script answers. ``doubt`` is told of each failure after which nobody knows whether it ran;
        ``patience``: seconds, if fewer than usual; ``synced``: answer when the disk has it, if that was declared."""
        (reply,) = await self.run_each(script, [arguments], doubt=doubt, patience=patience, synced=synced)
        return reply

    async def run_each(
        self,
        script: Script,
        pieces: Sequence[Sequence[Argument]],
        *,
        doubt: Callable[[], object] | None = None,
        patience: float | None = None,
        synced: bool = False,
    ) -> list[Any]:
        """What the script answers to each of these arguments. They go out one behind the other, none before all of them
        are known to be what Redis can take; an error of one leaves the others done."""
        now = "" if self._now is None else self._now()
        head = ("EVALSHA", script.sha, 5, *self.address.keys, now, self.name)

        sent: list[bool] = []

        async def once(link: Wire) -> list[Any]:
            sent.append(True)
            replies: list[Any] = []
            for reply in await link.ask_each([(*head, *piece) for piece in pieces]):
                if isinstance(reply, driver.NoScriptError):  # a new server, or one whose scripts were flushed
                    await link.ask("SCRIPT", "LOAD", script.text)
                    replies.append(await link.ask(*head, *pieces[len(replies)]))
                elif isinstance(reply, driver.ResponseError):
                    raise reply
                else:
                    replies.append(reply)
            if synced and self.address.durability == "waitaof":
                local, _ = await link.ask("WAITAOF", 1, 0, _SYNCED)
                if not local:
                    raise TimeoutError(f"the disk did not have it within {_SYNCED // 1000} s")
            return replies

        return await self.call(once, doubt=lambda: doubt() if sent and doubt is not None else None, patience=patience)

    async def command(self, *words: Argument) -> Any:
        """What the server answers to one command."""
        return await self.call(lambda link: link.ask(*words))

    async def call(
        self,
        once: Callable[[Wire], Awaitable[T]],
        *,
        doubt: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> T:
        """Run ``once`` on a connection, again while the server is away."""
        give_up = time.monotonic() + (PATIENCE if patience is None else min(patience, PATIENCE))
        while True:
            try:
                async with asyncio.timeout(DEADLINE):
                    return await self._with_link(once)
            except driver.AuthenticationError as error:
                raise ConfigError(f"{self.place} refuses us: {_line(error)}; check the URL and its rights") from error
            except _AWAY as error:
                if doubt is not None:
                    doubt()
                if max(time.monotonic(), self._connect_at) > give_up or isinstance(error, TimeoutError):
                    raise Unavailable(f"{self.place} cannot be reached: {_line(error)}") from error
                await asyncio.sleep(_BACKOFF * random.uniform(0.5, 1.5))
            except (driver.ResponseError, driver.ClusterError) as error:
                if not _is_elsewhere(error):
                    raise self._translated(error) from error
                if time.monotonic() > give_up:
                    raise Unavailable(f"{self.place}: {_line(error)}; try again") from error
                await asyncio.sleep(5 * _BACKOFF * random.uniform(0.5, 1.5))
            except UnicodeEncodeError as error:
                raise Invalid("job", error.object, "write it as UTF-8, without lone surrogates") from error
            except driver.RedisError as error:
                raise Unavailable(f"{self.place}: {_line(error)}") from error

    def _translated(self, error: Exception) -> HoldfastError:
        text = _line(error)
        if _FULL_TEXT in text:
            return Unavailable(f"{self.place} is full (maxmemory): nothing was stored; make room, or raise maxmemory")
        if _UNWRITABLE.search(text):
            return Unavailable(f"{self.place} takes no writes: {text}")
        if isinstance(error, driver.NoPermissionError) or _FORBIDDEN.search(text):
            return ConfigError(f"{self.place} refuses us: {text}; check the URL and its rights")
        if "unknown command" in text.lower():
            return ConfigError(f"{self.place}: {text}; Holdfast needs Redis 6.2 or newer, or Valkey")
        if "WRONGTYPE" in text:
            return StoreMismatch(f"{self.place}: a key of {self.address.prefix!r} is not ours: {text}")
        return HoldfastError(f"{self.place}: {text}")

    @property
    def place(self) -> str:
        """The server in words."""
        if path := self.address.options.get("path"):
            return f"Redis at {path}"
        return "Redis at " + ",".join(f"{host}:{port}" for host, port in self.address.hosts)


async def _discard(link: Any) -> None:
    try:
        await link.disconnect(nowait=True)
    except _AWAY:
        return


def _is_elsewhere(error: BaseException) -> bool:
    if isinstance(error, _ELSEWHERE):
        return True
    return isinstance(error, driver.ResponseError) and _ELSEWHERE_TEXT.search(str(error)) is not None


def in_pieces(items: Sequence[T], most: int) -> Iterable[Sequence[T]]:
    """The items in pieces that one script handles."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
