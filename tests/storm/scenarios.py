"""What the storm does, and how often: the counts that the promises are proved with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.crash.report import Report
from tests.crash.scenarios import faults, files, freezes, handlers, kills, stops, submitters

Scenario = Callable[[Path, Callable[[int], int], int], Report]
"""``scenario(folder, count, seed)``; ``count(n)`` is n times the scale that was asked for, at least 1."""

SCENARIOS: dict[str, Scenario] = {
    "kills": lambda folder, count, seed: kills.random_kills(folder, jobs=count(5000), kills=count(50), seed=seed),
    "poison": lambda folder, count, _: kills.poison(folder, jobs=count(500), poisonous=1),
    "two-poisons": lambda folder, count, _: kills.poison(folder, jobs=count(500), poisonous=2),
    "freezes": lambda folder, count, seed: freezes.freezes(folder, count=count(50), seed=seed),
    "submitters": lambda folder, count, seed: submitters.killed_submitters(folder, kills=count(200), seed=seed),
    "spinning": lambda folder, *_: handlers.spinning(folder, lease=2.0),
    "stubborn": lambda folder, count, _: handlers.stubborn(folder, jobs=count(10)),
    "stops": lambda folder, count, seed: stops.rolling_stops(folder, count=count(10), seed=seed),
    "second-signal": lambda folder, *_: stops.second_signal(folder),
    "deaths-at-points": lambda folder, count, seed: faults.killed_at(folder, rounds=count(10), seed=seed),
    "failures-at-points": lambda folder, _, seed: faults.failed_at(folder, seed=seed),
    "submitters-at-points": lambda folder, count, seed: faults.submitters_killed_at(
        folder, rounds=count(20), seed=seed
    ),
    "migrations": lambda folder, count, seed: files.raced_migrations(folder, rounds=count(50), seed=seed),
    "backups": lambda folder, count, seed: files.killed_backups(folder, kills=count(50), seed=seed),
    "fork": lambda folder, *_: files.forked(folder),
    "full-log": lambda folder, *_: files.full_disk(folder, size=300_000),
    "full-file": lambda folder, *_: files.full_disk(folder, size=6_000_000),
    "full-disk-worker": lambda folder, *_: files.full_disk_under_a_worker(folder),
}
