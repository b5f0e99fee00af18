"""``python -m tools.django_tasks_suite``: runs the tests of ``django.tasks`` and of the example shop on each Django.

Django 5.2 has the backport ``django-tasks``, whose source distribution lacks its tests: they come from its repository,
or from a clone that ``--backport`` names. Those of Django 6 are in its source distribution.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.release.environments import find_interpreters

ROOT = Path(__file__).parents[2]
INTERPRETERS = [sys.executable, "python3.14", "python3.13", "python3.12"]
REPOSITORY = "https://github.com/RealOrangeOne/django-tasks"
_SHOP_TESTS = ["orders", "tests.integrations.django_cases"]
_RAN = re.compile(r"^Ran (\d+) tests", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """A version of Django, and of the backport where it needs it, and how many tests of ``django.tasks`` pass."""

    django: str
    backport: str | None
    python: tuple[int, int]
    passed: int

    def __str__(self) -> str:
        return f"Django {self.django}" + (f" with django-tasks {self.backport}" if self.backport else "")


SUITES = [Suite("5.2.*", "0.12.0", (3, 11), 43), Suite("6.1.3", None, (3, 12), 46)]


def main() -> int:
    """Runs the suites; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.django_tasks_suite", description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter instead of those on PATH; may be repeated")
    parser.add_argument("--backport", default=REPOSITORY, help="address or folder of a repository of django-tasks")
    arguments = parser.parse_args()
    found, _ = find_interpreters(arguments.python or INTERPRETERS)
    failed = False
    for suite in SUITES:
        program = next((name for version, name in found.items() if _number(version) >= suite.python), None)
        if program is None:
            print(f"{suite}: not run, no Python {'.'.join(map(str, suite.python))} or newer here; name one by --python")
            continue
        try:
            _run_suite(suite, program, arguments.backport)
        except ValueError as error:
            print(f"{suite}: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


def _run_suite(suite: Suite, program: str, backport: str) -> None:
    """Runs a suite in an environment of its own; ValueError with the output of a command that failed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-django-") as name:
        folder = Path(name)
        _run([program, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
        python = str(folder / "venv" / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        extra = "django-tasks" if suite.backport else "django"
        packages = [f"django=={suite.django}", *([f"django-tasks=={suite.backport}"] if suite.backport else [])]
        _run([*pip, "install", "--quiet", "--editable", f"{ROOT}[{extra}]", *packages], folder)
        print(f"{suite}, {_run([python, '--version'], folder).strip()}", flush=True)
        ran = _RAN.search(_run([python, "manage.py", "test", *_SHOP_TESTS], ROOT / "examples" / "shop"))
        print(f"tests of the shop: {ran[1] if ran else 'none'} passed", flush=True)
        if suite.backport:
            _run(["git", "clone", "--quiet", "--branch", suite.backport, backport, "django-tasks"], folder)
            tests, package = folder / "django-tasks", "tests.tests"
        else:
            _run([*pip, "download", "--quiet", "--no-deps", "--no-binary", "django", *packages], folder)
            tests, package = _unpack(folder) / "tests", "tasks"
        module = [python, "-m", "tools.django_tasks_suite.neutral_tests", str(tests), package, str(suite.passed)]
        print(_run(module, folder), end="", flush=True)


def _unpack(folder: Path) -> Path:
    """Unpacks the source distribution in a folder; returns where it is."""
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _run(command: list[str], folder: Path) -> str:
    """Returns what a command wrote; ValueError with it if the command fails."""
    ours = ("DJANGO", "HOLDFAST_", "PG", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**kept, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ran.returncode:
        raise ValueError(f"{' '.join(command[:6])}: exit code {ran.returncode}\n{ran.stdout}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
