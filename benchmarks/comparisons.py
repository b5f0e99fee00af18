"""``python -m benchmarks.comparisons``: writes the table of docs/comparisons.md from the results that docs/ keeps."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks.page import DOCS, FOLDER, KEPT
from benchmarks.result_files import Results, is_behind, is_product, more_is_better, read_results

PAGE = DOCS / "comparisons.md"
_TABLE = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def table(results: Results) -> str:
    """Returns a line for each queue: how many comparisons Holdfast wins and loses, and by how much."""
    advantages: dict[str, list[float]] = {}
    lost: dict[str, int] = {}
    for figures in results.rows().values():
        for figure in figures:
            if figure.other is None or not is_product(figure.other) or not figure.ratio:
                continue
            advantage = figure.ratio if more_is_better(figure) else 1 / figure.ratio
            advantages.setdefault(figure.other, []).append(advantage)
            lost[figure.other] = lost.get(figure.other, 0) + is_behind(figure)
    lines = [
        "| queue | comparisons | Holdfast is better in | at worst | median | at best |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for queue, found in sorted(advantages.items()):
        ends = (min(found), statistics.median(found), max(found))
        cells = [queue, str(len(found)), str(len(found) - lost[queue]), *(f"{each:.2f} ×" for each in ends)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def replace_table(page: str, written: str) -> str:
    """Returns the page with this table in place of its own."""
    return _TABLE.sub(lambda found: f"{found[1]}{written}{found[2]}", page)


def main() -> None:
    """Writes the page."""
    results = read_results([Path(DOCS / FOLDER / KEPT)])
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
