"""The page of benchmarks: written from results, with their numbers, and honest about the lost comparisons."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparisons
from benchmarks.harness import Line, Target, at_least, at_most, times_at_least
from benchmarks.page import DOCS, FOLDER, KEPT, render, write
from benchmarks.result_files import PRODUCTS, Figure, UnusableResults, is_behind, more_is_better, read_results
from tests.support.pages import ROOT

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ["drain.svg", "latency-redis.svg"]


def line(what: str, unit: str, ours: list[float], theirs: Sequence[float] = (), **named: Any) -> dict[str, Any]:
    return Line(what, unit, ours, list(theirs), **named).document()


def curve(pair: str, rate: str, ours: float, theirs: float) -> list[dict[str, Any]]:
    named = {"other": "taskiq-stream"}
    return [
        line(f"{pair}, {rate} a second, p50", "ms", [ours], [theirs], **named),
        line(f"{pair}, {rate} a second, p99", "ms", [ours * 3], [theirs * 3 + 1], target=at_most(2), **named),
    ]


DOCUMENT: dict[str, Any] = {
    "machine": {"when": "2026-11-27T00:41:55+00:00", "cpu": "A processor", "cores": 2, "load_before": 0.25},
    "quick": False,
    "full": False,
    "rounds": 3,
    "titles": {
        "sqlite.drain": ["Drain, synchronous=FULL", "Holdfast"],
        "postgres.idle": ["An idle worker process", "Holdfast"],
        "postgres.limit_peers": ["Limits", "limited"],
        "redis.curve": ["Latency", "Holdfast"],
    },
    "rows": {
        "redis.curve": [
            *curve("1 to 1", "5", 0.125, 0.25),
            *curve("1 to 1", "1,000", 0.5, 0.0),
            *curve("4 to 4", "5", 0.375, 0.75),
        ],
        "sqlite.drain": [
            line("one worker process", "jobs/s", [61_000, 67_123, 72_000], [4_000, 4_100, 4_321], target=at_least(1)),
            line("CPU a job | worker", "µs", [16.0, 15.0, 17.0], [147.0, 140.0, 150.0], target=at_most(12)),
            line("two worker processes", "jobs/s", [3_000.0], [4_500.0]),
            line("one by one, against a bare INSERT", "jobs/s", [900.0], [1_000.0], other="sqlite3"),
        ],
        "postgres.idle": [
            line("resident memory", "MB", [66.0], [44.0], other="PgQueuer"),
            line("transactions in its database", "transactions/s", [0.5], [2.0], other="PgQueuer"),
        ],
        "postgres.limit_peers": [
            line("concurrency of a queue: Holdfast", "jobs/s", [50_000.0], [62_500.0], other="without limits"),
            line("concurrency of a queue: SAQ", "jobs/s", [800.0], [805.0], other="without limits"),
            line("concurrency of a queue: DBOS", "jobs/s", [300.0], [900.0], other="without limits"),
        ],
    },
}


def run(tmp_path: Path, *documents: Any) -> subprocess.CompletedProcess[str]:
    files = []
    for index, document in enumerate(documents):
        file = tmp_path / f"{index}.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        files.append(str(file))
    command = [sys.executable, "-m", "benchmarks.page", *files, "--docs", str(tmp_path / "docs")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def page_of(tmp_path: Path, *documents: dict[str, Any]) -> str:
    files = []
    for index, document in enumerate(documents):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps(document))
    return render(read_results(files))[0]


def section(page: str, heading: str) -> str:
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────
def test_page_pictures_and_results_are_written(tmp_path: Path) -> None:
    ran = run(tmp_path, DOCUMENT)
    assert ran.returncode == 0, ran.stderr
    docs = tmp_path / "docs"
    page = (docs / "benchmarks.md").read_text()
    assert (
        "| one worker process | jobs/s | 67,123 (61,000–72,000) | 4,100 (4,000–4,321) | Huey | 16.37 × | ≥ 1 | met |"
        in page
    )
    assert "| CPU a job \\| worker | µs | 16 (15–17) | 147 (140–150) | Huey | 0.11 × | ≤ 12 | **missed** |" in page
    assert "| processor | A processor |" in page
    assert "### SQLite: Drain, synchronous=FULL" in page
    assert re.findall(r"!\[[^]]+]\(benchmarks/([^)]+)\)", page) == PICTURES
    assert sorted(path.name for path in (docs / FOLDER).iterdir()) == [*PICTURES, KEPT]


def test_kept_results_give_the_same_page(tmp_path: Path) -> None:
    first = read_results([_file(tmp_path, DOCUMENT)])
    page, pictures = render(first)
    write(tmp_path / "docs", first, page, pictures)
    kept = tmp_path / "docs" / FOLDER / KEPT
    again = read_results([kept])
    assert render(again) == (page, pictures)
    assert "16.3715" in kept.read_text()  # six digits


def _file(tmp_path: Path, document: dict[str, Any]) -> Path:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    return file


def test_row_without_results_is_left_out(tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["rows"]["redis.curve"], document["rows"]["postgres.idle"]
    page = page_of(tmp_path, document)
    assert "redis.curve" not in page
    assert "postgres.idle" not in page
    assert "latency-redis" not in page
    assert "drain.svg" in page


def test_later_file_replaces_rows_of_earlier_ones(tmp_path: Path) -> None:
    later = copy.deepcopy(DOCUMENT)
    later["rows"] = {"sqlite.drain": [line("one worker process", "jobs/s", [55_555.0], [5_000.0])]}
    page = page_of(tmp_path, DOCUMENT, later)
    assert "55,555" in page
    assert "67,123" not in page
    assert "| resident memory | MB | 66 |" in page
    assert "`sqlite.drain`. Run 2." in page
    assert "`postgres.idle`. Run 1." in page


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pictures_are_labelled_svg(tmp_path: Path) -> None:
    _, pictures = render(read_results([_file(tmp_path, DOCUMENT)]))
    assert list(pictures) == PICTURES
    for picture in pictures.values():
        root = ET.fromstring(picture)  # noqa: S314 - our own
        assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
        assert root.findtext(f"{SVG}title")
    drain, latency = (_texts(picture) for picture in pictures.values())
    assert {"SQLite", "Holdfast", "Huey *", "67,123", "4,100", "jobs a second"} <= drain
    assert {"Holdfast, p50", "TaskIQ, stream, p99", "1,000", "milliseconds (logarithmic)"} <= latency
    assert {"1 submitting process, 1 worker process", "4 submitting processes, 4 worker processes"} <= latency


def _texts(picture: str) -> set[str | None]:
    return {each.text for each in ET.fromstring(picture).iter(f"{SVG}text")}  # noqa: S314 - our own


def test_curve_of_zero_is_a_hollow_mark(tmp_path: Path) -> None:
    _, pictures = render(read_results([_file(tmp_path, DOCUMENT)]))
    marks = ET.fromstring(pictures["latency-redis.svg"]).iter(f"{SVG}circle")  # noqa: S314 - our own
    assert [mark.get("class") for mark in marks if "hollow" in str(mark.get("class"))] == ["mark peer hollow"]


# ── lost comparisons ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("what", "unit", "target", "more"),
    [
        ("one worker process", "jobs/s", None, True),
        ("4 callers", "commands/s", None, True),
        ("the slowest's share of the jobs", "%", None, True),
        ("p99", "ms", None, False),
        ("CPU a job", "µs", None, False),
        ("CPU", "%", None, False),
        ("resident memory", "MB", None, False),
        ("a job", "bytes", None, False),
        ("transactions", "transactions/s", None, False),
        ("store calls", "1/s", at_most(1), False),
        ("starts", "1/s", times_at_least(5), True),
    ],
)
def test_unit_or_target_tells_whether_more_is_better(what: str, unit: str, target: Target | None, more: bool) -> None:
    assert more_is_better(Figure(what, unit, target=None if target is None else str(target))) is more


def test_unknown_unit_is_refused() -> None:
    with pytest.raises(UnusableResults, match="parsecs"):
        more_is_better(Figure("speed", "parsecs"))


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "behind"),
    [
        ("jobs/s", 9.0, 10.0, True),
        ("jobs/s", 11.0, 10.0, False),
        ("ms", 11.0, 10.0, True),
        ("ms", 9.0, 10.0, False),
        ("ms", 10.0, 10.0, False),
        ("ms", 0.1, 0.0, True),  # no ratio
    ],
)
def test_losing_side_depends_on_the_unit(unit: str, ours: float, theirs: float, behind: bool) -> None:
    ratio = ours / theirs if theirs else None
    assert is_behind(Figure("x", unit, median=ours, other_median=theirs, ratio=ratio)) is behind


def test_ratio_of_some_rounds_does_not_decide() -> None:
    figure = Figure("p50", "ms", median=0.3, other_median=0.0, other_rounds=[0.0, 0.0, 0.5], ratio=0.6)
    assert is_behind(figure)


def test_lost_comparisons_and_missed_targets_are_listed(tmp_path: Path) -> None:
    lost = section(page_of(tmp_path, DOCUMENT), "Where others are better")
    assert "Comparisons with other queues that Holdfast loses: 4 of 11." in lost
    assert "| `sqlite.drain` | two worker processes | jobs/s | 3,000 | 4,500 | Huey | 0.67 × | more |" in lost
    assert "| `postgres.idle` | resident memory | MB | 66 | 44 | PgQueuer | 1.50 × | less |" in lost
    assert "| `redis.curve` | 1 to 1, 1,000 a second, p50 | ms | 0.5 | 0 | taskiq-stream |  | less |" in lost
    assert "| `redis.curve` | 1 to 1, 1,000 a second, p99 | ms | 1.5 | 1 | taskiq-stream | 1.50 × | less |" in lost
    assert (
        "| `sqlite.drain` | one by one, against a bare INSERT | jobs/s | 900 | 1,000 | sqlite3 | 0.90 × | more |"
        in lost
    )
    assert "| `postgres.limit_peers` | concurrency of a queue: SAQ | 800 | 0.99 × | 50,000 | 0.80 × |" in lost
    assert "DBOS" not in lost
    assert "Missed targets: 1 of 5." in lost
    assert "| `sqlite.drain` | CPU a job \\| worker | µs | 16 | 0.11 × | Huey | ≤ 12 |" in lost


def test_page_without_other_queues_says_so(tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["rows"] = {"postgres.limit_peers": DOCUMENT["rows"]["postgres.limit_peers"]}
    assert "compare Holdfast with no other queue" in section(page_of(tmp_path, document), "Where others are better")


# ── refused files ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (DOCUMENT | {"quick": True}, "is of a quick run, whose figures mean nothing; measure without --quick"),
        ("{", "holds no results of benchmarks"),
        ([1], "holds no results of benchmarks"),
        ({"rows": {}}, "holds no results of benchmarks"),
        (DOCUMENT | {"rows": {}}, "there is no row in these files"),
        (DOCUMENT | {"rows": {"sqlite.nothing": []}}, "row sqlite.nothing has no title in its file, and no module"),
    ],
    ids=["quick", "no JSON", "another document", "no machine", "no rows", "unknown row"],
)
def test_unusable_file_is_refused(tmp_path: Path, document: Any, reason: str) -> None:
    ran = run(tmp_path, document)
    assert ran.returncode == 2
    assert reason in " ".join(ran.stderr.split())
    assert not (tmp_path / "docs").exists()


def test_missing_file_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.page", str(tmp_path / "none.json"), "--docs", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 2
    assert "none.json cannot be read: No such file or directory" in " ".join(ran.stderr.split())


# ── the committed page ────────────────────────────────────────────────────────────────────────────────────────────
def test_committed_page_is_current() -> None:
    """If not: python -m benchmarks.page docs/benchmarks/results.json"""
    page, pictures = render(read_results([DOCS / FOLDER / KEPT]))
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == page
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / FOLDER).glob("*.svg")}
    assert committed == pictures


# ── guarantees ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_product_of_the_benchmarks_has_its_guarantees(tmp_path: Path) -> None:
    table = section(page_of(tmp_path, DOCUMENT), "What each queue guarantees").lower()
    assert [name for name in PRODUCTS if f"| {name}" not in table] == []


def test_table_of_comparisons_is_that_of_the_kept_results() -> None:
    """If not: python -m benchmarks.comparisons"""
    page = comparisons.PAGE.read_text(encoding="utf-8")
    results = read_results([DOCS / FOLDER / KEPT])
    written = comparisons.table(results)
    figures = [figure for found in results.rows().values() for figure in found if figure.other == "Huey"]
    assert f"| Huey | {len(figures)} | {sum(not is_behind(figure) for figure in figures)} |" in written
    assert comparisons.replace_table(page, written) == page
    assert written in page
