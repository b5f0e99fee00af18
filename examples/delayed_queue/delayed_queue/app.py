"""The application: the settings beside it, and the one thing that a job does when it is due."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from holdfast import Holdfast, Settings
from holdfast.config import SETTINGS

SERVER_PORT = "SERVER_PORT"


def server_port() -> int | None:
    """The port that SERVER_PORT says, if it says one; Invalid where it is none."""
    text = os.environ.get(SERVER_PORT)
    return SETTINGS["api_port"].kind.parse(SERVER_PORT, text) if text else None


app = Holdfast(settings=Settings.load(path=Path(__file__).parents[1] / "holdfast.toml", api_port=server_port()))


@app.task("callback")
async def callback(payload: Any) -> None:
    """Put your own work here. A payload of ``{"seconds": 2}`` takes two seconds, for those who want to look on."""
    if isinstance(payload, dict):
        await asyncio.sleep(payload.get("seconds", 0))
