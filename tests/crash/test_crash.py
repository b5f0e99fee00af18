"""Real processes, killed, frozen and raced; small counts of what ``python -m tests.storm`` does in earnest.

Every scenario judges by what handlers wrote into a file while they ran. Each test's seed follows pytest's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.crash.scenarios import (
    crowds,
    faults,
    files,
    freezes,
    handlers,
    kills,
    limits,
    stops,
    submitters,
    ticks,
    waits,
    workflows,
)
from tests.support.stores import CARRIED, STORES, Home, sqlite_file, stores_of

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]


# These are long enough: Redis is for the storm alone (`python -m tests.storm --store redis`), and transports have a few
# tests of their own.
@pytest.fixture(params=[name for name in stores_of("test_crash", older=False) if name not in {"redis", *CARRIED}])
def home(request: pytest.FixtureRequest) -> Home:
    """Where the scenario's store is."""
    return STORES[request.param]


def test_killed_workers_lose_nothing(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(kills.random_kills(tmp_path, home, jobs=600, kills=3, seed=seed))


def test_killed_process_that_submits_and_works_loses_nothing(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(kills.in_process_workers(tmp_path, home, kills=3, seed=seed))


@pytest.mark.parametrize("poisonous", [1, 2])
def test_a_job_that_kills_its_process_dies_alone(tmp_path: Path, home: Home, poisonous: int) -> None:
    assert kept(kills.poison(tmp_path, home, jobs=300, poisonous=poisonous))


def test_a_frozen_worker_cannot_hurt_when_it_wakes(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(freezes.freezes(tmp_path, home, count=3, seed=seed))


def test_killed_submitters_lose_no_acknowledged_job(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(submitters.killed_submitters(tmp_path, home, kills=12, seed=seed))


@pytest.mark.parametrize(("jobs", "seconds", "share"), [(20, 0.0, 0.0), (2000, 0.02, 0.3)])
def test_two_workers_share_without_running_a_job_twice(
    tmp_path: Path, home: Home, jobs: int, seconds: float, share: float
) -> None:
    assert kept(crowds.shared(tmp_path, home, jobs=jobs, seconds=seconds, share=share))


def test_many_workers_leave_a_clean_history(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(crowds.crowd(tmp_path, home, kills=3, seed=seed))


def test_a_handler_that_blocks_the_loop_keeps_its_job(tmp_path: Path, home: Home) -> None:
    assert kept(handlers.spinning(tmp_path, home))


def test_a_process_task_that_ignores_signals_dies_with_its_children(tmp_path: Path, home: Home) -> None:
    assert kept(handlers.stubborn(tmp_path, home))


def test_rolling_stops_lose_nothing_and_cost_no_attempt(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(stops.rolling_stops(tmp_path, home, count=2, seed=seed))


def test_the_second_signal_releases_at_once(tmp_path: Path, home: Home) -> None:
    assert kept(stops.second_signal(tmp_path, home))


def test_a_worker_may_die_at_every_point(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(faults.killed_at(tmp_path, home, seed=seed))


def test_a_store_may_fail_at_every_point(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(faults.failed_at(tmp_path, home, seed=seed))


def test_a_submitter_may_die_before_and_after_its_submission(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(faults.submitters_killed_at(tmp_path, home, seed=seed))


def test_a_raced_and_killed_migration_leaves_a_sound_store(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(files.raced_migrations(tmp_path, home, rounds=3, seed=seed))


def test_killed_backup_leaves_a_sound_store_and_no_partial_copy(tmp_path: Path, seed: int) -> None:
    assert kept(files.killed_backups(tmp_path, kills=4, seed=seed))


def test_a_forked_child_gets_a_store_of_its_own(tmp_path: Path, home: Home) -> None:
    assert kept(files.forked(tmp_path, home))


@pytest.mark.parametrize("size", [300_000, 6_000_000], ids=["the log is full", "the file is full"])
def test_a_full_disk_refuses_and_loses_nothing(tmp_path: Path, size: int) -> None:
    assert kept(files.full_disk(tmp_path, size=size))


def test_a_worker_waits_out_a_full_disk(tmp_path: Path) -> None:
    assert kept(files.full_disk_under_a_worker(tmp_path))


def test_every_tick_of_a_schedule_makes_one_job(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(ticks.ticks(tmp_path, home, count=200, workers=3, kills=3, seed=seed))


def test_limits_are_never_exceeded_and_no_slot_leaks(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(limits.limits(tmp_path, home, jobs=150, workers=4, kills=4, seed=seed))


@pytest.mark.rows("S50")
def test_recorded_steps_are_never_run_again(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(workflows.workflows(tmp_path, home, jobs=20, steps=10, kills=5, seed=seed))


@pytest.mark.rows("S51")
def test_twenty_workflows_survive_fifty_kills(tmp_path: Path, seed: int) -> None:
    assert kept(
        workflows.workflows(tmp_path, sqlite_file, jobs=20, steps=10, kills=50, seed=seed, pause=0.2, freezes=False)
    )


def test_each_signal_is_received_once_or_kept(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(waits.signals(tmp_path, home, count=200, kills=2, timeout=6.0, seed=seed))


def test_each_child_is_started_once(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(waits.children(tmp_path, home, parents=10, children=5, kills=2, seed=seed))


def test_job_starts_once_behind_all_its_members(tmp_path: Path, home: Home, seed: int) -> None:
    assert kept(waits.fan_ins(tmp_path, home, groups=3, members=40, kills=2, seed=seed))
