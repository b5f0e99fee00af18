"""Workers in another language keep the promises of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios.javascript import javascript
from tests.support.stores import STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


@pytest.mark.parametrize("store", ["sqlite", "postgres_stream"])
def test_javascript_workers_lose_nothing_beside_ours(tmp_path: Path, store: str, seed: int) -> None:
    assert kept(javascript(tmp_path, STORES[store], jobs=150, seed=seed))
