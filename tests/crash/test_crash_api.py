"""The API is killed under its clients, and its store goes away; small counts of what ``python -m tests.storm`` does.

How soon a refusal comes, and how soon everybody goes on, is measured there: here, on whatever machine this runs, it is
to happen at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import api
from tests.support.stores import STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

SOON = 60.0  # seconds


@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis"])
def test_killed_api_loses_and_duplicates_nothing_for_retrying_clients(tmp_path: Path, store: str, seed: int) -> None:
    assert kept(api.kills(tmp_path, STORES[store], clients=16, kills=2, seed=seed))


@pytest.mark.parametrize("store", sorted(api.AWAY))
def test_api_reports_an_unavailable_store(tmp_path: Path, store: str, seed: int) -> None:
    assert kept(api.outages(tmp_path, store, clients=8, times=1, max_refusal=SOON, within=SOON, seed=seed))
