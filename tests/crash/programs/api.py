"""The API as a process of the crash tests: the product's own, with what it reports written into the ledger."""

from __future__ import annotations

import sys

from holdfast.core.events import ApiStarted, Event, JobSucceeded, LeaseLostEvent
from holdfast.telemetry.logs import configure_logs
from holdfast.web.server import serve
from tests.crash.ledger import append
from tests.crash.programs.tasks import LEDGER, app

KINDS: dict[type[Event], str] = {ApiStarted: "serving", JobSucceeded: "accepted", LeaseLostEvent: "refused"}


def record(event: Event) -> None:
    """One event as one line."""
    job, address = getattr(event, "job_id", None), getattr(event, "address", None)
    append(LEDGER, what=KINDS[type(event)], job=job, address=address)


if __name__ == "__main__":
    app.events.subscribe(record, *KINDS)
    finish_logs = configure_logs(app.settings, app.events)
    try:
        sys.exit(serve(app, app.settings))
    finally:
        finish_logs()
