"""Signals reach the programs that tests start, however the tests themselves were started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import signal, subprocess, sys

def test_a_program_that_waits_hears_the_signal():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        program = "import time; print(flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=subprocess.DEVNULL) as started:
            started.stdout.readline()
            started.send_signal(number)
            assert started.wait(30) == -number
"""


def test_programs_started_by_tests_receive_ignored_signals(tmp_path: Path) -> None:
    (tmp_path / "test_heard.py").write_text(TEST, encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_heard.py"]
    ran = subprocess.run(
        ["/bin/sh", "-c", 'trap "" INT TERM HUP QUIT; exec "$@"', "sh", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, "1 passed" in ran.stdout) == (0, True), ran.stdout + ran.stderr
