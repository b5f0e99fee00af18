"""``python -m benchmarks.compare REVISION``: this checkout against an older revision, in alternating rounds.

Prints the median of the rounds' ratios (new / old) with its 95 % interval. Only differences between the two
revisions count: both run with the same interpreter, libraries and servers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import number

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("compare_driver.py")
MEASURES = {
    "drain": ("jobs/s",),
    "submit": ("bulk jobs/s", "singles/s", "100 callers jobs/s"),
    "latency": ("p50 ms", "p99 ms"),
    "http": ("POST /v1/jobs per CPU second", "GET /health/live per CPU second"),
}
"""Figures of each workload. More is better, but for milliseconds."""


def main() -> None:
    """Compare two revisions as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("revision", help="the older revision, as git names it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=40_000, help="jobs of one drain")
    parser.add_argument("--stores", nargs="+", default=["sqlite", "postgres", "redis"], choices=list(PLACES))
    parser.add_argument("--workloads", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-compare-") as folder, worktree(arguments.revision) as old:
        for store in arguments.stores:
            for workload in arguments.workloads:
                figures = alternate(old, Path(folder), store, workload, arguments.rounds, arguments.jobs)
                show(store, workload, figures)


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Checks the revision out beside this one for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="holdfast-revision-") as folder:
        path = Path(folder) / "checkout"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(path), revision], cwd=ROOT, check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True)


def alternate(
    old: Path, folder: Path, store: str, workload: str, rounds: int, jobs: int
) -> list[tuple[list[float], list[float]]]:
    """Returns one pair (new, old) of figures for each round; chance decides which side of a round runs first."""
    pairs = []
    for _ in range(rounds):
        sides = [ROOT, old]
        random.shuffle(sides)
        measured = {side: measure(side, folder, store, workload, jobs) for side in sides}
        pairs.append((measured[ROOT], measured[old]))
    return pairs


def measure(checkout: Path, folder: Path, store: str, workload: str, jobs: int) -> list[float]:
    """Runs one workload on an empty store with the code of a checkout."""
    with PLACES[store](folder) as url:
        run = subprocess.run(
            [sys.executable, str(DRIVER), workload, str(jobs)],
            env=os.environ | {"COMPARE_URL": url, "PYTHONPATH": f"{checkout}{os.pathsep}{DRIVER.parent}"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(f"{workload} on {store} failed with the code of {checkout}:\n{run.stderr[-2000:]}")
    return [float(each) for each in json.loads(run.stdout.splitlines()[-1])]


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    """Yields the URL of an empty file."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        yield f"sqlite:///{place}/jobs.db"


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Yields the URL of an empty database."""
    from benchmarks.postgres import server

    with server.database() as database:
        server.checkpoint()
        yield database.url


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Yields the URL of an empty namespace."""
    from benchmarks.redis import server

    with server.namespace() as url:
        yield url


PLACES = {"sqlite": sqlite, "postgres": postgres, "redis": redis}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns order statistics that enclose the median with a probability of at least 95 %, or the whole range."""
    ordered, size = sorted(values), len(values)
    left = 0
    outside = 2 * 0.5**size
    while left + 1 < size // 2:
        outside += 2 * math.comb(size, left + 1) * 0.5**size
        if outside > 0.05:
            break
        left += 1
    return ordered[left], ordered[size - 1 - left]


def show(store: str, workload: str, pairs: Sequence[tuple[list[float], list[float]]]) -> None:
    """Prints one table: the medians of both sides, and the ratio with its interval."""
    table = Table(title=f"{store}: {workload}, {len(pairs)} rounds", title_justify="left")
    for heading in ("figure", "new", "old", "new / old", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for index, name in enumerate(MEASURES[workload]):
        new, old = ([side[index] for side in sides] for sides in zip(*pairs, strict=True))
        ratios = [ours / theirs for ours, theirs in zip(new, old, strict=True)]
        low, high = interval(ratios)
        table.add_row(
            name,
            number(statistics.median(new)),
            number(statistics.median(old)),
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
