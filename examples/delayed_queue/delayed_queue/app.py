"""The application: the settings beside it, and the one thing that a job does when it is due."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast import Holdfast, Settings

app = Holdfast(settings=Settings.load(path=Path(__file__).parents[1] / "holdfast.toml"))


@app.task("callback")
async def callback(payload: Any) -> None:
    """Put your own work here. A payload of ``{"seconds": 2}`` takes two seconds, for those who want to look on."""
    if isinstance(payload, dict):
        await asyncio.sleep(payload.get("seconds", 0))
