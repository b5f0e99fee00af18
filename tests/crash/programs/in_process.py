"""Submits jobs and runs them in the same process, as a site with a worker of its own does, until it is killed."""

from __future__ import annotations

import asyncio

from tests.crash.ledger import append
from tests.crash.programs.tasks import LEDGER, app, work
from tests.crash.programs.worker import KINDS, record

PAUSE = 0.02


async def serve() -> None:
    """Submits a job every now and then while a worker beside it takes jobs."""
    async with app.worker(concurrency=10):
        while True:
            handle = await work.options(max_attempts=25).enqueue(0.2)
            append(LEDGER, what="ack", jobs=[handle.id])
            await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    app.events.subscribe(record, *KINDS)
    asyncio.run(serve())
