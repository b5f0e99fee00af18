"""Jobs for the scenarios, submitted by the test itself, and waiting for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from holdfast import Holdfast
from tests.crash.fleet import Fleet, until

Spec = tuple[str, dict[str, Any], dict[str, Any]]
"""Task, payload, options."""


def submit(fleet: Fleet, specs: Sequence[Spec]) -> list[str]:
    """Store them all; their ids."""

    async def store() -> list[str]:
        async with Holdfast(fleet.url) as app:
            drafts = [app.draft_job(task, payload, **options) for task, payload, options in specs]
            return [handle.id for handle in await app.enqueue_many(drafts)]

    return asyncio.run(store())


def work(count: int, seconds: float, **options: Any) -> list[Spec]:
    """So many jobs that take so long."""
    return [("crash.work", {"seconds": seconds}, options)] * count


def await_quiet(fleet: Fleet, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> float:
    """Wait until every job has ended; how long that took. Called again and again meanwhile: ``meanwhile``."""

    def over() -> bool:
        meanwhile()
        return fleet.database.unended() == 0

    return until(over, seconds, f"the last jobs of {fleet.url} to end", pause=0.1)
