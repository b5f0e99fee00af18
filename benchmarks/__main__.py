"""``python -m benchmarks [store …] [row …] [--quick | --full] [--rounds N]``: measure, show, keep figures as JSON."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.facts import facts
from benchmarks.harness import Plan, show
from benchmarks.rows import ROWS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the rows that were named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Holdfast and its peers.",
        epilog="A store's name stands for all its rows, a row's name for it on every store; "
        "both together (postgres drain) for that row on that store.",
    )
    parser.add_argument("words", nargs="*", metavar="store|row", help=f"what to run (default: all): {known()}")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs; the figures mean nothing")
    parser.add_argument("--full", action="store_true", help="the sizes of the targets, ten times those of other runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each figure is taken (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder the JSON goes to")
    arguments = parser.parse_args()
    rows = chosen(arguments.words)
    if isinstance(rows, str):
        parser.error(rows)
    if arguments.rounds < 1:
        parser.error("give at least one round")
    if arguments.quick and arguments.full:
        parser.error("give --quick or --full, not both")
    console = Console(width=None if Console().is_terminal else 150)
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmarks-") as folder:
        plan = Plan(arguments.quick, 1 if arguments.quick else arguments.rounds, Path(folder), arguments.full)
        path = _run(console, plan, rows, arguments.results)
    console.print(f"kept in {path}")


def known() -> str:
    """Every word that chooses something."""
    words = [word for row in ROWS for word in row.split(".")]
    return ", ".join(dict.fromkeys(words))


def chosen(words: list[str]) -> list[str] | str:
    """The rows that these words choose, in their own order; a complaint about a word that chooses none."""
    stores = {row.partition(".")[0] for row in ROWS if "." in row}.intersection(words)
    rows = set(words) - stores
    found = [
        row
        for row in ROWS
        if (not stores or row.partition(".")[0] in stores) and (not rows or row.rpartition(".")[2] in rows)
    ]
    missing = sorted(rows - {row.rpartition(".")[2] for row in found})
    if missing:
        of = f" of {' or '.join(sorted(stores))}" if stores else ""
        return f"there is no row {', '.join(missing)}{of}; there are these: {known()}"
    return found


def _run(console: Console, plan: Plan, rows: list[str], results: Path) -> Path:
    machine = facts(plan.folder)
    console.print(" · ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
    if machine["load_before"] > machine["cores"] / 2:
        console.print(
            "this machine is busy with something else: latencies and p99 will be its, not ours", style="yellow"
        )
    if plan.quick:
        console.print("quick: these figures only show that the benchmarks run", style="yellow")
    measured, titles = {}, {}
    for row in rows:
        module = importlib.import_module(f"benchmarks.{row}")
        lines = module.run(plan)
        title = f"{row.partition('.')[0]}: {module.TITLE}" if "." in row else module.TITLE
        titles[row] = module.TITLE, getattr(module, "SUBJECT", "Holdfast")
        show(console, title, lines, titles[row][1])
        measured[row] = [line.document() for line in lines]
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{datetime.now(UTC):%Y%m%dT%H%M%S}{'-quick' if plan.quick else ''}.json"
    document = {"machine": machine, "quick": plan.quick, "full": plan.full, "rounds": plan.rounds}
    document |= {"titles": titles, "rows": measured}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return path


if __name__ == "__main__":
    main()
