"""Health of a worker process, as probes ask."""

from __future__ import annotations

import time
from typing import NamedTuple

from holdfast.worker.context import WorkerContext


class Health(NamedTuple):
    """``live``: its event loop turns. ``well``: it also fetches jobs, or knows that there are none."""

    live: bool
    well: bool
    status: str
    """``ok``, or what is not."""


def health_of(shift: WorkerContext) -> Health:
    """As it is now. From any thread."""
    settings, now = shift.settings, shift.clock.monotonic()
    within = settings.health_within.total_seconds()
    live = time.monotonic() - shift.heard_at <= within  # the loop's health is a matter of real time
    if shift.stopping.is_set():
        return Health(live, False, "stopping")
    if not live:
        return Health(False, False, "blocked")
    if shift.fetched_at is None:
        return Health(True, False, "starting")
    if shift.sated:  # its hands are full: then it is well as long as it renews what it holds
        well = now - max(shift.renewed_at, shift.fetched_at) <= within + settings.beat.total_seconds()
    else:
        well = now - shift.fetched_at <= within + settings.poll.total_seconds()
    return Health(True, well, "ok" if well else "store_away")
