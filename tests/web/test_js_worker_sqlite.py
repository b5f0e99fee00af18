"""The JavaScript worker with invalid settings: it prints one line, and ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.node import NODE, WORKER
from tests.web.keyed import Keys
from tests.web.serving import Served


def _ended(**settings: str) -> tuple[int, str]:
    """The worker's exit code, and what it wrote."""
    variables = {f"HOLDFAST_{name.upper()}": value for name, value in settings.items()}
    ended = subprocess.run(
        [str(NODE), str(WORKER)],
        env={"PATH": os.defpath, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queues", "mail"),
        ("queues", '["mail"]'),
        ("queues", '{"mail": "5"}'),
        ("concurrency", "x"),
        ("concurrency", "0"),
        ("lease", "-1"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_it(name: str, value: str) -> None:
    code, output = _ended(api_url="http://127.0.0.1:9", **{name: value})
    assert code == 78
    assert output.startswith(f"HOLDFAST_{name.upper()}: ")
    assert len(output.splitlines()) == 1


def test_a_key_that_is_refused_ends_it(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path)) as served:
        unknown = _ended(api_url=served.address, api_key=keys.spare[:-4] + "0000")
        reader = _ended(api_url=served.address, api_key=keys.make("read"))
    for code, output in (unknown, reader):
        assert code == 1
        assert '"worker_stopping"' in output
        assert '"reason":"refused"' in output
