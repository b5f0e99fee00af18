"""Start positions of each queue's claims: past index entries of taken jobs that no vacuum has removed yet.

A queue of a million jobs leaves as many dead entries at the front of its index while it drains, and with an old
snapshot open somewhere nothing may clear them: each claim would walk over all of them. So where that is worth it the
next claim begins behind the last job of this one. It is worth it after a claim that brought many jobs, all it asked
for; and after any claim where scans from the start have become expensive.

What is in front of a cursor (a higher priority, a job given back, a transaction that committed late, a row that
another transaction had locked) is found by the next scan from the start. It comes

- at once, where this process made the job ready itself while no scan was under way, or where behind the cursor there
  is nothing,
- ``INTERVAL`` after the last one began, or later if that one was expensive: scans take at most a tenth of the time.
  After a notification of the queue only that rule holds,
- and never later than ``LONGEST`` after the last one began. **That is the bound**: a worker that goes on claiming
  passes no job over for longer, plus the one claim that is under way.

A cursor is a memory of this process about the rows it has seen: other workers can make it useless, never wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

INTERVAL = 0.05  # seconds between the beginnings of scans from the start, where they are cheap
LONGEST = 2.0  # seconds, however expensive they are
_SHARE = 10  # scans from the start may take a tenth of the time
_LARGE = 100  # jobs; smaller claims leave little behind
_TAKING = 15e-6  # seconds that a job's taking costs, wherever the scan began
_EXPENSIVE = 0.01  # seconds beyond that; then cursors are for small claims too
_SCANS = 3  # in a row: a single one may have been slow for another reason
_MAX_QUEUES = 10_000  # positions kept; without one a claim scans from the start
_QUEUE, _PRIORITY, _LOSSES, _RUN_AT, _SEQ = 2, 7, 8, 9, 12  # columns of a claimed job


class QueuePosition(NamedTuple):
    """A position in the order of a queue's ready jobs."""

    rank: int
    run_at: int
    seq: int


START = QueuePosition(-(1 << 31), -(1 << 63), -(1 << 63))
END = QueuePosition((1 << 31) - 1, (1 << 63) - 1, (1 << 63) - 1)


class ScanResult(NamedTuple):
    """Part of one queue seen by a claim: everything ready from ``start`` to ``last``, as of ``at``."""

    start: QueuePosition
    last: QueuePosition | None  # of the jobs it took
    number: int  # of jobs it took
    full: bool  # as many as it wanted
    at: float
    seconds: float


class _Queue:
    """Scan position of a queue: everything before it was scanned at ``scanned_at`` or later."""

    __slots__ = ("costs", "scanned_at", "position", "full_scan_due_at")

    def __init__(self) -> None:
        self.position: QueuePosition | None = None
        self.scanned_at = self.full_scan_due_at = 0.0  # start of the latest scan from the start; when the next is due
        self.costs: tuple[float, ...] = ()  # seconds the latest scans from the start took, beyond taking jobs

    @property
    def cost(self) -> float:
        return min(self.costs, default=0.0)

    @property
    def expensive(self) -> bool:
        return len(self.costs) == _SCANS and self.cost >= _EXPENSIVE

    def note_result(self, scan: ScanResult) -> None:
        self.costs = (*self.costs, max(0.0, scan.seconds - _TAKING * scan.number))[-_SCANS:]
        self.scanned_at = scan.at
        self.full_scan_due_at = scan.at + min(LONGEST, max(INTERVAL, _SHARE * self.cost))

    def advance_full_scan(self) -> None:
        self.full_scan_due_at = min(self.full_scan_due_at, self.scanned_at + _SHARE * self.cost)


class Cursors:
    """Scan positions of one store object."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._queues: dict[str, _Queue] = {}

    def start_position(self, queue: str) -> QueuePosition:
        """Returns the start position of a claim of this queue."""
        known = self._queues.get(queue)
        if known is None or known.position is None or self._now() >= known.full_scan_due_at:
            return START
        return known.position

    def note_scan(self, queue: str, scan: ScanResult) -> None:
        """Notes what a claim's scan saw of this queue."""
        known = self._queues.get(queue)
        if known is None:
            if len(self._queues) >= _MAX_QUEUES:
                self._queues.clear()
            known = self._queues[queue] = _Queue()
        if scan.start == START:
            known.note_result(scan)
            known.position = scan.last
        elif known.position is None or known.position < scan.start:
            return  # another claim went back to the start meanwhile, and has not come as far again
        elif scan.last is not None:
            known.position = max(known.position, scan.last)
        if scan.last is None or not (known.expensive or (scan.full and scan.number >= _LARGE)):
            known.position = None

    def note_own_ready_jobs(self, queue: str, first: QueuePosition) -> None:
        """Notes that this process made jobs of the queue ready, the first of them at ``first``: if that is before the
        position, the next claim scans from the start, at once or as soon as its cost allows."""
        known = self._queues.get(queue)
        if known is None or known.position is None or first >= known.position:
            return
        if known.expensive:
            known.advance_full_scan()
        else:
            known.position = None

    def note_ready_jobs_elsewhere(self, queue: str | None) -> None:
        """Notes that other processes made jobs of the queue (None: of any) ready: the next full scan is earlier."""
        for known in self._queues.values() if queue is None else filter(None, [self._queues.get(queue)]):
            known.advance_full_scan()


def split_scan(
    queues: Sequence[str],
    slots: Sequence[int],
    positions: Sequence[QueuePosition],
    taken: Sequence[Any],
    max_jobs: int,
    at: float,
    seconds: float,
) -> Iterator[tuple[str, ScanResult]]:
    """Yields the part of each queue that a claim of ``max_jobs`` saw; queues that it did not reach are left out."""
    number = Counter([row[_QUEUE] for row in taken])
    last = {row[_QUEUE]: row for row in taken if not row[_LOSSES]}  # suspects come from an index of their own
    is_full = len(taken) >= max_jobs
    left = set(last)
    for queue, wanted, start in zip(queues, slots, positions, strict=True):
        if is_full and not left:
            return
        left.discard(queue)
        row = last.get(queue)
        position = None if row is None else QueuePosition(-row[_PRIORITY], row[_RUN_AT], row[_SEQ])
        full = number[queue] >= wanted or (is_full and not left)
        yield queue, ScanResult(start, position, number[queue], full, at, seconds)
