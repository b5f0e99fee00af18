"""What ``python -m tests.storm on-time-…`` does in earnest: four workers, and jobs that fall due at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios.punctual import punctual
from tests.support.stores import STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


def test_due_jobs_start_once_and_on_several_workers(tmp_path: Path, seed: int) -> None:
    """Never early and never twice, however busy the machine is; how late and how evenly is a matter of its load."""
    home = STORES["redis"]
    assert kept(punctual(tmp_path, home, jobs=300, within=3.0, workers=4, late=20.0, busiest=3.0, seed=seed))
