"""``python -m benchmarks [row …] [--quick] [--rounds N]``: measure, show, and keep the figures as JSON."""

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

ROWS = (
    "drain",
    "submit",
    "latency",
    "idle",
    "due",
    "backlog",
    "logs",
    "executors",
    "commands",
    "checkpoints",
)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the rows that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Holdfast and a peer.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"which rows (default: all): {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs; the figures mean nothing")
    parser.add_argument("--rounds", type=int, default=3, help="how often each figure is taken (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder the JSON goes to")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.rows) - set(ROWS))
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; there are these: {', '.join(ROWS)}")
    if arguments.rounds < 1:
        parser.error("give at least one round")
    console = Console(width=None if Console().is_terminal else 150)
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmarks-") as folder:
        plan = Plan(arguments.quick, 1 if arguments.quick else arguments.rounds, Path(folder))
        path = _run(console, plan, arguments.rows or list(ROWS), arguments.results)
    console.print(f"kept in {path}")


def _run(console: Console, plan: Plan, rows: list[str], results: Path) -> Path:
    machine = facts(plan.folder)
    console.print(" · ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
    if machine["load_before"] > machine["cores"] / 2:
        console.print(
            "this machine is busy with something else: latencies and p99 will be its, not ours", style="yellow"
        )
    if plan.quick:
        console.print("quick: these figures only show that the benchmarks run", style="yellow")
    measured = {}
    for row in rows:
        module = importlib.import_module(f"benchmarks.{row}")
        lines = module.run(plan)
        show(console, module.TITLE, lines)
        measured[row] = [line.document() for line in lines]
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{datetime.now(UTC):%Y%m%dT%H%M%S}{'-quick' if plan.quick else ''}.json"
    document = {"machine": machine, "quick": plan.quick, "rounds": plan.rounds, "rows": measured}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return path


if __name__ == "__main__":
    main()
