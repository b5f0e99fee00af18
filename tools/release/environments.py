"""Clean environments: the wheel with one extra, its modules imported, and the first job by the README's words."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.release.artifacts import ROOT
from tools.release.extras import import_code

MAX_SECONDS = 60
"""From an empty folder to the result of the first job."""
_FIRST_BLOCK = re.compile(r"```python\n(# app\.py\n.*?)```", re.DOTALL)


def find_interpreters(named: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the interpreters that run here by version, and the names of those that do not."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in named:
        command = [name, "-c", "import sys; print(sys.version.split()[0])"]
        path = shutil.which(name)
        ran = subprocess.run(command, capture_output=True, text=True, check=False) if path else None
        if ran is not None and ran.returncode == 0:
            found[ran.stdout.strip()] = name
        else:
            missing.append(name)
    return found, missing


def run_first_job(python: str, wheel: Path, extra: str, folder: Path) -> float:
    """Installs the wheel in a new environment and runs the README's first job; returns the seconds it took.

    Raises:
        ValueError: A command failed, or the job's result is not that of the README.
    """
    begun = time.monotonic()
    _run([python, "-m", "venv", "--without-pip", "venv"], folder)  # so that the SBOM does not list pip
    program = str(folder / "venv" / "bin" / "python")
    wanted = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", program]
    _run([*pip, "install", "--quiet", wanted], folder)
    block = _FIRST_BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if block is None:
        raise ValueError("README.md has no block that begins with '# app.py'")
    (folder / "app.py").write_text(block[1], encoding="utf-8")
    command = [str(folder / "venv" / "bin" / "holdfast"), "worker", "start", "--app", "app:app"]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=folder, env=_environment(), stdout=log, stderr=log)
    try:
        printed = _run([program, "app.py"], folder)
    finally:
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(MAX_SECONDS)
    if printed != "Hello, Ada!\n" or code:
        raise ValueError(f"{extra}: printed {printed!r}, the worker's exit code is {code}; see {folder}/worker.log")
    return time.monotonic() - begun


def import_modules(extra: str, folder: Path) -> None:
    """Imports the modules of an extra in its environment; ValueError if that fails."""
    _run([str(folder / "venv" / "bin" / "python"), "-c", import_code(extra)], folder)


def write_sbom(folder: Path, target: Path) -> None:
    """Writes a CycloneDX document of the packages in an environment, which is the same for each call."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--short-PURLs"]
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--output-file", str(target)]
    _run([*command, *options, str(folder / "venv" / "bin" / "python")], folder)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTHON"))}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _run(command: list[str], folder: Path) -> str:
    """Returns the standard output of a command; ValueError with all it wrote if it fails."""
    ran = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ValueError(f"{' '.join(command[:6])}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout
