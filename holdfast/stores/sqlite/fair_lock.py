"""Fair lock for writing, between processes.

SQLite's own lock keeps writers correct but not fair: its last holder takes it again, and a process can starve
(measured: 60,000 jobs to none). So a writer first takes the *turn*, then the *lock*, then gives up the turn: one that
has just written finds the turn taken by a waiter. This is about fairness only. A process that is frozen here, or an
outsider with a plain connection, costs at most ``PATIENCE``; then SQLite's own lock decides.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time

PATIENCE = 2.0  # seconds
_DOUBT = 5.0  # seconds
_PAUSES = (0.00005, 0.0001, 0.0002, 0.0005)  # seconds between looks: short at first, a hand-over takes about as long


class FairLock:
    """Two lock files beside the database, and a lock among this process's threads."""

    def __init__(self, path: str) -> None:
        self._threads = threading.Lock()
        self._turn = _open(path + "-turn")
        self._lock = _open(path + "-lock")
        self._locked = False
        self._doubted_until = 0.0  # a process is frozen here: until then none waits behind it again

    def acquire_turn(self) -> None:
        """Return when it is this thread's turn; ``leave`` must follow."""
        self._threads.acquire()
        try:
            now = time.monotonic()
            deadline = now if now < self._doubted_until else now + PATIENCE
            turn = _take(self._turn, deadline)
            self._locked = _take(self._lock, deadline)
            self._doubted_until = 0.0 if self._locked else time.monotonic() + _DOUBT
            if turn:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
        except BaseException:  # an interrupt from the keyboard
            self._threads.release()
            raise

    def release_turn(self) -> None:
        """The turn is over."""
        if self._locked:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Closes the files."""
        os.close(self._turn)
        os.close(self._lock)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(file: int, deadline: float) -> bool:
    """Returns True if the lock was had before the deadline."""
    looks = 0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
            looks += 1
        else:
            return True
