"""Workers and submitters die while a transport carries their jobs' ids; small counts of what ``python -m tests.storm``
does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import faults, freezes, kills, transports
from tests.support.stores import CARRIED, STORES, Home

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


@pytest.fixture(params=sorted(CARRIED))
def home(request: pytest.FixtureRequest) -> Home:
    """Where the scenario's store is."""
    return STORES[request.param]


def test_killed_workers_lose_nothing(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(kills.random_kills(tmp_path, home, jobs=600, kills=3, seed=seed))


def test_a_frozen_worker_cannot_hurt_when_it_wakes(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(freezes.freezes(tmp_path, home, count=1, seed=seed))


def test_a_worker_may_die_around_its_claim_and_its_settlement(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(faults.killed_at(tmp_path, home, points=("claim.after", "settle.before", "settle.after"), seed=seed))


def test_submitters_that_die_before_they_announce_lose_nothing(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(transports.unannounced(tmp_path, home, kills=3, seed=seed))


def test_everything_in_redis_may_be_lost_again_and_again(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(transports.emptied(tmp_path, home, jobs=1500, times=3, seed=seed))


@pytest.mark.parametrize("home", ["postgres_list"], indirect=True)
def test_a_loss_costs_little_more_than_a_poll(tmp_path: Path, home: Home, seed: int) -> None:
    """The storm measures the delay over both transports, on an idle machine."""
    assert kept(transports.delayed(tmp_path, home, jobs=300, rounds=1, spare=20.0, seed=seed))
