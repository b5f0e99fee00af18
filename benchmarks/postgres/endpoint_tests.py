"""Tests of an endpoint that enqueues in its transaction, with their set-up: those of docs/testing-transactions.md."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.harness import Line, Plan, at_most
from benchmarks.postgres import server
from tests.support.pages import ROOT, find_modules

TITLE = "Tests of an endpoint, run inline"
_PAGE = ROOT / "docs" / "testing-transactions.md"


def run(plan: Plan) -> list[Line]:
    """Run the tests of the page in a process of their own; the first one also makes the store of all."""
    median = Line("one test, median", "ms", target=at_most(50))
    slowest = Line("slowest but the first", "ms")
    for _ in range(plan.rounds):
        with plan.place() as folder, server.database() as home:
            first, *others = _seconds(folder, home.url)
            median.add(statistics.median([first, *others]) * 1000)
            slowest.add(max(others) * 1000)
    return [median, slowest]


def _seconds(folder: Path, url: str) -> list[float]:
    """Returns the seconds of each test, in the order of the run."""
    for name, text in find_modules(_PAGE.read_text(encoding="utf-8")).items():
        (folder / name).write_text(text, encoding="utf-8")
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "holdfast_pytest",
        "-p",
        "no:randomly",
        f"--junitxml={report}",
    ]
    paths = os.pathsep.join([str(ROOT), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "DATABASE_URL": url}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by the run above
        seconds[case.attrib["name"]] += float(case.attrib["time"])
    return [*seconds.values()]
