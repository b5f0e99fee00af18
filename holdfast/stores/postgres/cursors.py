"""Start positions of each queue's claims: past index entries of taken jobs that no vacuum has removed yet.

A queue of a million jobs leaves as many dead entries at the front of its index while it drains, and with an old
snapshot open somewhere nothing may clear them: each claim would walk over all of them. So where that is worth it the
next claim begins behind the last job of this one. It is worth it after a claim that brought many jobs, all it asked
for; and after any claim where looks from the start have become expensive.

What is in front of a cursor (a higher priority, a job given back, a transaction that committed late, a row that
another transaction had locked) is found by the next look from the start. It comes

- at once, where this process made the job ready itself while no look was under way, or where behind the cursor there
  is nothing,
- ``INTERVAL`` after the last one began, or where that one was expensive, late enough for looks to take no more than a
  tenth of the time; with news of the queue as early as that rule allows,
- and never later than ``LONGEST`` after the last one began. **That is the bound**: a worker that goes on claiming
  passes no job over for longer, plus the one claim that is under way.

A cursor is a memory of this process about the rows it has seen: other workers can make it useless, never wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

INTERVAL = 0.05  # seconds between the beginnings of looks from the start, where they are cheap
LONGEST = 2.0  # seconds, however expensive they are
_SHARE = 10  # looks may take a tenth of the time
_LARGE = 100  # jobs; smaller claims leave little behind
_TAKING = 15e-6  # seconds that a job's taking costs, wherever the look began
_EXPENSIVE = 0.01  # seconds beyond that; then cursors are for small claims too
_LOOKS = 3  # in a row: a single one may have been slow for another reason
_QUEUES_MOST = 10_000  # places kept; without one a claim looks from the start
_QUEUE, _PRIORITY, _LOSSES, _RUN_AT, _SEQ = 2, 7, 8, 9, 12  # columns of a claimed job


class QueuePosition(NamedTuple):
    """A position in the order of a queue's ready jobs."""

    rank: int
    run_at: int
    seq: int


START = QueuePosition(-(1 << 31), -(1 << 63), -(1 << 63))
END = QueuePosition((1 << 31) - 1, (1 << 63) - 1, (1 << 63) - 1)


class ScanResult(NamedTuple):
    """Part of one queue seen by a claim: everything ready from ``begun`` to ``last``, as of ``at``."""

    begun: QueuePosition
    last: QueuePosition | None  # of the jobs it took
    number: int  # of jobs it took
    full: bool  # as many as it wanted
    at: float
    seconds: float


class _Queue:
    """A queue's place: everything in front of it was looked at when ``looked_at`` had come, or since."""

    __slots__ = ("costs", "looked_at", "place", "until")

    def __init__(self) -> None:
        self.place: QueuePosition | None = None
        self.looked_at = 0.0
        self.until = 0.0  # then a look from the start is due
        self.costs: tuple[float, ...] = ()  # seconds the latest looks from the start took, beyond taking jobs

    @property
    def cost(self) -> float:
        return min(self.costs, default=0.0)

    @property
    def expensive(self) -> bool:
        return len(self.costs) == _LOOKS and self.cost >= _EXPENSIVE

    def note_result(self, look: ScanResult) -> None:
        self.costs = (*self.costs, max(0.0, look.seconds - _TAKING * look.number))[-_LOOKS:]
        self.looked_at = look.at
        self.until = look.at + min(LONGEST, max(INTERVAL, _SHARE * self.cost))

    def search_earlier(self) -> None:
        self.until = min(self.until, self.looked_at + _SHARE * self.cost)


class Cursors:
    """The places of one store object."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._queues: dict[str, _Queue] = {}

    def start_position(self, queue: str) -> QueuePosition:
        """Returns the start position of a claim of this queue."""
        known = self._queues.get(queue)
        if known is None or known.place is None or self._now() >= known.until:
            return START
        return known.place

    def note_claim(self, queue: str, look: ScanResult) -> None:
        """A claim has looked into this queue."""
        known = self._queues.get(queue)
        if known is None:
            if len(self._queues) >= _QUEUES_MOST:
                self._queues.clear()
            known = self._queues[queue] = _Queue()
        if look.begun == START:
            known.note_result(look)
            known.place = look.last
        elif known.place is None or known.place < look.begun:
            return  # another claim went back to the start meanwhile, and has not come as far again
        elif look.last is not None:
            known.place = max(known.place, look.last)
        if look.last is None or not (known.expensive or (look.full and look.number >= _LARGE)):
            known.place = None

    def find_ready(self, queue: str, first: QueuePosition) -> None:
        """This process made jobs of the queue ready, the first of them at ``first``: look soon, if that is in front."""
        known = self._queues.get(queue)
        if known is None or known.place is None or first >= known.place:
            return
        if known.expensive:
            known.search_earlier()
        else:
            known.place = None

    def note_new_jobs(self, queue: str | None) -> None:
        """Notes that other processes made jobs of the queue (None: of some queue) ready: look earlier."""
        for known in self._queues.values() if queue is None else filter(None, [self._queues.get(queue)]):
            known.search_earlier()


def plan_searches(
    queues: Sequence[str],
    slots: Sequence[int],
    places: Sequence[QueuePosition],
    taken: Sequence[Any],
    room: int,
    at: float,
    seconds: float,
) -> Iterator[tuple[str, ScanResult]]:
    """Yields the part of each queue that a claim of ``room`` jobs saw, without unvisited queues. Those whose turn did
    not come, it has not seen.
    """
    number = Counter([row[_QUEUE] for row in taken])
    last = {row[_QUEUE]: row for row in taken if not row[_LOSSES]}  # suspects come from an index of their own
    exhausted = len(taken) >= room
    left = set(last)
    for queue, wanted, begun in zip(queues, slots, places, strict=True):
        if exhausted and not left:
            return
        left.discard(queue)
        row = last.get(queue)
        place = None if row is None else QueuePosition(-row[_PRIORITY], row[_RUN_AT], row[_SEQ])
        full = number[queue] >= wanted or (exhausted and not left)
        yield queue, ScanResult(begun, place, number[queue], full, at, seconds)
