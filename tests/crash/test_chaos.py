"""The ready chaos scenarios on every store and over both transports; small counts of what ``python -m tests.storm``
does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import chaos
from tests.support.stores import OLDER, STORES, Home

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


@pytest.fixture(params=[name for name in STORES if name not in OLDER])
def home(request: pytest.FixtureRequest) -> Home:
    """Where the scenario's store is."""
    return STORES[request.param]


@pytest.mark.rows("S2", "S52", "S58")
@pytest.mark.parametrize("scenario", sorted(chaos.KINDS))
def test_ready_scenario_balances(tmp_path: Path, home: Home, scenario: str, seed: int) -> None:
    assert kept(chaos.ready(tmp_path, home, scenario, jobs=40, seed=seed % 2**31))
