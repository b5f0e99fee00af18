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
    output = subprocess.run(
        [sys.executable, "-m", "tools.worker_protocol", "--command", command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert "Traceback" not in output.stderr, output.stderr
    return output.returncode, output.stdout + output.stderr


def test_the_javascript_worker_keeps_the_protocol() -> None:
    code, output = conformance(f"{NODE} {WORKER}")
    assert (code, output.splitlines()[-1]) == (0, "16 of 16 kept"), output


def test_a_careless_worker_is_found_out() -> None:
    code, output = conformance(f"{sys.executable} -m tests.web.careless", "--patience", "5")
    broken = {line.split(":")[0].removeprefix("BROKEN").strip() for line in output.splitlines() if "BROKEN" in line}
    assert code == 1
    assert {"returns results", "gives up what cannot succeed", "hears cancellations", "extends its leases"} <= broken
    assert {"names its types", "gives back what it has at SIGTERM"} <= broken


def test_a_command_that_is_not_there_is_a_plain_error() -> None:
    code, output = conformance("/nothing/there")
    assert (code, output) == (78, "Error: command: '/nothing/there' cannot be started: No such file or directory\n")
