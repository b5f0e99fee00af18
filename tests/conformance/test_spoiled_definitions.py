"""Schedules and limits whose stored documents another program spoiled: each is left out, and hinders no other."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.stores.base import Store
from tests.conformance.limited import end, limit
from tests.conformance.support import Opener, new_job, put, take
from tests.support.spoiling import spoil_document


async def test_spoiled_schedules_are_left_out_with_a_warning(
    store: Store, home: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    cron = {"every_us": None, "cron": "99 * * * *"}
    for name, fields in {"garbage": {}, "deep": {}, "cron": cron, "every": {"every_us": 0}, "sound": {}}.items():
        timing: dict[str, Any] = {"every_us": 1_000_000, **fields}
        schedule = Schedule(id=new_id(), name=name, job=new_job(id=""), next_us=clock(), **timing)
        assert await store.schedules.write_schedule(ScheduleChange(schedule, 0))
    spoil_document(home, "schedule", "garbage", "[7]")
    spoil_document(home, "schedule", "deep", "[" * 990 + "]" * 990)

    for found in (
        await store.schedules.read_schedules(),
        [each for name in ("garbage", "cron", "sound") for each in await store.schedules.read_schedules(name)],
        (await store.schedules.due_schedules(limit=9)).schedules,
    ):
        assert [each.name for each in found] == ["sound"]
    assert caplog.text.count("a stored schedule cannot be read, and is left out") == 10
    assert await store.schedules.write_schedule(ScheduleChange(replace(schedule, name="garbage"), 0)) is None
    revision = await store.schedules.write_schedule(ScheduleChange(replace(schedule, name="garbage"), -1))
    assert [each.revision for each in await store.schedules.read_schedules("garbage")] == [revision]


async def test_spoiled_limits_are_left_out_with_a_warning(
    store: Store, home: str, opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("garbage", "number", "rate", "sound"):
        await limit(store, name, queue=name, concurrency=1)
    await put(store, new_job(queue="garbage"))
    (ending_job,) = await take(store, 9, {"garbage": 1})
    spoil_document(home, "limit", "garbage", "[7]")
    spoil_document(home, "limit", "number", "7")
    spoil_document(home, "limit", "rate", '{"name":"rate","queue":"rate","values":{"rate":0}}')
    other = await opener()

    assert [known.name for known in await other.limits.read_limits()] == ["sound"]
    assert "a stored limit cannot be read, and is left out: Expected `int` >= 1" in caplog.text
    await put(other, *[new_job(queue=name) for name in ("garbage", "rate")])
    plain, first, second = await put(other, *[new_job(queue=name) for name in ("none", "sound", "sound")])
    await end(other, ending_job)
    assert await limit(other, "new", queue="new", concurrency=1)
    capacity = dict.fromkeys(("garbage", "rate", "none", "sound"), 9)
    taken = [job for _ in capacity for job in await take(other, 9, capacity) if job.queue in ("none", "sound")]
    assert {job.id for job in taken} == {plain, first}, "the sound limit holds"
    await end(other, *taken)
    assert [use.used for use in await other.limits.bucket_use(["sound"])] == [0]
    assert second in {job.id for job in await take(other, 9, {"sound": 9})}
    repaired = Limit(name="rate", queue="rate", values=LimitValues(concurrency=9))
    assert await other.limits.write_limit(LimitChange(repaired, 0)) is None
    revision = await other.limits.write_limit(LimitChange(repaired, -1))
    assert replace(repaired, revision=revision or 0) in await other.limits.read_limits()
