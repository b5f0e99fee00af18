"""A worker process of the crash tests: the product's own, with what it reports written into the ledger beside the
handlers' lines. The checker takes from it only that a success was accepted; the rest is for the reader of a failure."""

from __future__ import annotations

import importlib
import os
import sys
import time

from holdfast.core.events import (
    Event,
    JobDead,
    JobReleased,
    JobSucceeded,
    LeaseLostEvent,
    StoreTrouble,
    WorkerStarted,
    WorkerStopping,
)
from holdfast.telemetry.logs import configure_logs
from holdfast.worker.process import run_worker
from tests.crash.ledger import append
from tests.crash.programs.tasks import LEDGER, app

KINDS: dict[type[Event], str] = {
    JobSucceeded: "accepted",
    LeaseLostEvent: "refused",
    JobReleased: "released",
    JobDead: "dead",
    StoreTrouble: "trouble",
    WorkerStarted: "ready",
    WorkerStopping: "stopping",
}


def record(event: Event) -> None:
    """One event as one line."""
    append(
        LEDGER,
        what=KINDS[type(event)],
        job=getattr(event, "job_id", None),
        text=getattr(event, "error", None),
        service=getattr(event, "service", None),
    )


def skew_clock(seconds: int) -> None:
    """Make this process believe in another time of day."""
    true, true_ns = time.time, time.time_ns
    time.time = lambda: true() + seconds
    time.time_ns = lambda: true_ns() + seconds * 10**9


if __name__ == "__main__":
    skew_clock(int(os.environ.get("CRASH_SKEW", "0")))
    importlib.import_module(os.environ["HOLDFAST_APP"].partition(":")[0])  # its tasks belong to the same application
    app.events.subscribe(record, *KINDS)
    finish_logs = configure_logs(app.settings, app.events)
    try:
        sys.exit(run_worker(app, app.settings))
    finally:
        finish_logs()
