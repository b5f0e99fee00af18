"""HTTP: single submissions, and batches, of clients that keep their connections (target 13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.harness import Line, Plan, at_least, percentile
from benchmarks.processes import child

TITLE = "HTTP, 32 clients that keep their connections"
_CLIENTS = 32
_BATCH = 100
_WARM = 0.5  # seconds that do not count

Home = Callable[[Plan], AbstractContextManager[str]]


@contextmanager
def _sqlite(plan: Plan) -> Iterator[str]:
    with plan.place() as folder:
        yield f"sqlite:///{folder}/jobs.db"


@contextmanager
def _postgres(_: Plan) -> Iterator[str]:
    from benchmarks.postgres import server as postgres  # here: the API and its clients are modules of this package

    postgres.checkpoint()
    with postgres.database() as database:
        yield database.url


@contextmanager
def _redis(_: Plan) -> Iterator[str]:
    from benchmarks.redis import server as redis

    with redis.namespace() as url:
        yield url


HOMES: dict[str, Home] = {"PostgreSQL": _postgres, "SQLite": _sqlite, "Redis": _redis}


def run(plan: Plan) -> list[Line]:
    """Each store in turn; the API is a process, and its clients are another."""
    lines: list[Line] = []
    for name, home in HOMES.items():
        single = Line(f"{name}, one job a request", "jobs/s", target=at_least(2000))
        slowest = Line(f"{name}, one job a request, p99", "ms")
        batches = Line(f"{name}, {_BATCH} jobs a request", "jobs/s", target=at_least(30_000))
        for _ in range(plan.rounds):
            with home(plan) as url, child("benchmarks.http.api", url) as api:
                port = api.ask("where")["port"]
                rate, took = _measured(plan, port, 1)
                single.add(rate)
                slowest.add(percentile(took, 99))
                rate, _ = _measured(plan, port, _BATCH)
                batches.add(rate)
        lines += single, slowest, batches
    return lines


def _measured(plan: Plan, port: int, jobs: int) -> tuple[float, list[float]]:
    """Jobs a second, and the milliseconds of each request."""
    clients, seconds, warm = plan.size(_CLIENTS, 2), plan.size(5.0, 0.1), plan.size(_WARM, 0.0)
    with child("benchmarks.http.load", port, clients, jobs, seconds, warm) as load:
        reply = load.ask("go")
    if reply["refused"]:
        raise RuntimeError(f"{reply['refused']} requests were not answered 201, but so: {reply['sample']}")
    return reply["requests"] * jobs / reply["seconds"], reply["milliseconds"]
