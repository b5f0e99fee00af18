"""The benchmarks run from beginning to end, and say what they measured: all rows of SQLite, of the servers the one with
all peers. How quick anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import ROWS, chosen
from benchmarks.compare.__main__ import interval
from benchmarks.harness import Line, Plan, at_least, at_most, percentile, show, times_at_least
from benchmarks.redis.drain import SURVIVOR, peers

QUICK = peers(Plan(quick=True, rounds=1, folder=Path()))


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--results", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["sqlite"], {"Huey", "our one", None}),
        (["postgres", "drain"], {"PgQueuer", "PgQueuer's two", "our one", "asyncpg", None}),
        (["redis", "drain"], {*QUICK, SURVIVOR, f"two of {SURVIVOR}", "our one", None}),
        (["logs", "http", "executors", "commands"], set()),
    ],
)
def test_rows_run_and_are_kept(tmp_path: Path, words: list[str], others: set[str | None]) -> None:
    ran = run(tmp_path, *words, "--quick")
    assert ran.returncode == 0, ran.stderr
    (kept,) = tmp_path.glob("*-quick.json")
    document = json.loads(kept.read_text())
    rows = document["rows"]
    assert list(rows) == chosen(words)
    assert {"cpu", "system", "python", "sqlite", "postgres", "fsync_us"} <= set(document["machine"])
    for row, lines in rows.items():
        for line in lines:
            assert len(line["rounds"]) == 1, (row, line)
            assert line["what"] in ran.stdout
    assert {line["other"] for line in rows.get(f"{words[0]}.drain", [])} == others


@pytest.mark.timeout(600)
def test_peers_without_limits_are_shown(tmp_path: Path) -> None:
    ran = run(tmp_path, "redis", "limit_peers", "--quick")
    assert ran.returncode == 0, ran.stderr
    (kept,) = tmp_path.glob("*-quick.json")
    lines = json.loads(kept.read_text())["rows"]["redis.limit_peers"]
    ours = [line for line in lines if "Holdfast" in line["what"]]
    assert len(ours) == 3
    assert all(line["ratio"] for line in ours)
    theirs = [line for line in lines if line not in ours]
    assert [(line["missing"], len(line["other_rounds"])) for line in theirs] == [("none", 1)] * 6


def test_line_without_figures_shows_reason() -> None:
    line = Line("limited", "jobs/s", theirs=[5.0], missing="ImportError: [dbos]", target=times_at_least(2))
    assert (line.document()["median"], line.document()["missing"]) == (None, "ImportError: [dbos]")
    console = Console(width=150, record=True, file=StringIO())
    show(console, "limits", [line])
    assert "ImportError: [dbos]" in console.export_text()


def test_the_words_of_the_command_line_choose_rows() -> None:
    assert chosen([]) == list(ROWS)
    assert chosen(["postgres", "drain"]) == ["postgres.drain"]
    assert chosen(["due"]) == ["sqlite.due", "postgres.due", "redis.due"]
    assert chosen(["raw", "logs"]) == ["postgres.raw", "logs"]
    assert "there is no row raw of sqlite; there are these: sqlite, drain" in chosen(["sqlite", "raw"])


def test_an_unknown_row_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "--quick", "drian")
    assert ran.returncode == 2
    assert "there is no row drian; there are these: sqlite, drain" in " ".join(ran.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "verdict"),
    [
        (at_least(10), [9, 10, 50], [], "PASS"),
        (at_least(10), [9, 9.9, 50], [], "miss"),
        (at_most(10), [9, 10, 50], [], "PASS"),
        (at_most(10), [9, 10.1, 50], [], "miss"),
        (times_at_least(2), [10, 40, 10], [5, 10, 100], "PASS"),
        (times_at_least(2), [10, 40, 100], [10, 10, 90], "miss"),
        (times_at_least(2), [10], [], "miss"),
        (None, [10], [5], ""),
    ],
)
def test_a_verdict_is_that_of_the_middle_round(target: object, ours: list[float], theirs: list[float], verdict: str):
    line = Line("drain", "jobs/s", ours, theirs, target=target)
    assert line.verdict == verdict


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine was twice as slow in the second round: that says nothing about either side.
    assert Line("drain", "jobs/s", [100, 50, 102], [10, 5, 10]).ratio == 10


def test_percentiles() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (51.0, 100.0, 7.0)


@pytest.mark.parametrize(("size", "expected"), [(1, (0, 0)), (5, (0, 4)), (9, (1, 7)), (15, (3, 11))])
def test_interval_encloses_median_of_rounds(size: int, expected: tuple[float, float]) -> None:
    # Order statistics for a confidence of 95 %, as in any table of the sign test; below six rounds the whole range.
    assert interval([float(each) for each in range(size)]) == expected


@pytest.mark.timeout(600)
def test_two_revisions_are_compared() -> None:
    command = ["--rounds", "1", "--jobs", "1000", "--stores", "sqlite", "--workloads", "drain", "submit"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "HEAD", *command],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "sqlite: drain, 1 rounds" in ran.stdout
    assert "100 callers jobs/s" in ran.stdout
