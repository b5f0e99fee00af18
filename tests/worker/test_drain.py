"""A draining worker against the store: what becomes ready again while it looks is not left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast import Holdfast, Job, JobState, Retry
from holdfast.core.models import Claim
from holdfast.worker import Worker


def test_drain_runs_a_retry_that_is_due_at_once(tmp_path: Path) -> None:
    """A claim that saw nothing while the only job ran is answered after that job was settled for a retry."""
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("fail", retry=Retry.immediate(), max_attempts=2)
    async def fail() -> None:
        raise ValueError("again")

    async def run() -> Job:
        async with app:
            handle = await fail.enqueue()
            worker = Worker(app, drain=True)
            store = await app.open_store()
            claim = store.queueing.claim

            async def answered_late(*args: Any, **kwargs: Any) -> Claim:
                claimed = await claim(*args, **kwargs)
                while not claimed.jobs and worker.shared.held:  # noqa: ASYNC110 - no event tells of this
                    await asyncio.sleep(0)
                return claimed

            store.queueing.claim = answered_late  # a store that takes its time
            async with asyncio.timeout(60):
                await worker.run()
            return await handle.job()

    job = asyncio.run(run())
    assert (job.state, job.attempts) == (JobState.DEAD, 2)
