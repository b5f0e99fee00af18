"""Waiters, and the notifications that wake them.

In this process: waiters are called directly. Elsewhere: a datagram after each commit to the socket of every process
that waits (received 0.8 ms after the commit; 0.1 % of a CPU when idle). The sockets lie in a private folder under the
temporary folder, one per database file. Their names begin with the kinds they receive: ``q-…`` queues and workers,
``j-…`` ends of jobs.
Underneath, ``data_version`` is polled every ``POLL_INTERVAL`` seconds, so a datagram that never comes (another user,
another container, the owner's own transaction) costs no more than that.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.stores.common.waiters import PendingTopics, Waiter

Predicate = Callable[[], bool]
POLL_INTERVAL = 0.5  # seconds between polls of data_version
_COARSE_MTIME_NS = 50_000_000  # a folder changed this recently is listed again: its time stamp is coarse
_MAX_DATAGRAM = 8192  # bytes of a datagram; more ended jobs than fit are sent as job:*


class _Waiter(Waiter):
    """A waiter that looks at the file, too."""

    __slots__ = ("has_changed", "is_poll", "version")

    def __init__(self, topics: Sequence[str], wake: Callable[[], object], has_changed: Predicate) -> None:
        super().__init__(frozenset(topics), wake)
        self.has_changed = has_changed
        self.version = -1  # data_version when it last looked
        self.is_poll = not any(topic.startswith("job:") for topic in topics)  # a worker's, which waits for them again


class SqliteNotifications:
    """The waiters of this process and the sockets of other processes."""

    def __init__(self, path: str, version: Callable[[], int]) -> None:
        self._path = path
        self._folder = _folder_for(path)
        self._read_version = version
        self._last_seen: dict[frozenset[str], int] = {}  # data_version when a wait for these topics last ended
        self._readers: Counter[tuple[asyncio.AbstractEventLoop, socket.socket]] = Counter()
        self._waiters: set[_Waiter] = set()
        self._missed = PendingTopics()
        self._lock = threading.Lock()
        self._sockets: dict[str, tuple[socket.socket, Path]] = {}
        self._sender: socket.socket | None = None
        self._peers: list[str] = []
        self._peers_read_at = (-1, 0)

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────
    def notify_committed(self, topics: set[str]) -> None:
        """Something was committed that these topics stand for. From any thread."""
        with self._lock:
            matching = [waiter for waiter in self._waiters if waiter.matches_topics(topics)]
            if not matching:
                self._missed.buffer_topics(topics)
        for waiter in matching:
            waiter.wake()
        self._notify_processes(topics)

    def has_end_waiters(self) -> bool:
        """Returns True if any waiter, here or in another process, awaits the ending of some job."""
        if any(name[:2] == "j-" for name in self._peer_names()):
            return True
        with self._lock:
            return self._is_end_awaited()

    def _is_end_awaited(self) -> bool:
        return any(topic.startswith("job:") for waiter in self._waiters for topic in waiter.topics)

    def _notify_processes(self, topics: set[str]) -> None:
        names = self._peer_names()
        if not names:
            return
        with self._lock:
            own = {str(address) for _, address in self._sockets.values()}
        kinds = {"j-" if topic.startswith("job:") else "q-" for topic in topics}
        for name in names:
            address = f"{self._folder}/{name}"
            if name[:2] in kinds and address not in own:
                self._send(_datagram(topics, name[:2] == "j-"), address)

    def _peer_names(self) -> list[str]:
        if self._folder is None:
            return []
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - at each commit, and a Path costs more than the call
            read_for, read_at = self._peers_read_at
            if changed != read_for or read_at - changed < _COARSE_MTIME_NS:
                self._peers = [entry.name for entry in Path(self._folder).iterdir()]
                self._peers_read_at = (changed, time.time_ns())
        except OSError:  # the folder was cleaned away: no process listens there
            self._peers, self._peers_read_at = [], (-1, 0)
        return self._peers

    def _send(self, datagram: bytes, address: str) -> None:
        try:
            self._open_sender().sendto(datagram, address)
        except ConnectionRefusedError:  # its process died: no process will read there again
            Path(address).unlink(missing_ok=True)
        except OSError:  # a full socket wakes its reader anyhow, a missing one has left; the commit stands
            return

    def _open_sender(self) -> socket.socket:
        with self._lock:
            if self._sender is None:
                self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sender.setblocking(False)
            return self._sender

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], timeout: float, is_done: Predicate, has_changed: Predicate) -> None:
        """Return at a notification of a topic, a commit of another connection that concerns it, or after ``timeout``.

        Calls ``is_done`` once this waiter is registered, which finds an earlier change.
        """
        loop = asyncio.get_running_loop()
        notified = asyncio.Event()
        waiter = _Waiter(topics, lambda: loop.is_closed() or loop.call_soon_threadsafe(notified.set), has_changed)
        sockets = self._register(waiter)
        for sock in sockets:
            self._add_reader(loop, sock)
        try:
            if self._was_notified(waiter) or is_done():
                return
            deadline = loop.time() + timeout
            while not notified.is_set() and (left := deadline - loop.time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, POLL_INTERVAL)):
                        await notified.wait()
                if not notified.is_set() and self._data_changed(waiter):
                    return
        finally:
            for sock in sockets:
                self._remove_reader(loop, sock)
            self._unregister(waiter)

    def wait_in_thread(self, topics: Sequence[str], timeout: float, is_done: Predicate, has_changed: Predicate) -> None:
        """``wait`` for a thread without an event loop."""
        receiver, notified = socket.socketpair()
        waiter = _Waiter(topics, lambda: _wake_thread(notified), has_changed)
        sockets = self._register(waiter)
        try:
            if self._was_notified(waiter) or is_done():
                return
            poll = select.poll()  # select() stops at 1,023 descriptors
            for sock in (receiver, *sockets):
                poll.register(sock, select.POLLIN)
            deadline = time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0:
                readable = {number for number, _ in poll.poll(min(left, POLL_INTERVAL) * 1000)}
                if receiver.fileno() in readable or self._data_changed(waiter):
                    return
                for sock in sockets:
                    if sock.fileno() in readable:
                        self._receive(sock)
        finally:
            self._unregister(waiter)
            receiver.close()
            notified.close()

    def _add_reader(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Adds one reader a loop and socket, for any number of waiters."""
        self._readers[loop, sock] += 1
        if self._readers[loop, sock] == 1:
            loop.add_reader(sock, self._receive, sock)

    def _remove_reader(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._readers[loop, sock] -= 1
        if not self._readers[loop, sock]:
            del self._readers[loop, sock]
            loop.remove_reader(sock)

    def close(self) -> None:
        """Take down the sockets."""
        with self._lock:
            for kind in list(self._sockets):
                self._close_socket(kind)
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _register(self, waiter: _Waiter) -> list[socket.socket]:
        """Registers the waiter, and only then returns its sockets: they stay open for it."""
        kinds = {"j-" if topic.startswith("job:") else "q-" for topic in waiter.topics}
        with self._lock:
            self._waiters.add(waiter)
            return [sock for kind in sorted(kinds) if (sock := self._own_socket(kind)) is not None]

    def _unregister(self, waiter: _Waiter) -> None:
        """Removes a waiter. The last one for ends of jobs closes their socket: settlements then send no datagram."""
        with self._lock:
            self._waiters.discard(waiter)
            if "j-" in self._sockets and not self._is_end_awaited():
                self._close_socket("j-")

    def _was_notified(self, waiter: _Waiter) -> bool:
        """Returns True if there was a notification for it before it was registered."""
        with self._lock:
            missed = self._missed.take(waiter)
        # A wait for the same topics begins where the last one ended: no commit between the two goes unnoticed.
        waiter.version = self._last_seen.get(waiter.topics, -1) if waiter.is_poll else self._read_version()
        return self._data_changed(waiter) or missed

    def _data_changed(self, waiter: _Waiter) -> bool:
        """Returns True if another connection has committed what concerns this waiter since it last looked."""
        before, waiter.version = waiter.version, self._read_version()
        if waiter.is_poll:
            self._last_seen[waiter.topics] = waiter.version
        return waiter.version != before and waiter.has_changed()

    def _receive(self, sock: socket.socket) -> None:
        topics = {topic for topic in _received(sock) if ":" in topic}
        with self._lock:
            matching = [waiter for waiter in self._waiters if waiter.matches_topics(topics)]
        for waiter in matching:
            waiter.wake()

    def _own_socket(self, kind: str) -> socket.socket | None:
        """This process's socket of a kind; None where it cannot be had: then the polls of data_version serve."""
        if kind in self._sockets and not self._sockets[kind][1].exists():
            self._close_socket(kind)  # the temporary folder was cleaned
        if kind not in self._sockets:
            self._folder = _folder_for(self._path)
            opened = None if self._folder is None else _open_socket(Path(self._folder, f"{kind}{os.urandom(8).hex()}"))
            if opened is None:
                return None
            self._sockets[kind] = opened
        return self._sockets[kind][0]

    def _close_socket(self, kind: str) -> None:
        sock, address = self._sockets.pop(kind)
        sock.close()
        address.unlink(missing_ok=True)


def _received(sock: socket.socket) -> Iterator[str]:
    """Every topic that has arrived."""
    while True:
        try:
            datagram = sock.recv(_MAX_DATAGRAM + 1024)
        except BlockingIOError:
            return
        yield from datagram.decode("utf-8", "replace").split("\n")


def _open_socket(address: Path) -> tuple[socket.socket, Path] | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # no descriptors left
        return None
    sock.setblocking(False)
    try:
        sock.bind(str(address))
    except OSError:  # too long a path, a folder that was just cleaned away
        sock.close()
        return None
    return sock, address


def _wake_thread(sock: socket.socket) -> None:
    with suppress(OSError):  # the waiter has just gone
        sock.send(b".")


def _datagram(topics: set[str], for_ends: bool) -> bytes:
    chosen = [topic for topic in topics if topic.startswith("job:") == for_ends]
    text = "\n".join(chosen).encode()
    return text if len(text) <= _MAX_DATAGRAM else (b"job:*" if for_ends else b"queue:*\nworker:*")


def _folder_for(path: str) -> str | None:
    """This user's private folder for this database's sockets; None where it cannot be had."""
    base = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    digest = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = base / digest
    try:
        for each in (base, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink() or each.stat().st_uid != os.getuid():
                return None
    except OSError:
        return None
    return str(folder)
