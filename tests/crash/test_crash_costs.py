"""What a kill costs, on every store and transport; small counts of what ``python -m tests.storm`` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import costs
from tests.support.stores import OLDER, STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", [name for name in STORES if name not in OLDER])
def test_kill_ends_no_more_last_attempts_than_run_at_once(tmp_path: Path, name: str, seed: int) -> None:
    assert kept(costs.last_attempts(tmp_path, STORES[name], kills=5, seed=seed))


@pytest.mark.parametrize("name", [name for name in STORES if name not in OLDER])
def test_kill_without_prefetch_repeats_no_more_than_run(tmp_path: Path, name: str, seed: int) -> None:
    assert kept(costs.unprefetched(tmp_path, STORES[name], kills=5, seed=seed))
