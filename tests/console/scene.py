"""The console as a process, and tabs that are signed in to it."""

from __future__ import annotations

import httpx
import msgspec

from tests.console.world import World
from tests.support.browser import BrowserThread, Tab
from tests.support.plain_http import PLAIN
from tests.web.serving import Served

PAGES = (
    "",
    "/jobs",
    "/jobs?state=dead",
    "/jobs?queue=none",
    "/jobs?task=a&task=b&not_started_after=2030-01-31T08:00:00Z",
    "/jobs/{queued}",
    "/jobs/{dead}",
    "/jobs/{running}",
    "/jobs/{running}?lines=latest",
    "/jobs/{queued}/graph",
    "/jobs/{running}/graph",
    "/jobs/{batch}/graph",
    "/errors",
    "/errors?order=most",
    "/errors/{error}",
    "/errors/0123456789ab",
    "/bulk/preview?action=replay&state=dead",
    "/queues",
    "/workers",
    "/schedules",
    "/schedules/nightly",
    "/limits",
    "/limits/crm",
    "/limits/keyed",
    "/batches",
    "/batches/{batch}",
    "/batches/{batch}?state=cancelled",
    "/jobs/{batch}",
    "/faults",
)
"""Every page; words in braces stand for ids of jobs."""


class Scene:
    """An API as a process on a store with one of everything, and a client that changes the store beside it."""

    def __init__(self, browser: BrowserThread, served: Served, key: str, world: World | None = None) -> None:
        self.browser, self.served, self.key = browser, served, key
        self.world = world or World(queued="", dead="", running="", error="", batch="")
        self.client = httpx.Client(base_url=served.address, headers={"x-api-key": key}, timeout=60, verify=PLAIN)

    def open_tab(self, *, width: int = 1280, dark: bool = False) -> Tab:
        """Returns a tab that is signed in."""
        tab = Tab(self.browser, self.served.address, width=width, dark=dark)
        tab.visit("/sign-in")
        tab.page.fill("#key", self.key)
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector(".tiles")
        return tab

    def path(self, page: str) -> str:
        """Returns the path of a page of this store."""
        return page.format(**msgspec.structs.asdict(self.world))
