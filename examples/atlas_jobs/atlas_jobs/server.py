"""The HTTP side of an instance: the routes, served in the event loop of the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atlas_jobs.api import site
from atlas_jobs.table import prepare
from holdfast import Holdfast
from holdfast.web.server import serve_in_loop as served


@asynccontextmanager
async def serving(app: Holdfast, *, exposed: bool = False) -> AsyncIterator[None]:
    """Answer requests on SERVER_PORT while this lasts; ``exposed``: of other hosts, too."""
    await prepare(app.settings.url)
    async with served(app, app.settings, site=site(app), exposed=exposed):
        yield
