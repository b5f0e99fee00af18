"""Connections to servers: how tries are spaced, and what a refused one leaves alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.stores.common.server_store import ConnectBackoff
from holdfast.stores.connections.redis import RedisPool, Script
from holdfast.stores.connections.redis_protocol import RedisConnection
from holdfast.stores.connections.redis_url import parse_server
from holdfast.stores.redis.pool import NamespacePool, parse_url

pytestmark = pytest.mark.anyio


async def refuse() -> None:
    raise ConnectionRefusedError("nothing listens")


async def test_pause_stays_bounded_in_an_outage_of_hours() -> None:
    backoff = ConnectBackoff()
    for _ in range(5000):
        backoff.connect_at = 0.0
        with pytest.raises(ConnectionRefusedError):
            await backoff.connect(refuse, (OSError,), time.monotonic())

    assert backoff.connect_at <= time.monotonic() + 1.5


async def succeed() -> None:
    return None


async def test_success_makes_the_next_pause_short_again() -> None:
    backoff = ConnectBackoff()
    for _ in range(20):
        backoff.connect_at = 0.0
        with pytest.raises(ConnectionRefusedError):
            await backoff.connect(refuse, (OSError,), time.monotonic())
    backoff.connect_at = 0.0
    await backoff.connect(succeed, (OSError,), time.monotonic())
    with pytest.raises(ConnectionRefusedError):
        await backoff.connect(refuse, (OSError,), time.monotonic())

    assert backoff.connect_at <= time.monotonic() + 0.06


class Connected(RedisConnection):
    """A connection that needs no server."""

    def __init__(self) -> None:
        self.is_prepared = True
        self.is_closed = False

    @property
    def is_connected(self) -> bool:
        return not self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_refused_connection_leaves_the_idle_ones_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RedisPool(parse_server("redis://127.0.0.1:1")[0], "")
    first, may_end, is_asked, may_refuse = Connected(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    pool._idle.append(first)

    async def connect() -> RedisConnection:
        is_asked.set()
        await may_refuse.wait()
        raise RedisConnectionError("max number of clients reached")

    async def use(connection: RedisConnection) -> RedisConnection:
        await may_end.wait()
        return connection

    monkeypatch.setattr(pool, "connect", connect)
    calls = [asyncio.create_task(pool.call(use)), asyncio.create_task(pool.call(use))]
    await is_asked.wait()
    may_end.set()
    await calls[0]
    may_refuse.set()

    assert await calls[1] is first


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoPermissionError("the user queue may not do that"), "refuses us: .*; check the URL and rights"),
        (ResponseError("Unknown command 'ZMSCORE'"), "Holdfast needs Redis 6.2 or newer"),
    ],
)
async def test_refusal_of_the_server_names_its_remedy(error: Exception, remedy: str) -> None:
    pool = RedisPool(parse_server("redis://127.0.0.1:1")[0], "")
    pool._idle.append(Connected())

    async def use(connection: RedisConnection) -> None:
        raise error

    with pytest.raises(ConfigError, match=remedy):
        await pool.call(use)


async def test_job_acknowledged_during_a_check_is_checked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lost the known job; meanwhile another connection stores one."""
    pool = NamespacePool(parse_url("redis://127.0.0.1:1"), now=None, lost=Script("lost", "", ""))
    asked: list[object] = []

    class Checked(Connected):
        async def send_command(self, *arguments: Any) -> Any:
            asked.append(arguments[-1])
            if asked == ["second"]:
                pool.note_stored(b"3 0", "third")
            return [1, 0]

    async def connect() -> RedisConnection:
        connection = Checked()
        connection.is_prepared = False
        return connection

    async def use(connection: RedisConnection) -> None:
        connection.close()

    monkeypatch.setattr(pool, "connect", connect)
    pool.note_stored(b"2 0", "second")
    for _ in range(3):  # the last one has nothing to ask for
        await pool.call(use)

    assert asked == ["second", "third"]


async def test_sentinels_are_asked_again_after_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RedisPool(parse_server("redis+sentinel://127.0.0.1:1/main")[0], "", retry_for=0)
    asked: list[int] = []

    async def find_primary() -> tuple[str, int]:
        asked.append(1)
        return "127.0.0.1", 1

    monkeypatch.setattr(pool, "_find_primary", find_primary)
    for _ in range(2):
        pool._backoff.connect_at = 0.0
        with pytest.raises(Unavailable):
            await pool.run_command("PING")

    assert len(asked) == 2


@pytest.mark.parametrize("url", ["redis://host:/0", "unix:///run/a%40b.sock", "redis://[::1]:1/0"])
def test_unusual_addresses_are_read(url: str) -> None:
    assert parse_server(url)[0].kind == "direct"


@pytest.mark.parametrize(
    "url",
    [
        "redis://queue:se/cret@host:6379/0",
        "redis://:12/secret@host/0",
        "redis://:12?secret@host/0",
        "redis://:77#secret@host:6379/0",
        "redis://:ab[secret@host/0",
    ],
)
def test_password_that_is_not_encoded_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode") as refused:
        parse_server(url)

    assert "cret" not in str(refused.value).replace("percent", "")
