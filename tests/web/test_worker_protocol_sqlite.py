"""The conformance test of workers: ours in JavaScript keeps all of it, a careless one does not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import NODE, WORKER
from tests.support.pages import find_block

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = shlex.split(find_block("docs/worker-protocol.md", "python -m").text)
pytestmark = pytest.mark.timeout(300)


def conformance(command: str, *words: str) -> tuple[int, str]:
    """The exit code and the output of the command on the page, for another worker."""
    output = subprocess.run(
        [sys.executable, *DOCUMENTED[1:-1], command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert "Traceback" not in output.stderr, output.stderr
    return output.returncode, output.stdout + output.stderr


def test_the_javascript_worker_keeps_the_protocol() -> None:
    code, output = conformance(DOCUMENTED[-1].replace("node worker.js", f"{NODE} {WORKER}"))
    assert (code, output.splitlines()[-1]) == (0, "17 of 17 kept"), output


def test_a_careless_worker_is_found_out() -> None:
    code, output = conformance(f"{sys.executable} -m tests.web.careless", "--patience", "5")
    broken = {line.split(":")[0].removeprefix("BROKEN").strip() for line in output.splitlines() if "BROKEN" in line}
    assert code == 1
    assert {"returns results", "gives up what cannot succeed", "hears cancellations", "extends its leases"} <= broken
    assert {"names its types", "starts nothing whose lease has ended", "gives back what it has at SIGTERM"} <= broken


def test_a_command_that_is_not_there_is_a_plain_error() -> None:
    code, output = conformance("/nothing/there")
    assert (code, output) == (78, "Error: command: '/nothing/there' cannot be started: No such file or directory\n")
