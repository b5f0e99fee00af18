"""The HTTP side of an instance: the routes, served in the event loop of the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atlas_jobs.api import site
from atlas_jobs.table import Table
from holdfast import Holdfast
from holdfast.web.serve import serving as served


@asynccontextmanager
async def serving(app: Holdfast, *, exposed: bool = False) -> AsyncIterator[None]:
    """Answer requests on SERVER_PORT while this lasts; ``exposed``: of other hosts, too."""
    async with (
        Table.opened(app.settings.url) as table,
        served(app, app.settings, site=site(app, table), exposed=exposed),
    ):
        yield
