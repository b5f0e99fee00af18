"""The conformance test of workers: ours in JavaScript keeps all of it, a careless one does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import NODE, WORKER

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)


def conformance(command: str, *words: str) -> tuple[int, str]:
    """Its exit code, and what it prints."""
    told = subprocess.run(
        [sys.executable, "-m", "tools.worker_protocol", "--command", command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert "Traceback" not in told.stderr, told.stderr
    return told.returncode, told.stdout + told.stderr


def test_the_javascript_worker_keeps_the_protocol() -> None:
    code, told = conformance(f"{NODE} {WORKER}")
    assert (code, told.splitlines()[-1]) == (0, "16 of 16 kept"), told


def test_a_careless_worker_is_found_out() -> None:
    code, told = conformance(f"{sys.executable} -m tests.web.careless", "--patience", "5")
    broken = {line.split(":")[0].removeprefix("BROKEN").strip() for line in told.splitlines() if "BROKEN" in line}
    assert code == 1
    assert {"returns results", "gives up what cannot succeed", "hears cancellations", "extends its leases"} <= broken
    assert {"names its types", "gives back what it has at SIGTERM"} <= broken


def test_a_command_that_is_not_there_is_a_plain_error() -> None:
    code, told = conformance("/nothing/there")
    assert (code, told) == (78, "Error: command: '/nothing/there' cannot be started: No such file or directory\n")
