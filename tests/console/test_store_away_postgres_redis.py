"""A store that goes away and comes back: pages say so, keep what they show, and recover by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.scene import Scene
from tests.support.browser import BrowserThread
from tests.support.postgres import Postgres
from tests.support.redis import Redis
from tests.web.keyed import Keys
from tests.web.serving import Served

SERVERS = {"postgres": Postgres, "redis": lambda: Redis(settings={"appendonly": "yes", "appendfsync": "always"})}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | Redis]:
    """A server of the test's own."""
    with SERVERS[request.param]() as server:
        yield server


def test_pages_survive_a_store_that_is_away(server: Postgres | Redis, browser: BrowserThread, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Served(tmp_path, server.url(), keys_file=str(keys.path)) as served:
        scene = Scene(browser, served, keys.spare)
        scene.client.post("/v1/jobs", json={"task": "work", "payload": {}, "queue": "mail"}).raise_for_status()
        with scene.open_tab() as old, scene.open_tab() as new:
            old.visit("/queues")
            server.stop()
            old.page.locator("#connection", has_text="The store does not answer").wait_for()
            assert old.page.locator("#queue-mail").is_visible()
            new.visit("/jobs")
            new.page.get_by_role("heading", name="The store does not answer").wait_for()
            assert new.violations() == []
            server.start()
            new.page.locator("tbody tr").wait_for()
            old.page.locator("#connection").wait_for(state="hidden")
        scene.client.close()
