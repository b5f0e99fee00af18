"""Idle: what a worker process costs that has nothing to do, itself and on the server (target 7)."""

from __future__ import annotations

import time

import psutil
import uvloop

from benchmarks.application import fill
from benchmarks.harness import Line, Plan, at_most
from benchmarks.postgres import peer, server
from benchmarks.postgres.server import Database
from benchmarks.processes import child

TITLE = "An idle worker process"


def run(plan: Plan) -> list[Line]:
    """Let a worker settle down, then watch it and its database; then the peer's."""
    cpu = Line("CPU", "%", other="PgQueuer", target=at_most(0.5))
    memory = Line("resident memory", "MB", other="PgQueuer", target=at_most(70))
    calls = Line("store calls", "1/s", target=at_most(1))
    transactions = Line("transactions in its database", "1/s", other="PgQueuer")
    for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
        with server.database() as home:
            uvloop.run(fill(home.url, 0))
            ours = _watched(plan, home, "benchmarks.worker")
        with server.database() as home:
            uvloop.run(peer.install(home.url))
            theirs = _watched(plan, home, "benchmarks.postgres.peer_worker")
        for name, line in (("cpu", cpu), ("memory", memory), ("transactions", transactions)):
            line.add(ours[name], theirs[name])
        calls.add(ours["calls"])
    return [cpu, memory, calls, transactions]


def _watched(plan: Plan, home: Database, module: str) -> dict[str, float]:
    with child(module, home.url) as worker:
        worker.say("go")
        time.sleep(plan.size(5.0, 0.3))
        before, transactions = worker.ask("mark"), home.transactions()
        time.sleep(plan.size(30.0, 0.2))
        after, done = worker.ask("mark"), home.transactions()
        memory = psutil.Process(worker.pid).memory_info().rss / 1e6
        worker.ask("stop")
    seconds = after["at"] - before["at"]
    return {
        "cpu": (after["cpu"] - before["cpu"]) / seconds * 100,
        "memory": memory,
        "calls": (sum(after.get("calls", {}).values()) - sum(before.get("calls", {}).values())) / seconds,
        "transactions": (done - transactions) / seconds,
    }
