"""Limits of ours and of peers in one run: drains of a worker process under a limit, beside its own without limits.

Every side runs up to a hundred jobs at once, and each key has two jobs. Peers have fewer jobs, since they run fewer in
the same time; a short queue is to their advantage. The limits hardly hold a job back: the figures are their cost.
Holdfast prefetches only jobs without limits, so its ratios include what prefetching gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import uvloop

from benchmarks.application import Application
from benchmarks.drained import drained, rate_of
from benchmarks.harness import Line, Plan
from benchmarks.limit_peer_worker import CONCURRENCY, RATE
from benchmarks.processes import child

TITLE = "Limits of Holdfast and of peers, one worker process each"
SUBJECT = "limited"

LIMITS = {
    "queue": f"concurrency of a queue ({CONCURRENCY})",
    "keys": "concurrency of each key (1)",
    "rate": f"rate of a queue ({RATE:,}/s)",
}
_VALUES: dict[str, dict[str, Any]] = {
    "queue": {"concurrency": CONCURRENCY},
    "keys": {"by": "args.n", "concurrency": 1},
    "rate": {"rate": f"{RATE}/s"},
    "none": {},
}


class Peer(NamedTuple):
    """A peer of ``limit_peer_worker``, by the name of its package, and what it calls its limits."""

    package: str
    title: str
    limits: dict[str, str]


class Server(NamedTuple):
    """A server that every side shares: empty places for us and for a peer, by URL."""

    ours: Callable[[], AbstractContextManager[str]]
    theirs: Callable[[], AbstractContextManager[str]]
    settle: Callable[[str], None]
    """Called with the URL after a fill, so that every drain begins alike."""


def lines(plan: Plan, server: Server, peers: Sequence[Peer]) -> list[Line]:
    """Alternates: each side without limits, and right after that with each limit it has."""
    jobs, their_jobs = plan.size(20_000, 500, 100_000), plan.size(2_000, 60, 20_000)
    ours = {limit: _line(f"{what}: Holdfast, {jobs:,} jobs") for limit, what in LIMITS.items()}
    theirs = [
        {limit: _line(f"{what}: {_title(peer, limit)}, {their_jobs:,} jobs") for limit, what in LIMITS.items()}
        for peer in peers
    ]
    for _ in range(plan.rounds):
        our_plain = _ours(server, "none", jobs)
        for limit, line in ours.items():
            line.add(_ours(server, limit, jobs), our_plain)
        for peer, by_limit in zip(peers, theirs, strict=True):
            plain = _theirs(server, peer, "none", their_jobs)
            for limit, line in by_limit.items():
                figure = _theirs(server, peer, limit, their_jobs) if limit in peer.limits else None
                _note(line, figure, plain)
    return [by_limit[limit] for limit in LIMITS for by_limit in (ours, *theirs)]


def _line(what: str) -> Line:
    return Line(what, "jobs/s", other="without limits")


def _note(line: Line, figure: float | str | None, plain: float | str) -> None:
    """Notes one round of a peer; an error stands for a figure, and None for a limit that the peer does not have."""
    if isinstance(plain, str):
        line.missing = plain
    elif isinstance(figure, str):
        line.missing = figure
    elif figure is None:
        line.missing = "none"
        line.theirs.append(plain)
    else:
        line.add(figure, plain)


def _title(peer: Peer, limit: str) -> str:
    words = [peer.title]
    with suppress(PackageNotFoundError):
        words.append(version(peer.package))
    if limit in peer.limits:
        words.append(peer.limits[limit])
    return " ".join(words)


def _ours(server: Server, limit: str, jobs: int) -> float:
    with server.ours() as url:
        uvloop.run(_fill(url, limit, jobs))
        server.settle(url)
        figures = drained("benchmarks.worker", url, 1)
    settled = sum(each["settled"] for each in figures)
    if settled != jobs:
        raise RuntimeError(f"of {jobs} jobs {settled} succeeded")
    return rate_of(figures)


async def _fill(url: str, limit: str, jobs: int) -> None:
    async with Application(url) as app:
        if _VALUES[limit]:
            await app.limits.add("limit", queue="default", **_VALUES[limit])
        await app.enqueue_many(app.noop.new_job(n=index % (jobs // 2)) for index in range(jobs))


def _theirs(server: Server, peer: Peer, limit: str, jobs: int) -> float | str:
    """Returns the peer's jobs per second, or its error."""
    try:
        with (
            server.theirs() as url,
            child("benchmarks.limit_peer_worker", peer.package, url, limit, jobs, jobs // 2) as process,
        ):
            answer = process.ask("fill")
            if "error" not in answer:
                server.settle(url)
                answer = process.ask("go")
    except (OSError, RuntimeError) as error:  # the process has died
        return f"{type(error).__name__}: {error}"
    return float(answer["rate"]) if "rate" in answer else str(answer["error"])
