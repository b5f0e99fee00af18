"""Tells when the settings file says something else than what a running API was started with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError
from holdfast.core.events import SettingsChanged, SettingsRefused
from holdfast.settings.settings import Watch

_EVERY = 2.0  # seconds


@asynccontextmanager
async def settings_watched(app: Holdfast) -> AsyncIterator[None]:
    """While entered, each change is logged: the API goes on as it was started, open to all if it was so."""
    watching = asyncio.create_task(_watch(app), name="holdfast-settings")
    try:
        yield
    finally:
        watching.cancel()


async def _watch(app: Holdfast) -> None:
    watch = Watch(app.settings)
    while True:
        await asyncio.sleep(_EVERY)
        try:
            newer = watch.poll_changes()
        except ConfigError as error:
            app.events.emit(SettingsRefused(problem=str(error)))
            continue
        if newer is not None:
            changed = app.settings.changed_values(newer)
            app.events.emit(SettingsChanged(changed=changed, remedy="restart the API: it goes on as it was started"))
