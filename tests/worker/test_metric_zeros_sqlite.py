"""Counters of registered tasks are exported as zero before the first job, so that a first increase is seen."""

from __future__ import annotations

import pytest

from holdfast import Holdfast
from tests.worker.watching import Watched

BY_TASK = ("submitted", "idempotent", "succeeded", "failed", "dead")


async def test_worker_exports_zero_for_every_task(app: Holdfast) -> None:
    @app.task("mail.send")
    async def send() -> None: ...

    @app.task("mail.bounce")
    async def bounce() -> None: ...

    async with Watched(app, commands="argv") as watched:
        samples = await watched.samples()

    tasks = ("mail.send", "mail.bounce", "command")
    zeros = {(f"jobs_{each}_total", frozenset({("task", task)})) for each in BY_TASK for task in tasks}
    assert {key: samples.get(key) for key in zeros} == dict.fromkeys(zeros, 0.0)
    for name in ("jobs_recovered_total", "lease_lost_total"):
        assert samples[name, frozenset()] == 0


async def test_dead_letter_is_the_only_counter_that_moves(app: Holdfast) -> None:
    @app.task("mail.send", max_attempts=1)
    async def send() -> None:
        raise ValueError("no such address")

    async with Watched(app) as watched:
        before = await watched.samples()
        handle = await send.enqueue()
        with pytest.raises(Exception, match="no such address"):
            await handle.result(timeout=30)
        labels = frozenset({("task", "mail.send")})
        while (after := await watched.samples())["jobs_dead_total", labels] == 0:
            pass

    counted = {name: (before[name, labels], after[name, labels]) for name in ("jobs_dead_total", "jobs_failed_total")}
    assert counted == {"jobs_dead_total": (0.0, 1.0), "jobs_failed_total": (0.0, 0.0)}
