"""The interactive reference, opened in a browser without a network, with keys and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.web.asgi import OPERATIONS
from holdfast.web.openapi import ASSETS, openapi
from tests.support.browser import unpack_chromium
from tests.support.node import SOURCES, install_packages, run_node
from tests.web.client import Api
from tests.web.keyed import Keys
from tests.web.serving import Served


def open_page(address: str, folder: Path, key: str = "", *, operation: str = "Queues-list_queues") -> Any:
    """Opens the page at this address in Chromium, and sends a request of this operation from it."""
    folder.mkdir()
    (folder / "node_modules").symlink_to(install_packages() / "node_modules")
    shutil.copy(SOURCES / "docs_page.mjs", folder)
    environ = {name: str(value) for name, value in unpack_chromium()[1].items()}
    return json.loads(run_node("docs_page.mjs", address, key, operation, cwd=folder, environ=environ))


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
def test_reference_opens_in_a_browser_without_network(keyed: bool, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    settings = {"keys_file": str(keys.path)} if keyed else {}
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", **settings) as served:
        seen = open_page(served.address, tmp_path / "browser", keys.make("read") if keyed else "")
    assert (seen["title"], seen["operations"], seen["status"]) == ("Holdfast HTTP API", len(OPERATIONS), "200")
    assert [each for each in seen["asked"] if not each.startswith((served.address, "data:"))] == []
    assert [each for each in seen["failed"] if "401" not in each or not keyed] == []


def test_page_and_its_files_are_served_without_a_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path)) as api:
        page = api.ask("GET", "/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert len(page.headers.get_list("content-security-policy")) == 1
        for name in ASSETS:
            asset = api.ask("GET", f"/docs/{name}")
            assert (asset.status_code, len(asset.content) > 500) == (200, True)
            assert name == "docs.js" or f"docs/{name}" in page.text
        for path in ("/docs/docs.html", "/docs/LICENSE", "/docs/..%2Fdocs.py"):
            assert api.ask("GET", path).status_code == 404


def test_description_names_every_asset() -> None:
    described = openapi(OPERATIONS)["paths"]["/docs/{asset}"]["get"]["parameters"]
    assert sorted(described[0]["schema"]["enum"]) == sorted(ASSETS)
