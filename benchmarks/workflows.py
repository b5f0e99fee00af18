"""Workflows of ours and of DBOS in one run: starts, steps, signals and latency, on a new store for each figure.

Each process starts workflows and runs them; ``workflow_worker`` says how. Starts are only stored: by DBOS in a queue,
which is quicker there than ``start_workflow_async``. DBOS has fewer workflows, since it runs fewer in the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from benchmarks.harness import Line, Plan, Target, times_at_least, times_at_most
from benchmarks.processes import child
from benchmarks.workflow_worker import CONCURRENCY, STEPS

TITLE = "Workflows, one process"

Place = Callable[[], AbstractContextManager[str]]
"""Gives the URL of an empty store, for as long as the context lasts."""


class Case(NamedTuple):
    """A measure of ``workflow_worker``, with the names, units and targets of its figures."""

    figures: dict[str, tuple[str, str, Target]]
    ours: int
    theirs: int


def lines(plan: Plan, ours: Place, theirs: Place | None) -> list[Line]:
    """Alternates: each measure of ours, and right after that the same of DBOS if it supports the store."""
    cases = _cases(plan)
    found = {
        (measure, figure): Line(what, unit, other=_title(), target=target if theirs else None)
        for measure, case in cases.items()
        for figure, (what, unit, target) in case.figures.items()
    }
    for _ in range(plan.rounds):
        for measure, case in cases.items():
            mine = _measure(ours, "holdfast", measure, case.ours)
            if isinstance(mine, str):
                raise RuntimeError(mine)
            peer = {} if theirs is None else _measure(theirs, "dbos", measure, case.theirs)
            for figure in case.figures:
                line = found[measure, figure]
                if isinstance(peer, str):
                    line.missing, line.target = f"DBOS: {peer}", None
                    line.add(mine[figure])
                else:
                    line.add(mine[figure], peer.get(figure))
    return list(found.values())


def _cases(plan: Plan) -> dict[str, Case]:
    more, less = times_at_least(5), times_at_most(0.5)
    starts = {"rate": (f"starts, {CONCURRENCY} callers", "1/s", more)}
    steps = {"rate": (f"steps, {CONCURRENCY} workflows at once, {STEPS} each", "1/s", more)}
    signals = {"rate": ("signals, to the ends of their workflows", "1/s", more)}
    latency = {
        "p50": (f"one workflow of {STEPS} steps, p50", "ms", less),
        "p99": (f"one workflow of {STEPS} steps, p99", "ms", less),
    }
    one_by_one = plan.size(200, 5, 1000)
    return {
        "starts": Case(starts, plan.size(20_000, 100, 100_000), plan.size(2000, 50, 10_000)),
        "steps": Case(steps, plan.size(1000, 10, 5000), plan.size(200, 10, 1000)),
        "signals": Case(signals, plan.size(2000, 20, 10_000), plan.size(300, 10, 2000)),
        "latency": Case(latency, one_by_one, one_by_one),
    }


def _title() -> str:
    with suppress(PackageNotFoundError):
        return f"DBOS {version('dbos')}"
    return "DBOS"


def _measure(place: Place, product: str, measure: str, count: int) -> dict[str, float] | str:
    """Returns the figures of one measure, or the error."""
    try:
        with place() as url, child("benchmarks.workflow_worker", product, url, measure, count) as process:
            answer = process.ask("go")
    except (OSError, RuntimeError) as error:  # the process has died
        return f"{type(error).__name__}: {error}"
    return str(answer["error"]) if "error" in answer else answer
