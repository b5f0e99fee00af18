"""Running, succeeded and failed jobs of a worker in ``/v1/workers``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from tests.web.client import Api
from tests.web.working import ERROR, Worker


def listed(api: Api) -> tuple[int, int, int]:
    """Returns how many jobs the only worker runs, and how many have succeeded and failed."""
    (worker,) = api.get("/v1/workers")["workers"]
    return worker["running"], worker["succeeded"], worker["failed"]


def settle_each(worker: Worker) -> None:
    """Lets one job succeed, and one fail."""
    jobs = [worker.api.submit() and worker.one(limit=1) for _ in range(2)]
    worker.settle(jobs[0], "succeeded")
    worker.settle(jobs[1], "failed", error=ERROR, delay=3600)


@pytest.mark.parametrize("own", [{}, {"succeeded": 1, "failed": 1}], ids=["counted", "own"])
def test_waiting_claim_leaves_what_was_reported_since(api: Api, clock: ManualClock, own: dict[str, int]) -> None:
    worker = Worker(api)

    async def wait_and_report() -> None:
        claim = {"worker": worker.name, "queues": ["none"], "wait": 60, "running": 2, **dict.fromkeys(own, 0)}
        claiming = asyncio.create_task(api.send("POST", "/v1/claims", json=claim))
        await api.until(api.app.workers)
        report: dict[str, Any] = {"worker": worker.name, "leases": [], "running": 0, **own}
        await api.send("POST", "/v1/claims/extend", json=report)
        (reported,) = await api.app.workers()

        async def is_renewed() -> bool:
            clock.advance(1)
            (renewed,) = await api.app.workers()
            return renewed.seen_at_us > reported.seen_at_us

        await api.until(is_renewed)
        claiming.cancel()

    settle_each(worker)
    api.run(wait_and_report())
    assert listed(api) == (0, 1, 1)


def test_counts_of_several_processes_are_added(api: Api, home: str, clock: ManualClock) -> None:
    with Api(home, clock=clock, now=clock) as other:
        workers = Worker(api), Worker(other)
        for worker in (*workers, workers[1]):
            settle_each(worker)
        for worker in (*workers, *workers):
            worker.extend()
        assert listed(api) == listed(other) == (0, 3, 3)
