"""The quickstart is the program of the README: here it runs as the README says, in an empty directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "quickstart" / "app.py"


def test_the_program_gets_its_result_from_a_worker(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "worker", "start", "--app", "app:app"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        program = [sys.executable, "app.py"]
        ran = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        assert (ran.returncode, ran.stdout) == (0, "Hello, Ada!\n"), ran.stderr
    finally:
        worker.terminate()
        assert worker.wait(60) == 0


def test_it_is_the_program_of_the_readme_and_short() -> None:
    program = PROGRAM.read_text(encoding="utf-8")
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
