"""Workers die, freeze and lose their Redis, and Redis dies and loses the end of its log; small counts of what
``python -m tests.storm`` does.

How soon everybody goes on is measured there: here, on whatever machine this runs, it is to happen at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import freezes, kills, redis_servers, servers
from tests.crash.scenarios.kinds import REDIS
from tests.support.stores import STORES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

SOON = 60.0  # seconds


def test_killed_workers_lose_nothing(tmp_path: Path, seed: int) -> None:
    assert kept(kills.random_kills(tmp_path, STORES["redis"], jobs=600, kills=3, seed=seed))


def test_killed_process_that_submits_and_works_loses_nothing(tmp_path: Path, seed: int) -> None:
    assert kept(kills.in_process_workers(tmp_path, STORES["redis"], kills=2, seed=seed))


def test_a_frozen_worker_cannot_hurt_when_it_wakes(tmp_path: Path, seed: int) -> None:
    assert kept(freezes.freezes(tmp_path, STORES["redis"], count=3, seed=seed))


def test_a_killed_server_that_syncs_its_log_loses_nothing(tmp_path: Path, seed: int) -> None:
    assert kept(servers.server_kills(tmp_path, REDIS, kills=1, within=SOON, seed=seed))


def test_power_cut_losses_are_reported_and_leave_no_partial_state(tmp_path: Path, seed: int) -> None:
    assert kept(redis_servers.power_cuts(tmp_path, cuts=1, within=SOON, seed=seed))
