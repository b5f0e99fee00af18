"""``python -m tools.release``: builds sdist, wheel and SBOM into ``dist/`` and checks them; exit status 1 if one fails.

The README's first job runs with each extra in an environment of its own, and on each interpreter that is on PATH.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.release import artifacts, environments
from tools.release.artifacts import ROOT, Artifacts
from tools.release.extras import MODULES

INTERPRETERS = ["python3.11", "python3.12", "python3.13", "python3.14", "python3.14t"]
"""The versions that the package declares."""


def main() -> int:
    """Builds and checks a release; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--extra", action="append", choices=sorted(MODULES), help="only this one; may be repeated")
    parser.add_argument("--python", action="append", help="an interpreter instead of those on PATH; may be repeated")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        built = artifacts.build(ROOT / "dist")
        print(f"{built.sdist.name}, {built.wheel.name}: two builds have equal bytes")
        problems = artifacts.find_differences(built)
        print("\n".join(problems) or "contents: those of the commit")
        slow = _check_extras(built, arguments.extra or list(MODULES), ROOT / "dist" / f"holdfast-{version}.cdx.json")
        slow += _check_interpreters(built, arguments.python or INTERPRETERS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if problems or slow else 0


def _check_extras(built: Artifacts, extras: list[str], sbom: Path) -> list[str]:
    """Returns the extras that took too long, and writes the SBOM of the core."""
    slow = []
    for extra in extras:
        with tempfile.TemporaryDirectory(prefix="holdfast-release-") as name:
            seconds = environments.run_first_job(sys.executable, built.wheel, extra, Path(name))
            environments.import_modules(extra, Path(name))
            if extra == "core":
                environments.write_sbom(Path(name), sbom)
        print(f"{extra}: first job after {seconds:.0f} s", flush=True)
        if seconds > environments.MAX_SECONDS:
            slow.append(extra)
    return slow


def _check_interpreters(built: Artifacts, named: list[str]) -> list[str]:
    """Returns the interpreters that took too long."""
    found, missing = environments.find_interpreters(named)
    slow = []
    for version, program in found.items():
        with tempfile.TemporaryDirectory(prefix="holdfast-release-") as name:
            seconds = environments.run_first_job(program, built.wheel, "core", Path(name))
        print(f"Python {version}: first job after {seconds:.0f} s", flush=True)
        if seconds > environments.MAX_SECONDS:
            slow.append(version)
    for each in missing:
        print(f"{each}: not run, no such interpreter here")
    return slow


if __name__ == "__main__":
    sys.exit(main())
