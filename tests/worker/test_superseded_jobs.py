"""Jobs that a schedule's next job supersedes are cancelled, though their worker stops, and however many they are."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Holdfast, JobFilter, JobState, Unavailable
from holdfast.core.events import StoreTrouble
from holdfast.stores.common.requests import SelectionAdmin
from tests.worker.support import Recorder, harness

MINUTE = 60


async def test_worker_that_stops_cancels_the_superseded_jobs_that_it_knows(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_locked, cancel = True, SelectionAdmin.cancel

    async def cancel_unlocked(admin: Any, selection: Any, **options: Any) -> Any:
        if is_locked:
            raise Unavailable("another transaction holds the job")
        return await cancel(admin, selection, **options)

    monkeypatch.setattr(SelectionAdmin, "cancel", cancel_unlocked)
    trouble = Recorder(app)
    async with harness(app, queues={"default": 1}) as harnessed:
        job = app.draft_job("elsewhere", {}, queue="elsewhere")
        await app.schedules.add("s", job, every=60, overlap="cancel_previous")
        worker = await harnessed.start()
        await harnessed.advance(2 * MINUTE + 1)
        assert any("superseded jobs" in event.error for event in trouble.of(StoreTrouble))
        is_locked = False
        worker.worker.stop()
        await harnessed.advance(1)
        states = [each.state for each in (await app.find(JobFilter(tag="schedule:s"))).jobs]
    assert sorted(states) == [JobState.CANCELLED, JobState.QUEUED]


async def test_more_superseded_jobs_than_one_call_takes_are_all_cancelled(app: Holdfast) -> None:
    async with harness(app, queues={"default": 1}) as harnessed:
        worker = await harnessed.start()
        handles = await app.enqueue_many([app.draft_job("elsewhere", {}, queue="elsewhere") for _ in range(1001)])
        worker.worker.ticker._superseded.update(handle.id for handle in handles)
        await harnessed.advance(MINUTE)
        assert await app.count(JobFilter(states=(JobState.CANCELLED,))) == 1001
