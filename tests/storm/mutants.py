"""A sample of the mutants of guards: each storm goes on where the last one ended."""

from __future__ import annotations

from collections import Counter

from tests.crash.report import Report
from tools.mutants.runner import Run, all_mutants, record_reach


def sampled(seconds: float, seed: int) -> Report:
    """Runs mutants for so long; complains of each that no test notices and that no reader has found equivalent."""
    record_reach(parallel=2)
    mutants, run = all_mutants(seed=seed), Run()
    run.run(mutants, parallel=2, seconds=seconds)
    figures = sum(run.count_verdicts(mutants).values(), Counter())
    return Report([f"survived: {each.name}" for each in run.survivors(mutants)], {**figures})
