"""A process that only claims, a random number of jobs each time, and settles them, until there are none.

Same arguments and output as ``benchmarks.worker --drain``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from typing import Any

import uvloop

from benchmarks.application import Meter, metered
from benchmarks.telling import say
from holdfast.core.models import Job, JobState, Settlement
from holdfast.stores import open_store
from holdfast.stores.base import ClaimRequest

_MAX_CLAIM = 500


def main() -> None:
    """``claimer URL --drain``."""
    uvloop.run(_serve(sys.argv[1]))


async def _serve(url: str) -> None:
    meter = Meter()
    store: Any = metered(open_store(url), meter)
    await store.open()
    say({"ready": True})
    sys.stdin.readline()
    started, cpu = time.monotonic(), time.process_time()
    worker = f"claimer-{os.getpid()}"
    while jobs := await _claimed(store, worker):
        await store.queueing.settle(
            [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in jobs]
        )
    await store.close()
    figures = {"settled": meter.settled, "settled_at": meter.settled_at, "cpu_then": meter.cpu_then}
    say(figures | {"claims": meter.claims, "started_at": started, "cpu_before": cpu})


async def _claimed(store: Any, worker: str) -> list[Job]:
    limit = random.randint(1, _MAX_CLAIM)
    claim = await store.queueing.claim(
        ClaimRequest(worker, {"default": limit}, limit=limit, lease_for=timedelta(seconds=60))
    )
    jobs: list[Job] = claim.jobs
    return jobs


if __name__ == "__main__":
    main()
