"""Raw: what the server takes and gives on one connection, by the size of a batch; no queue, nothing of ours."""

from __future__ import annotations

from benchmarks.harness import Line, Plan
from benchmarks.postgres import bare

TITLE = "Bare statements in a loop, one connection"
SUBJECT = "asyncpg"
_SIZES = {1: 2000, 10: 10_000, 100: 50_000, 500: 50_000}
"""Jobs, by how many go together."""


def run(plan: Plan) -> list[Line]:
    """Each size once a round."""
    lines: dict[tuple[str, int], Line] = {}
    for _ in range(plan.rounds):
        for batch, jobs in _SIZES.items():
            number = plan.size(jobs, 2 * batch)
            rates = bare.measured(number, bare.inserted, batch) | bare.measured(number, bare.cycled, batch)
            for what, rate in rates.items():
                named = {"both": "claim, then complete"}.get(what, what)
                lines.setdefault((what, batch), Line(f"{named}, {batch} at a time", "jobs/s")).add(rate)
    return [
        line for what in ("insert", "claim", "complete", "both") for (name, _), line in lines.items() if name == what
    ]
