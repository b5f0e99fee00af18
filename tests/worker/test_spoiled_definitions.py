"""Workers beside schedules and limits whose stored documents another program spoiled, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast.core.events import DeclarationIgnored, StoreTrouble
from holdfast.core.models import JobFilter, JobState
from holdfast.core.schedule import ScheduleChange
from tests.support.spoiling import spoil_document
from tests.worker.support import Recorder, harness

MINUTE = 60
_SPOILED_JOBS: list[dict[str, Any]] = [{"queue": ""}, {"task": ""}, {"priority": 1000}, {"max_attempts": 0}]


async def test_spoiled_schedules_end_no_worker_and_hold_up_no_other(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    spoiled: list[dict[str, Any]] = [
        {"cron": "99 * * * *"},
        {"cron": None},
        {"cron": None, "every_us": 0},
        {"cron": None, "every_us": -1},
        {"cron": None, "at_us": 1 << 62, "next_us": 1 << 62},
        {"runs": 1 << 63},
        {"jitter_us": -1},
        {"catch_up": -1},
        *[{"job": replace(tick.new_job(), id="", **fields)} for fields in _SPOILED_JOBS],
    ]
    async with harness(app) as harnessed:
        store = await app.open_store()
        for n, changes in enumerate(spoiled):
            known = await app.schedules.add(f"spoiled-{n}", tick.new_job(), cron="* * * * *")
            await store.schedules.write_schedule(ScheduleChange(replace(known, **changes), known.revision))
        await app.schedules.add("sound", tick.new_job(), cron="* * * * *")
        await harnessed.start()
        await harnessed.advance(3 * MINUTE + 1)
        assert not any(hand.running.done() for hand in harnessed._workers), "the worker has gone"
        assert [(known.name, known.runs) for known in await app.schedules.find_all()] == [("sound", 3)]
        assert len((await store.query.find(JobFilter(), limit=99)).jobs) == 3
    assert "is left out: spoiled-8: queue: '' is not valid" in caplog.text
    assert "a stored schedule cannot be read, and is left out: spoiled-0: Bad minute" in caplog.text


async def test_spoiled_schedule_and_limit_are_replaced_by_those_of_the_code(app: Holdfast, home: str) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    recorder = Recorder(app)
    async with harness(app) as harnessed:
        await app.schedules.add("spoiled", tick.new_job(), cron="* * * * *")
        await app.limits.add("spoiled", queue="other", concurrency=1)
        spoil_document(home, "schedule", "spoiled", "[7]")
        spoil_document(home, "limit", "spoiled", '{"name":"spoiled","queue":"other","values":{"rate":0}}')
        app.schedule("spoiled", tick.new_job(), cron="* * * * *")
        app.schedule("sound", tick.new_job(), cron="* * * * *")
        app.limit("spoiled", queue="other", concurrency=2)
        other = await tick.options(queue="other").enqueue()
        await harnessed.start()
        await harnessed.advance(3 * MINUTE + 1)
        assert [(known.name, known.runs) for known in await app.schedules.find_all()] == [("sound", 3), ("spoiled", 3)]
        assert [known.values.concurrency for known in await app.limits.find_all()] == [2]
        assert await other.state() == JobState.SUCCEEDED
    assert recorder.of(DeclarationIgnored) == recorder.of(StoreTrouble) == []
