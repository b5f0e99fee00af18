"""The application: the settings beside it, and the one thing that a job does when it is due."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast import Dead, Holdfast, Invalid, Settings
from holdfast.core.models import NewJob
from holdfast.settings.settings import SETTINGS

CALLBACK = "callback"
MAX_SECONDS = 3600
SERVER_PORT = "SERVER_PORT"


class DelayedQueue(Holdfast):
    """Holdfast that checks what a callback is given when the job is submitted, by whatever client."""

    def draft_job(self, task: str, payload: Mapping[str, Any] | str, **options: Any) -> NewJob:
        """Returns the job that ``enqueue`` would submit; Invalid for a payload that no callback could work with."""
        job = super().draft_job(task, payload, **options)
        if task == CALLBACK:
            wait_seconds(msgspec.json.decode(job.payload).get("payload"), "payload.payload")
        return job


def server_port() -> int | None:
    """The port that SERVER_PORT says, if it says one; Invalid where it is none."""
    text = os.environ.get(SERVER_PORT)
    return SETTINGS["api_port"].kind.parse(SERVER_PORT, text) if text else None


def wait_seconds(payload: Any, field: str = "payload") -> float:
    """Returns how long a callback with this payload takes; Invalid where ``seconds`` is no number or out of bounds."""
    seconds = payload.get("seconds", 0) if isinstance(payload, dict) else 0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SECONDS:
        raise Invalid(f"{field}.seconds", seconds, f"give a number from 0 to {MAX_SECONDS}")
    return float(seconds)


app = DelayedQueue(settings=Settings.load(path=Path(__file__).parents[1] / "holdfast.toml", api_port=server_port()))


@app.task(CALLBACK)
async def callback(payload: Any) -> None:
    """Put your own work here. A payload of ``{"seconds": 2}`` takes two seconds, for those who want to look on."""
    try:
        seconds = wait_seconds(payload)
    except Invalid as error:  # pushed into Redis by hand: no other attempt would do better
        raise Dead(str(error)) from None
    await asyncio.sleep(seconds)
