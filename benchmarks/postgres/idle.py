"""Idle: what a worker process costs that has nothing to do, itself and on the server (target 7)."""

from __future__ import annotations

import uvloop

from benchmarks.application import fill
from benchmarks.harness import Line, Plan, at_most
from benchmarks.idle import watched
from benchmarks.postgres import peer, server

TITLE = "An idle worker process"


def run(plan: Plan) -> list[Line]:
    """Let a worker settle down, then watch it and its database; then the peer's."""
    cpu = Line("CPU", "%", other="PgQueuer", target=at_most(0.5))
    memory = Line("resident memory", "MB", other="PgQueuer", target=at_most(70))
    calls = Line("store calls", "1/s", target=at_most(1))
    transactions = Line("transactions in its database", "transactions/s", other="PgQueuer")
    for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
        with server.database() as home:
            uvloop.run(fill(home.url, 0))
            ours = watched(plan, home.transactions, "benchmarks.worker", home.url)
        with server.database() as home:
            uvloop.run(peer.install(home.url))
            theirs = watched(plan, home.transactions, "benchmarks.postgres.peer_worker", home.url)
        for name, line in (("cpu", cpu), ("memory", memory), ("counted", transactions)):
            line.add(ours[name], theirs[name])
        calls.add(ours["calls"])
    return [cpu, memory, calls, transactions]
