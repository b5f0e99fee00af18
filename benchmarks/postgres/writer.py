"""A process that submits one job after another, for a given time, with or without wake-ups.

Arguments: ``loud SECONDS`` or ``silent SECONDS``. Prints how many jobs were stored in that time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from benchmarks.application import Application
from holdfast.stores.postgres.notifications import _Notifier

_SAY, _ALONG = _Notifier.notify_soon, _Notifier.reserve_notification


def main() -> None:
    """``writer URL``."""
    uvloop.run(_serve(sys.argv[1]))


async def _serve(url: str) -> None:
    async with Application(url) as app:
        await app.noop.enqueue(n=0)
        _say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, seconds = line.split()
            loud = word == "loud"  # in this process only
            _Notifier.notify_soon = _SAY if loud else _notify_nothing  # type: ignore[method-assign, assignment]
            _Notifier.reserve_notification = _ALONG if loud else _notify_later  # type: ignore[method-assign, assignment]
            _say({"stored": await _stored(app, float(seconds))})


async def _stored(app: Application, seconds: float) -> int:
    stored, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        await app.noop.enqueue(n=stored)
        stored += 1
    return stored


def _notify_nothing(notifier: _Notifier, topics: set[str]) -> None:
    """Sends no notification."""


def _notify_later(notifier: _Notifier, topic: str) -> dict[str, None]:
    """The same."""
    return {"channel": None, "notification": None}


def _say(figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
