"""Durations of claims in several stores, one of each in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from holdfast.core.models import JobState, Settlement
from holdfast.stores import open_store
from holdfast.stores.base import ClaimRequest

BATCH_SIZE = 10
"""Jobs of a claim."""
WARM_UP = 20
"""Claims of each store that are not counted."""


async def alternate_claims(queues: Mapping[str, str], times: int) -> list[list[float]]:
    """Returns the milliseconds of each claim, by store. The claimed jobs are settled in between.

    ``queues``: the queue to claim from, or ``*``, by the URL of the store.
    """
    stores: list[Any] = [open_store(url) for url in queues]
    took: list[list[float]] = [[] for _ in stores]
    for store in stores:
        await store.open()
    for index in range(-WARM_UP, times):
        for store, queue, milliseconds in zip(stores, queues.values(), took, strict=True):
            request = ClaimRequest("benchmark", {queue: BATCH_SIZE}, limit=BATCH_SIZE, lease_for=timedelta(seconds=60))
            started = time.perf_counter()
            claim = await store.queueing.claim(request)
            if index >= 0:
                milliseconds.append((time.perf_counter() - started) * 1000)
            if len(claim.jobs) < BATCH_SIZE:
                raise RuntimeError(f"a claim found {len(claim.jobs)} of {BATCH_SIZE} jobs")
            await store.queueing.settle(
                [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs]
            )
    for store in stores:
        await store.close()
    return took
