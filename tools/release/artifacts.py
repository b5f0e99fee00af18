"""The sdist and the wheel: built twice from one commit, compared byte by byte, and their contents."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = "holdfast_pytest.py"


@dataclass(frozen=True)
class Artifacts:
    """The files of a release."""

    sdist: Path
    wheel: Path


def build(target: Path) -> Artifacts:
    """Builds sdist and wheel into a folder, dated by the last commit.

    Raises:
        ValueError: Files are changed and not committed, or a second build has other bytes.
    """
    if changed := _git("status", "--porcelain"):
        raise ValueError(f"the checkout has changes; commit them, so that a build belongs to a commit:\n{changed}")
    shutil.rmtree(target, ignore_errors=True)
    built = _build_once(target)
    with tempfile.TemporaryDirectory(prefix="holdfast-build-") as folder:
        again = _build_once(Path(folder))
        for one, other in ((built.sdist, again.sdist), (built.wheel, again.wheel)):
            if one.name != other.name or one.read_bytes() != other.read_bytes():
                raise ValueError(f"{one.name}: a second build of the same commit has other bytes")
    return built


def _build_once(target: Path) -> Artifacts:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct")}
    command = [sys.executable, "-m", "build", "--outdir", str(target), str(ROOT)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ValueError(f"the build failed:\n{ran.stdout}{ran.stderr}")
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    return Artifacts(sdist, wheel)


def find_differences(artifacts: Artifacts) -> list[str]:
    """Returns where the contents differ from the commit: missing, changed and unexpected files."""
    tracked = set(_git("ls-files").splitlines())
    package = {name for name in tracked if name.startswith("holdfast/")} | {PLUGIN}
    with zipfile.ZipFile(artifacts.wheel) as wheel:
        shipped = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    problems = _compare("wheel", shipped, package)
    with tarfile.open(artifacts.sdist) as sdist:
        files = {member.name.partition("/")[2]: sdist.extractfile(member) for member in sdist.getmembers()}
        source = {name: file.read() for name, file in files.items() if file is not None}  # None: a folder
    generated = {"PKG-INFO", ".gitignore"}
    named = {name for name in tracked if not name.startswith(".")} | {"pyproject.toml"}
    return problems + _compare("sdist", {name: text for name, text in source.items() if name not in generated}, named)


def _compare(kind: str, shipped: dict[str, bytes], expected: set[str]) -> list[str]:
    problems = [f"{kind}: {name} is missing" for name in sorted(expected - shipped.keys())]
    problems += [f"{kind}: {name} is not in the repository" for name in sorted(shipped.keys() - expected)]
    common = sorted(expected & shipped.keys())
    return problems + [f"{kind}: {name} differs" for name in common if shipped[name] != (ROOT / name).read_bytes()]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
