"""Jobs that another program put into a queue with an empty name: the doctor reports them, and its remedy works."""

from __future__ import annotations

from datetime import timedelta

from holdfast.core.batches import BATCH_TASK
from holdfast.core.models import Finding
from holdfast.stores.base import Store
from tests.conformance.limited import limit
from tests.conformance.support import new_job, put, take_ids
from tests.support.spoiling import by_hand, spoil


async def _finding(store: Store) -> Finding:
    [finding] = [each for each in await store.health.doctor() if each.name == "queue names"]
    return finding


async def test_doctor_finds_nothing_where_queues_have_names(store: Store) -> None:
    await limit(store, task="work", concurrency=1)
    await put(store, new_job(), new_job(queue="mail"), new_job("other"), new_job(delay=timedelta(hours=1)))
    await put(store, new_job(BATCH_TASK, is_batch=True))

    assert (await _finding(store)).level == "ok"


async def test_doctor_reports_queue_with_empty_name(store: Store, home: str) -> None:
    ready, later, named = await put(store, new_job(), new_job(delay=timedelta(hours=1)), new_job())
    for job_id in (ready, later):
        spoil(home, job_id, queue="")

    finding = await _finding(store)

    assert (finding.level, finding.text.split(",")[0]) == ("error", "2 jobs wait in a queue with an empty name")
    by_hand(home, finding.remedy.partition(": ")[2])
    assert (await _finding(store)).level == "ok"
    assert await take_ids(store) == [ready, named]
