"""Limits and limited jobs, as the tests of limits say them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import Job
from holdfast.stores.base import Store
from tests.conformance.support import ending, new_job

DAY = timedelta(days=1)


async def limit(store: Store, name: str = "mail", *, revision: int = 0, **fields: Any) -> int:
    """Write a limit: the fields of ``Limit`` and of its values."""
    own = {field: fields.pop(field) for field in ("queue", "task", "by") if field in fields}
    if "queue" not in own and "task" not in own:
        own["queue"] = "default"
    written = await store.limits.write_limit(
        LimitChange(Limit(name=name, values=LimitValues(**fields), **own), revision)
    )
    assert written is not None
    return written


def job_of(tenant: object, *, task: str = "work", **fields: Any) -> Any:
    return new_job(task=task, payload=f'{{"tenant":{tenant}}}', **fields)


async def end(store: Store, *jobs: Job) -> None:
    answers = await store.queueing.settle([ending(job) for job in jobs])
    assert all(answer.accepted for answer in answers)


def tenants(jobs: Sequence[Job]) -> list[Any]:
    return [job.decode_arguments().get("tenant") for job in jobs]


async def get(store: Store, job_id: str) -> Job:
    job = await store.query.get(job_id)
    assert job is not None
    return job


async def limit_again(store: Store, **values: Any) -> None:
    """Change the values of the only limit."""
    (known,) = await store.limits.read_limits()
    changed = Limit(name=known.name, queue=known.queue, task=known.task, by=known.by, values=LimitValues(**values))
    assert await store.limits.write_limit(LimitChange(changed, known.revision)) is not None
