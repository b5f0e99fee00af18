"""Wake-ups: 32 processes that submit one by one, with and without telling a listening worker (target 11)."""

from __future__ import annotations

import uvloop

from benchmarks.application import fill
from benchmarks.harness import Line, Plan, times_at_least
from benchmarks.postgres import server
from benchmarks.processes import Child, child, children

TITLE = "Submit from many processes, each one by one, a worker listening"
_TURNS = 4  # of each side in a round


def run(plan: Plan) -> list[Line]:
    """The same processes, with and without wake-ups in turn. The worker hears all of it and serves another queue."""
    writers = plan.size(32, 2)
    line = Line(f"{writers} processes", "jobs/s", other="without", target=times_at_least(0.9))
    isolated = Line("1 process", "jobs/s", other="without")
    for _ in range(plan.rounds):
        with server.database() as home:
            uvloop.run(fill(home.url, 0))
            with (
                child("benchmarks.worker", home.url, "--queue", "elsewhere") as worker,
                children(writers, "benchmarks.postgres.writer", home.url) as family,
            ):
                worker.say("go")
                line.add(*_alternating(plan, family))
                isolated.add(*_alternating(plan, family[:1]))
                worker.ask("stop")
    return [line, isolated]


def _alternating(plan: Plan, family: list[Child]) -> tuple[float, float]:
    """Jobs a second with wake-ups and without."""
    seconds = plan.size(2.0, 0.1)
    stored = {"loud": 0, "silent": 0}
    turns = plan.size(_TURNS, 1)
    for _ in range(turns):
        for word in stored:
            for each in family:
                each.say(f"{word} {seconds}")
            stored[word] += sum(each.heard()["stored"] for each in family)
    return stored["loud"] / turns / seconds, stored["silent"] / turns / seconds
