"""Chaos scenarios; small counts of what ``python -m tests.storm`` does on every store and transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import chaos
from tests.support.stores import STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


# Each scenario on SQLite, and those that lose deliveries on Redis and over a transport: all of them on every store are
# for the storm alone (`python -m tests.storm chaos-crashes-postgres`).
CASES = [
    *[("sqlite", scenario) for scenario in sorted(chaos.KINDS)],
    *[
        (store, scenario)
        for store in ("redis", "postgres_stream")
        for scenario in ("duplicate-delivery", "worker-crash")
    ],
]


@pytest.mark.rows("S2", "S52", "S58", "S68", "S69", "S70")
@pytest.mark.parametrize(("store", "scenario"), CASES)
def test_books_balance_with_service_and_provider(tmp_path: Path, store: str, scenario: str, seed: int) -> None:
    assert kept(chaos.balanced(tmp_path, STORES[store], scenario, jobs=40, seed=seed % 2**31))
