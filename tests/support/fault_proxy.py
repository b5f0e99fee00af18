"""A TCP proxy that does to connections what networks do: silence, delay, resets, refusals, answers that never arrive.

It runs on a thread of its own; every method returns when its fault is in force.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from tests.support.servers import PATIENCE, Port

CHUNK = 1 << 16
REMEMBERED = 1 << 16
"""Bytes that are kept of what a client sent first, to know its connection by."""
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: a close throws away what is under way and resets the connection."""


@dataclass
class _Trap:
    """Cuts the connection whose client sends ``given``, or silences the network."""

    given: bytes
    answer: bytes | None
    """Cut when the server has answered with this, which the client never sees; None: before the server hears of it."""
    left: int
    silences: bool = False
    """Not a cut: this and all that follows is held back, in every connection."""


class _Connection:
    """One client and its server, and what is held back between them."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, proxy: FaultProxy) -> None:
        self.given = b""
        self.to_server, self.to_client = asyncio.Event(), asyncio.Event()
        self._client, self._server = client, server
        # asyncio's TLS transport forgets its socket when it is closed after the client has gone.
        self._sockets = [client.get_extra_info("socket"), server.get_extra_info("socket")]
        self._proxy = proxy
        self._caught: bytes | None = None
        self._before = b""

    async def pump_to_server(self, reader: asyncio.StreamReader) -> None:
        while data := await _read(reader):
            self.given = (self.given + data)[:REMEMBERED]
            trap = self._trapped(data)
            if trap is not None and trap.silences:
                self._proxy.silence()
                trap = None
            if trap is not None:
                self._caught = trap.answer
            await self._pass_on(b"" if trap is not None and trap.answer is None else data, self._server, self.to_server)
            if trap is not None and trap.answer is None:
                self.cut()
        await self._pass_on(None, self._server, self.to_server)

    async def pump_to_client(self, reader: asyncio.StreamReader) -> None:
        answered = b""
        while data := await _read(reader):
            if self._caught is None:
                await self._pass_on(data, self._client, self.to_client)
                continue
            answered += data
            if self._caught in answered:
                self.cut()
        await self._pass_on(None, self._client, self.to_client)

    def _trapped(self, data: bytes) -> _Trap | None:
        """The trap whose words this completes, if any; words may come in pieces."""
        for trap in self._proxy.traps:
            end_of_before = self._before[max(0, len(self._before) - len(trap.given) + 1) :]
            if trap.left and trap.given in end_of_before + data:
                trap.left -= 1
                return trap
        self._before = (self._before + data)[-REMEMBERED:]
        return None

    async def _pass_on(self, data: bytes | None, writer: asyncio.StreamWriter, permit: asyncio.Event) -> None:
        """Write, as late as the faults say. None is the end; it travels like everything else."""
        await asyncio.sleep(self._proxy.seconds)
        await permit.wait()
        if data is None:
            if writer.can_write_eof():
                writer.write_eof()
            else:  # TLS knows no half of an end
                writer.close()
        else:
            writer.write(data)
            await writer.drain()

    def cut(self) -> None:
        """Reset both ends; nothing that is held back arrives any more."""
        self._proxy.cuts += 1
        for end in self._sockets:
            if end is not None:  # None: a TLS client had gone before its connection was made
                with suppress(OSError):  # it is closed already
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        for writer in (self._client, self._server):
            with suppress(AttributeError):  # of Python 3.11.2, where TLS has ended already
                writer.transport.abort()
        self.to_server.set()
        self.to_client.set()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What came; nothing at the end, however it comes."""
    try:
        return await reader.read(CHUNK)
    except ConnectionError:
        return b""


class FaultProxy:
    """Stands before ``target``, a port of 127.0.0.1, on a ``port`` of its own. Use it with ``with``.

    ``tls``: clients speak TLS to it, and it speaks plainly to the target.

    Faults can be confined to the connections of clients that have sent something: ``of=b"LISTEN"``.
    """

    def __init__(self, target: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.seconds = 0.0
        self.cuts = 0
        self.accepted = 0
        self.traps: list[_Trap] = []
        self._target = target
        self._tls = tls
        self._port = Port()
        self._held = (False, False)
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._arriving: set[asyncio.Task[None]] = set()  # not yet connections
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def port(self) -> int:
        """The same for its whole life."""
        return self._port.number

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._port.release()

    async def _end(self) -> None:
        await self._stop_listening()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # one may be accepted at this very moment
            for connection in self._connections:
                connection.cut()
            for task in self._arriving:
                task.cancel()
            await asyncio.wait(others, timeout=0.05)
        await _rounds(3)  # what was closed last is closed by one of them

    def _do(self, action: Callable[[], object]) -> None:
        """Have the proxy's own thread do it, and wait until it has."""

        async def do() -> None:
            action()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────
    def hold(self, *, to_server: bool = True, to_client: bool = True, of: bytes = b"") -> None:
        """Go silent in these directions: connections stay, and new ones are accepted, but nothing arrives."""
        self._do(lambda: self._hold(to_server, to_client, of))

    def hold_from(self, given: bytes) -> None:
        """Go silent in both directions when a client says this, which is the first that does not arrive."""
        self._do(lambda: self.traps.append(_Trap(given, None, 1, silences=True)))

    def silence(self) -> None:
        """Hold everything; for the proxy's own thread."""
        self._hold(to_server=True, to_client=True, of=b"")

    def _hold(self, to_server: bool, to_client: bool, of: bytes) -> None:
        if not of:
            self._held = (to_server, to_client)
        for connection in self._of(of):
            _set(connection.to_server, not to_server)
            _set(connection.to_client, not to_client)

    def heal(self) -> None:
        """Deliver what was held back, late as it is, without delay from now on, and forget the traps."""
        self._do(self._heal)

    def _heal(self) -> None:
        self.seconds = 0.0
        self.traps = []
        self._hold(to_server=False, to_client=False, of=b"")

    def delay(self, seconds: float) -> None:
        """Let everything take this much longer, in either direction."""
        self.seconds = seconds

    def cut(self, *, of: bytes = b"") -> None:
        """Reset the connections there are."""
        self._do(lambda: [connection.cut() for connection in self._of(of)])

    def cut_before(self, given: bytes, *, times: int = 1) -> None:
        """Reset the next connections whose client says this; the server never hears it."""
        self._do(lambda: self.traps.append(_Trap(given, None, times)))

    def cut_after(self, given: bytes, *, answer: bytes = b"", times: int = 1) -> None:
        """Reset the next connections whose client says this, when the server has done it and answered ``answer``.

        The client never hears the answer. Empty: whatever the server says next is the answer.
        """
        self._do(lambda: self.traps.append(_Trap(given, answer, times)))

    def refuse(self) -> None:
        """Refuse new connections; those there are stay."""
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result()

    async def _stop_listening(self) -> None:
        """Accepted clients are served first: once its server is closed, asyncio leaves them open, unserved."""
        server, self._server = self._server, None
        if server is None:
            return
        for each in server.sockets:
            self._loop.remove_reader(each.fileno())
        await _rounds(2)
        server.close()

    def accept(self) -> None:
        """Accept new connections again."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def _of(self, given: bytes) -> list[_Connection]:
        return [connection for connection in self._connections if given in connection.given]

    # ── forwarding ────────────────────────────────────────────────────────────────────────────────────────────
    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.accepted += 1
        self._arriving.add(task)
        try:
            if self._tls is not None:
                await to_client.start_tls(self._tls, ssl_handshake_timeout=PATIENCE)
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except (OSError, asyncio.CancelledError):
            to_client.transport.abort()
            return
        finally:
            self._arriving.discard(task)
        connection = _Connection(to_client, to_server, self)
        self._connections.add(connection)
        held_to_server, held_to_client = self._held
        _set(connection.to_server, not held_to_server)
        _set(connection.to_client, not held_to_client)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(connection.pump_to_server(from_client))
                pumps.create_task(connection.pump_to_client(from_server))
        except* OSError:  # one end is gone; the other hears of it below
            pass
        finally:
            self._connections.discard(connection)
            to_client.close()
            to_server.close()


async def _rounds(number: int) -> None:
    """Let the loop go round."""
    for _ in range(number):
        await asyncio.sleep(0)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
