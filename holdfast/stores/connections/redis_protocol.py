"""Connection to Redis: requests go out in order, and their answers come back in order.

The driver connects, secures and authenticates; from then on we read and write ourselves. Its own connections take
several times as long for a call, and send no request before the last one was answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import hiredis
from redis import exceptions as driver

Argument: TypeAlias = str | bytes | int
MessageCallback: TypeAlias = Callable[[Any], object]

_MORE = object()


class RedisConnection(asyncio.Protocol):
    """A connected connection of the driver, taken over. ``on_message`` receives published messages."""

    def __init__(self, connection: Any, on_message: MessageCallback | None = None) -> None:
        self.ended = asyncio.Event()
        self.scripts: set[str] = set()
        """Those that were loaded here: the server may have forgotten them since."""
        self.is_prepared = False
        """Whether what comes before the first call was done."""
        self._reader = hiredis.Reader(protocolError=driver.InvalidResponse, replyError=_error, notEnoughData=_MORE)
        self._asked: deque[_Asked] = deque()
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        # From here on the connection is ours, and the driver's object, once it is gone, does not close it.
        self._writer, connection._writer, connection._reader = connection._writer, None, None
        self._transport: asyncio.Transport = self._writer.transport
        self._transport.set_protocol(self)

    @property
    def is_connected(self) -> bool:
        """Returns True if there is any use in asking."""
        return not self._transport.is_closing()

    def send_command(self, *words: Argument) -> asyncio.Future[Any]:
        """Send a command; its answer, or the error the server answered."""
        return self._send(_packed(words), None)

    def ask_each(self, commands: Iterable[tuple[Argument, ...]]) -> asyncio.Future[list[Any]]:
        """Send commands one after another; their answers, errors among them."""
        packed = [_packed(words) for words in commands]
        return self._send(b"".join(packed), len(packed))

    def _send(self, packed: bytes, expected: int | None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._transport.is_closing():
            answer.set_exception(driver.ConnectionError("the connection was closed"))
        else:
            self._asked.append(_Asked(answer, expected))
            self._transport.write(packed)
        return answer

    def close(self) -> None:
        """Ends it at once and fails every pending request."""
        self._transport.abort()
        self.connection_lost(None)

    # ── called by the event loop ──────────────────────────────────────────────────────────────────────────────
    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                if type(reply) is list and reply and reply[0] == b"message" and self._on_message is not None:
                    self._on_message(reply)
                elif isinstance(reply, hiredis.PushNotification) or not self._asked:
                    continue
                elif self._asked[0].add_reply(reply):
                    self._asked.popleft()
        except driver.InvalidResponse as error:
            self._transport.abort()
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        text = f"the connection was lost: {error}" if error else "the connection was closed"
        self._fail(driver.ConnectionError(text))

    def _fail(self, error: Exception) -> None:
        self.ended.set()
        while self._asked:
            answer = self._asked.popleft().answer
            if not answer.done():  # the caller may wait no more
                answer.set_exception(error)


class _Asked:
    """A pending request: for its answer, or for as many answers as are expected."""

    __slots__ = ("answer", "_expected", "_replies")

    def __init__(self, answer: asyncio.Future[Any], expected: int | None) -> None:
        self.answer = answer
        self._expected = expected
        self._replies: list[Any] = []

    def add_reply(self, reply: Any) -> bool:
        """Returns True if that was the last one."""
        if self._expected is not None:
            self._replies.append(reply)
            if len(self._replies) < self._expected:
                return False
            reply = self._replies
        if self.answer.done():
            return True
        if isinstance(reply, driver.ResponseError):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)
        return True


def _packed(words: tuple[Argument, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub says: a tuple of one
    return packed


def _error(text: str) -> driver.ResponseError:
    """Returns the server's error with its code, which the driver would remove from errors it knows."""
    return driver.NoScriptError(text) if text.startswith("NOSCRIPT") else driver.ResponseError(text)
