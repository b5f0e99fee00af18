"""Idle: what a worker process costs that has nothing to do, itself and on the server (target 7)."""

from __future__ import annotations

import uvloop

from benchmarks.application import fill
from benchmarks.harness import Line, Plan, at_most
from benchmarks.idle import watched
from benchmarks.redis import server
from benchmarks.redis.peers import peer

TITLE = "An idle worker process"
_PEER = "taskiq-stream"


def run(plan: Plan) -> list[Line]:
    """Let a worker settle down, then watch it and its server; then the peer's."""
    cpu = Line("CPU", "%", other=_PEER, target=at_most(0.5))
    memory = Line("resident memory", "MB", other=_PEER, target=at_most(70))
    calls = Line("store calls", "1/s", target=at_most(1))
    commands = Line("commands sent to the server, by its own count", "1/s", other=_PEER, target=at_most(2))
    for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
        with server.namespace() as url, server.commands() as sent:
            uvloop.run(fill(url, 0))
            ours = watched(plan, sent, "benchmarks.worker", url)
        with server.database() as url, server.commands() as sent:
            uvloop.run(peer(_PEER, url).fill(0))  # makes what its worker reads
            theirs = watched(plan, sent, "benchmarks.redis.peer_worker", _PEER, url)
        for name, line in (("cpu", cpu), ("memory", memory), ("counted", commands)):
            line.add(ours[name], theirs[name])
        calls.add(ours["calls"])
    return [cpu, memory, calls, commands]
