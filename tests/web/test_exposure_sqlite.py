"""Which addresses ``holdfast api`` serves, with keys and without; and that it ends when its server does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError
from holdfast.web.server import serve
from tests.interfaces.cli import ROOT
from tests.support.plain_http import PLAIN
from tests.web.keyed import Keys
from tests.web.serving import Served

EVERYWHERE = "0.0.0.0"  # noqa: S104 - that it is refused, or served with keys, is the test


def test_with_keys_other_addresses_are_served(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    words = ("--host", EVERYWHERE)
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", *words, keys_file=str(keys.path)) as served:
        address = f"http://127.0.0.1:{served.port}"
        assert httpx.get(f"{address}/v1/jobs", timeout=40, verify=PLAIN).status_code == 401
        shown = {"authorization": f"Bearer {keys.spare}"}
        assert httpx.get(f"{address}/v1/jobs", headers=shown, timeout=40, verify=PLAIN).status_code == 200
        assert served.line("key_refused")["who"] == "anonymous"
        assert served.line("api_started")["keys"] is True
        assert served.stop() == 0


def test_without_keys_they_are_not(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", api_port=0, api_host=EVERYWHERE)
    with pytest.raises(ConfigError, match="keys_file"):
        serve(app, app.settings)


def test_without_a_name_of_its_own_it_is_not_called(tmp_path: Path) -> None:
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.client() as client:
        problem = client.get("/health", headers={"host": "rebound.example"}).json()
        assert (problem["status"], problem["detail"]) == (421, "this API is not called 'rebound.example'")
        assert client.get("/health").status_code == 200


def test_what_was_hardly_meant_is_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").touch(0o600)
    url = f"sqlite:///{tmp_path}/jobs.db"
    for remark in (f"makes a new database: {url} (url from", "keys.toml has no key"):
        with Served(tmp_path, url, keys_file="keys.toml") as served:
            assert any(remark in line["event"] for line in served.lines), served.lines
            assert served.line("api_started")["store"] == url
            assert served.stop() == 0
    assert not any("new database" in line["event"] for line in served.lines)


def test_an_api_that_is_to_be_restarted_says_so(tmp_path: Path) -> None:
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served:
        (tmp_path / "holdfast.toml").write_text('keys_file = "keys.toml"\n')
        event = served.line("settings_changed")
        assert list(event["changed"]) == ["keys_file"]
        assert "restart" in event["remedy"]
        assert served.stop() == 0


BROKEN = """
import sys
import uvicorn
from holdfast.cli import main

async def broken(self):
    if sys.argv.pop() == "it raises":
        raise RuntimeError("the loop of the server is broken")

uvicorn.Server.main_loop = broken
main(sys.argv[1:-1])
"""


@pytest.mark.parametrize("how", ["it returns", "it raises"])
def test_a_server_that_ends_by_itself_ends_the_process(tmp_path: Path, how: str) -> None:
    words = [sys.executable, "-c", BROKEN, "api", "--port", "0", "--url", f"sqlite:///{tmp_path}/jobs.db", how]
    environment = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=50, check=False)
    assert ran.returncode == 1, ran
    assert (b"ended by itself" if how == "it returns" else b"server is broken") in ran.stderr
