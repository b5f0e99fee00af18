"""The database server dies and its network fails under a fleet; small counts of what ``python -m tests.storm`` does.

How soon everybody goes on is measured there: here, on whatever machine this runs, it is to happen at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import networks, servers
from tests.crash.scenarios.kinds import POSTGRES

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

SOON = 60.0  # seconds


def test_killed_server_loses_nothing_and_clients_continue(tmp_path: Path, seed: int) -> None:
    assert kept(servers.server_kills(tmp_path, POSTGRES, kills=1, within=SOON, seed=seed))


def test_promoted_standby_loses_nothing_and_clients_continue(tmp_path: Path, seed: int) -> None:
    assert kept(servers.failovers(tmp_path, count=1, within=SOON, seed=seed))


def test_a_server_that_refuses_is_waited_for(tmp_path: Path, seed: int) -> None:
    assert kept(networks.refused(tmp_path, POSTGRES, seconds=4.0, within=SOON, busy=0.3, seed=seed))


def test_a_network_that_swallows_everything_is_waited_for(tmp_path: Path, seed: int) -> None:
    assert kept(networks.silent(tmp_path, POSTGRES, seconds=4.0, within=SOON, busy=0.3, seed=seed))


def test_connections_that_are_half_open_are_given_up(tmp_path: Path, seed: int) -> None:
    assert kept(networks.half_open(tmp_path, POSTGRES, times=1, within=SOON, seed=seed))


def test_connections_cut_after_the_commit_lose_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    assert kept(networks.cut(tmp_path, POSTGRES, cuts=30, seed=seed))
