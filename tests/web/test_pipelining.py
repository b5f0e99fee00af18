"""What one connection may have the server hold: requests sent ahead of their answers, and what never ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from holdfast.web.connection_limits import MAX_PIPELINED, Connection, ConnectionLimits, ConnectionRegistry

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_READ = 2 * 1024 * 1024  # several reads of a socket
PATIENT = ConnectionLimits(max_connections=10, max_per_address=10, head=60.0, body=60.0)
ENDLESS = {
    "requests": GET * 1000,
    "trailers": CHUNKED + b"0\r\n" + b"a: %b\r\n" % (b"x" * 1000) * 100,
    "one trailer": CHUNKED + b"0\r\na: ",
    "an extension of a chunk": CHUNKED + b"1;a=",
    "headers of the next": GET + GET[:-2] + b"a: %b\r\n" % (b"x" * 1000) * 100,
    "one header of the next": GET + GET[:-2] + b"a: ",
    "a path of the next": GET + b"GET /",
}


class Watched(Connection):
    """Keeps count of what it reads."""

    registry = ConnectionRegistry(PATIENT)
    read = 0
    max_waiting = 0
    lost = False

    def data_received(self, data: bytes) -> None:
        self.read += len(data)
        super().data_received(data)
        self.max_waiting = max(self.max_waiting, len(self.pipeline))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)


class Server:
    """Answers one request after the other, each when it may."""

    def __init__(self) -> None:
        self.begun, self.may = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.connection: Watched | None = None

    async def app(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        await receive()
        self.begun.release()
        await self.may.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    def protocol(self) -> Watched:
        config = Config(self.app, log_config=None, interface="asgi3", lifespan="off", ws="none")  # type: ignore[arg-type]
        self.connection = Watched(config, ServerState(), {})
        return self.connection

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        listening = await asyncio.get_running_loop().create_server(self.protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            listening.close()


async def _pour(writer: asyncio.StreamWriter, more: bytes) -> None:
    """Send without end; return once it is cut off."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(more)
            await writer.drain()


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_cut_off_before_it_is_held(name: str) -> None:
    async def scenario() -> None:
        server = Server()
        async with server.connected() as (_, writer), asyncio.timeout(40):
            writer.write(ENDLESS[name])
            await _pour(writer, ENDLESS[name] if name == "requests" else b"x" * 50_000)
            assert server.connection is not None
            assert server.connection.read < MAX_READ
            assert server.connection.max_waiting <= MAX_PIPELINED

    asyncio.run(scenario())


def test_reading_pauses_while_requests_wait_for_earlier_answers() -> None:
    async def scenario() -> None:
        server = Server()
        async with server.connected() as (reader, writer), asyncio.timeout(40):
            writer.write(GET * 3)
            await server.begun.acquire()
            assert server.connection is not None
            assert len(server.connection.pipeline) == 2
            writer.write(GET * 20)
            await writer.drain()
            server.may.release()
            await reader.readuntil(b"\r\n\r\n")
            await server.begun.acquire()
            await asyncio.sleep(0.1)
            assert server.connection.read == len(GET * 3)
            for _ in range(22):
                server.may.release()
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())


def test_as_many_as_may_wait_are_answered() -> None:
    async def scenario() -> None:
        server = Server()
        async with server.connected() as (reader, writer), asyncio.timeout(40):
            writer.write(GET * (MAX_PIPELINED + 1))
            for _ in range(MAX_PIPELINED + 1):
                server.may.release()
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())
