"""``python -m benchmarks.page RESULT.json …``: writes docs/benchmarks.md, its pictures, and the results it shows.

Each file is of ``python -m benchmarks``, or the results this command has kept. A later file replaces the rows of
earlier ones. A quick run is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.curve import RATES
from benchmarks.guarantees import guarantee_table
from benchmarks.harness import number
from benchmarks.pictures import draw_pictures
from benchmarks.result_files import (
    Figure,
    Results,
    Run,
    UnusableResults,
    is_bare_loop,
    is_behind,
    is_product,
    more_is_better,
    read_results,
)
from benchmarks.rows import STORES

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = "benchmarks"
KEPT = "results.json"

_HEAD = """\
# Benchmarks

<!-- Made by `python -m benchmarks.page docs/benchmarks/results.json`, and compared by a test. Measure again instead of
editing. -->

Holdfast beside other queues: how many jobs a second they run, how long a job waits for a free worker, and what an idle
worker costs. [Where others are better](#where-others-are-better) lists every comparison that Holdfast loses.
"""
_METHOD = """\
## How it was measured

- One machine runs everything: submitters, workers and the server share its cores.
- All queues have the same server with the same settings. PostgreSQL: `fsync` and `synchronous_commit` on. Redis: Valkey
  with an append-only log, `appendfsync everysec`; `always` where a row says so. SQLite: WAL, `synchronous=FULL`.
- Each peer has the settings that its documentation names for speed, as far as it keeps its jobs at a kill. What it
  still loses is in [the table of guarantees](#what-each-queue-guarantees).
- Handlers do nothing. A rate counts committed completions.
- A slow peer gets fewer jobs, so that it ends in the same time. A short queue is to its advantage.
- Rounds alternate: ours, then the peer, then ours again. A figure is the median of its rounds, with the lowest and the
  highest behind it. The ratio is the median of the rounds' ratios.
- The figures of one machine drift by ±30 % from hour to hour, and differ from machine to machine. **Ratios in one run
  count**; figures of different rows or runs cannot be compared.

`python -m benchmarks` measures every row again and keeps the results; `python -m benchmarks postgres drain` measures
one. `python -m benchmarks.page FILE` writes this page from the file that it names.

"""
_FACTS = {
    "when": "measured",
    "cpu": "processor",
    "cores": "cores",
    "load_before": "load before it began",
    "system": "system",
    "file_system": "file system",
    "fsync_us": "a durable write of 4 kB, µs",
    "python": "Python",
    "sqlite": "SQLite",
    "postgres": "PostgreSQL",
    "valkey": "Valkey",
    "huey": "Huey",
    "pgqueuer": "PgQueuer",
}
_LIMITS = "limit_peers"
"""Rows whose lines are of one product each, under a limit and without."""


_NOTES = """\
A bar is the median of the rounds; the mark on it spans the lowest and the highest. Latency is the time from the return
of a submission to the start of its handler. A hollow mark is 0: the handler started before the submission had returned.
A curve has a gap at a rate that its queue did not keep up with: in every round its submitters did not reach the rate,
or some jobs had not started in time.
A lower rate is measured with fewer jobs, from {jobs:,} to {most:,}: p99 of {jobs:,} jobs is the slowest of them.
"""
_GUARANTEED = """\
A queue that promises less may be quicker for it. This table was read in the source code of these versions, for the
settings used here.

"""


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Write the page of benchmarks.")
    parser.add_argument("files", nargs="+", type=Path, metavar="RESULT.json", help="results; later ones replace rows")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder the page goes to (default: docs)")
    arguments = parser.parse_args()
    try:
        results = read_results(arguments.files)
        page, pictures = render(results)
    except UnusableResults as error:
        parser.error(str(error))
    write(arguments.docs, results, page, pictures)
    print(f"written: {arguments.docs / 'benchmarks.md'} and {len(pictures)} pictures")


def render(results: Results) -> tuple[str, dict[str, str]]:
    """Returns the page, and the pictures by name."""
    pictures = draw_pictures(results)
    parts = [
        _HEAD,
        *[f"\n![{picture.title}]({FOLDER}/{name})\n" for name, picture in pictures.items()],
        "" if not pictures else "\n" + _NOTES.format(jobs=min(RATES.values()), most=max(RATES.values())),
        "\n" + _METHOD,
        _machines(results.runs),
        "\n## Where others are better\n\n",
        *_behind(results),
        "\n## What each queue guarantees\n\n",
        _GUARANTEED,
        guarantee_table(),
        "\n## All figures\n",
        *(_row(results, row, figures) for row, figures in results.rows().items()),
    ]
    return "".join(parts), {name: picture.svg for name, picture in pictures.items()}


def write(docs: Path, results: Results, page: str, pictures: dict[str, str]) -> None:
    """Writes the page, its pictures and the results; removes pictures of earlier pages."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text(page, encoding="utf-8")
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    kept = msgspec.json.format(msgspec.json.encode(results), indent=1)
    (folder / KEPT).write_bytes(kept + b"\n")


# ── machines ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _machines(runs: Sequence[Run]) -> str:
    names = [fact for fact in _FACTS if any(fact in run.machine for run in runs)]
    names += [fact for fact in dict.fromkeys(name for run in runs for name in run.machine) if fact not in _FACTS]
    heads = [f"run {index + 1}" for index in range(len(runs))] if len(runs) > 1 else ["this run"]
    lines = [_cells("", *heads), _cells(*["---"] * (len(runs) + 1))]
    lines += [_cells(_FACTS.get(name, name), *(str(run.machine.get(name, "")) for run in runs)) for name in names]
    lines.append(_cells("rounds", *(str(run.rounds) for run in runs)))
    lines.append(_cells("sizes", *("full" if run.full else "usual" for run in runs)))
    return "".join(lines)


# ── comparisons that are lost ─────────────────────────────────────────────────────────────────────────────────────
def _behind(results: Results) -> Iterator[str]:
    """Yields the parts of the section: other queues, bare loops, limits, and missed targets."""
    figures = [(row, figure) for row, found in results.rows().items() for figure in found]
    queues = [each for each in figures if is_product(each[1].other) and is_behind(each[1])]
    bare = [each for each in figures if is_bare_loop(each[1].other) and is_behind(each[1])]
    limits = list(_ahead_under_limits(results))
    missed = [each for each in figures if each[1].is_missed]
    compared = sum(is_product(figure.other) for _, figure in figures)
    if compared:
        yield f"Comparisons with other queues that Holdfast loses: {len(queues)} of {compared}.\n"
        yield "\n" + _comparisons(queues) if queues else ""
    else:
        yield "These rows compare Holdfast with no other queue.\n"
    if limits:
        yield "\nUnder a limit, these queues run more jobs, or keep more of their own rate without limits:\n\n"
        yield _cells("row", "limit and queue", "jobs/s", "of its own rate", "Holdfast", "of its own rate")
        yield _cells(*["---"] * 2, *["---:"] * 4) + "".join(limits)
    if bare:
        yield "\nA bare loop of statements or calls, without a queue, is faster here:\n\n" + _comparisons(bare)
    yield f"\nMissed targets: {len(missed)} of {sum(figure.target is not None for _, figure in figures)}.\n"
    yield "\n" + _missed(missed) if missed else ""


def _comparisons(figures: Sequence[tuple[str, Figure]]) -> str:
    lines = [_cells("row", "figure", "unit", "Holdfast", "other", "", "ratio", "better is")]
    lines.append(_cells(*["---"] * 3, *["---:"] * 2, "---", "---:", "---"))
    for row, figure in figures:
        other = _value(figure.other_median), figure.other or ""
        lines.append(_line(row, figure, *other, _ratio(figure.ratio), "more" if more_is_better(figure) else "less"))
    return "".join(lines)


def _ahead_under_limits(results: Results) -> Iterator[str]:
    """Yields the queues that run more jobs under a limit than Holdfast, or keep a larger part of their own rate."""
    for row, figures in results.rows().items():
        if not row.endswith(_LIMITS):
            continue
        ours: Figure | None = None
        for figure in figures:
            if ": Holdfast" in figure.what:
                ours = figure
            elif ours is not None and _is_ahead(figure, ours):
                theirs = _value(figure.median), _ratio(figure.ratio)
                yield _cells(f"`{row}`", figure.what, *theirs, _value(ours.median), _ratio(ours.ratio))


def _is_ahead(figure: Figure, ours: Figure) -> bool:
    return (figure.median or 0) > (ours.median or 0) or (figure.ratio or 0) > (ours.ratio or 0)


def _missed(figures: Sequence[tuple[str, Figure]]) -> str:
    lines = [_cells("row", "figure", "unit", "Holdfast", "ratio", "to", "target")]
    lines.append(_cells(*["---"] * 3, *["---:"] * 2, "---", "---:"))
    for row, figure in figures:
        lines.append(_line(row, figure, _ratio(figure.ratio), figure.other or "", figure.target or ""))
    return "".join(lines)


def _line(row: str, figure: Figure, *cells: str) -> str:
    """Returns a line of a table of figures from several rows."""
    return _cells(f"`{row}`", figure.what, figure.unit, _value(figure.median), *cells)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _row(results: Results, row: str, figures: Sequence[Figure]) -> str:
    title, subject = results.title_of(row)
    title = title.removeprefix("console: ")
    store = STORES.get(row.partition(".")[0])
    heading = title if store is None else f"{store}: {title}"
    run = f" Run {results.run_of(row) + 1}." if len(results.runs) > 1 else ""
    heads = ("figure", "unit", subject, "other", "", "ratio", "target", "")
    lines = [
        f"\n### {heading}\n\n`{row}`.{run}\n\n",
        _cells(*heads),
        _cells("---", "---", "---:", "---:", "---", "---:", "---:", "---"),
    ]
    lines += [
        _cells(
            figure.what,
            figure.unit,
            " ".join(filter(None, [_spread(figure.median, figure.rounds), figure.missing])),
            _spread(figure.other_median, figure.other_rounds),
            figure.other or "",
            _ratio(figure.ratio),
            figure.target or "",
            {"PASS": "met", "miss": "**missed**"}.get(figure.verdict or "", ""),
        )
        for figure in figures
    ]
    return "".join(lines)


def _cells(*cells: str) -> str:
    return (
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells) + " |\n"
    )


def _value(value: float | None) -> str:
    return "" if value is None else number(value)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} ×"


def _spread(median: float | None, rounds: Sequence[float]) -> str:
    """Returns a median, with the lowest and the highest of several rounds."""
    if median is None:
        return ""
    return f"{number(median)} ({number(min(rounds))}–{number(max(rounds))})" if len(rounds) > 1 else number(median)


if __name__ == "__main__":
    main()
