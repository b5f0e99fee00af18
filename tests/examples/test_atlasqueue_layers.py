"""The layers of tests that AtlasQueue counts, and that need no server. Tests are named by the rows they prove."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as Tree
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.atlasqueue_support import EXAMPLE
from tests.examples.programs import ROOT

pytestmark = pytest.mark.timeout(400)

README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
LEAST = {"lease": 7, "executor": 5, "retry": 7, "metrics": 7, "API": 11}
"""As many as the original has of each."""
ALONE = ["-p", "tests.examples.no_servers", "-p", "no:randomly", "-k", "not postgres and not redis and not million"]
"""Without what counts to a million, which is a matter of speed."""


@pytest.mark.rows("A139", "A141", "A142")
def test_each_layer_runs_quickly_without_a_server(tmp_path: Path) -> None:
    """Ten seconds of the processor, for a machine that is busy with other tests takes longer."""
    layers = dict(re.findall(r"^\| (\w+) \| `pytest (tests/\S+\.py)(?: -k sqlite)?` \|$", README, re.MULTILINE))
    assert layers.keys() == LEAST.keys()
    report = tmp_path / "report.xml"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", *ALONE, f"--junit-xml={report}", *layers.values()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    assert after.ru_utime - before.ru_utime <= 10
    cases = Counter(case.attrib["classname"] for case in Tree.parse(report).iter("testcase"))  # noqa: S314 - ours
    passed = {layer: cases[path.removesuffix(".py").replace("/", ".")] for layer, path in layers.items()}
    assert [layer for layer, number in passed.items() if number < LEAST[layer]] == []


@pytest.mark.rows("A139")
def test_test_that_connects_to_a_server_is_refused() -> None:
    """The net under the test above holds."""
    code = "import tests.examples.no_servers, socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "this layer of tests needs no server" in done.stderr
