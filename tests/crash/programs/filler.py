"""Submits jobs in one transaction: ``filler JOBS SECONDS``, each of which takes so long. It says when it begins."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from holdfast import Holdfast
from tests.crash.ledger import append


async def main(jobs: int, seconds: float) -> None:
    """Submit them all."""
    async with Holdfast() as app:
        drafts = [app.draft_job("crash.work", {"seconds": seconds}) for _ in range(jobs)]
        append(Path(os.environ["CRASH_LEDGER"]), what="filling")
        await app.enqueue_many(drafts, batch_size=jobs)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
