"""Where each queue's claims go on: past the index entries of jobs that were taken and no vacuum has removed yet.

A queue of a million jobs leaves as many dead entries at the front of its index while it drains, and with an old
snapshot open somewhere nothing may clear them: each claim would walk over all of them. So a claim that brought as many
jobs as it asked for is the start of a run: the next one begins behind its last job. What arrives in front of the cursor
meanwhile (a higher priority, a retry, a transaction that committed late) is found by the next look from the start. Such
a look happens as soon as a claim brings less than it asked for, at news of the queue, and ``INTERVAL`` after the last
one at the latest. Only looks that turn out expensive are spaced further, so that they take no more than a tenth of the
time, and never more than ``LONGEST`` apart: that bounds how long a job may be passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

INTERVAL = 0.05  # seconds between looks from the start
LONGEST = 2.0  # seconds, however expensive they are
_SHARE = 10  # a look may cost a tenth of the time
_LARGE = 100  # jobs; smaller claims always look from the start: they leave little behind


class Place(NamedTuple):
    """A position in the order of a queue's ready jobs."""

    rank: int
    run_at: int
    seq: int


START = Place(-(1 << 31), -(1 << 63), -(1 << 63))


class _Run(NamedTuple):
    place: Place
    until: float  # then a look from the start is due


class Cursors:
    """The places of one store object."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._runs: dict[str, _Run] = {}
        self._costs: dict[str, float] = {}  # seconds that the latest look from the start took

    def place(self, queue: str) -> Place:
        """Where a claim of this queue begins."""
        run = self._runs.get(queue)
        return START if run is None or self._now() >= run.until else run.place

    def claimed(self, queue: str, begun: Place, last: Place | None, *, full: bool, number: int, seconds: float) -> None:
        """A claim of ``number`` jobs that began at ``begun`` and took ``seconds``; ``full``: as many as were wanted."""
        from_start = begun == START
        if from_start:
            self._costs[queue] = seconds
        if last is None or not full or number < _LARGE:
            self._runs.pop(queue, None)
            return
        run = self._runs.get(queue)
        if from_start or run is None:
            run = _Run(last, self._now() + min(LONGEST, max(INTERVAL, _SHARE * self._costs.get(queue, 0.0))))
        self._runs[queue] = run._replace(place=last)

    def news(self, queue: str) -> None:
        """Something became ready in this queue, maybe in front of the cursor: look soon."""
        run = self._runs.get(queue)
        if run is None:
            return
        if self._costs.get(queue, 0.0) < INTERVAL / _SHARE:
            del self._runs[queue]
