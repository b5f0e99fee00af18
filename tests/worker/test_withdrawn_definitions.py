"""Removal of schedules and limits that the code no longer declares, while another writer changes them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast.core.limits import LimitChange
from holdfast.core.schedule import ScheduleChange


def outrun(monkeypatch: pytest.MonkeyPatch, family: Any, verb: str, earlier: Any) -> None:
    """Let another writer make a change just before this family of a store removes something."""
    write, left = getattr(type(family), verb), [earlier]

    async def outrun_write(own: Any, change: Any) -> Any:
        while change.remove and left:
            assert await write(own, left.pop()) is not None
        return await write(own, change)

    monkeypatch.setattr(type(family), verb, outrun_write)


async def reconcile(home: str, monkeypatch: pytest.MonkeyPatch, owner: str | None, *, remove: bool) -> list[str | None]:
    """Starts a worker whose code declares neither a schedule nor a limit of the store any more, while another writer
    gives both a new owner, or removes them. Returns the owners of those that are left."""
    async with Holdfast(home, schedule_owner="shop") as app:
        store = await app.open_store()
        schedule = await app.schedules.add("old", app.draft_job("tick", {}), cron="* * * * *")
        limit = await app.limits.add("old", queue="other", concurrency=1)
        schedule, limit = replace(schedule, owner="shop"), replace(limit, owner="shop")
        schedule_revision = await store.schedules.write_schedule(ScheduleChange(schedule, schedule.revision))
        limit_revision = await store.limits.write_limit(LimitChange(limit, limit.revision))
        assert schedule_revision is not None
        assert limit_revision is not None
        fired = ScheduleChange(replace(schedule, runs=1, owner=owner), schedule_revision, remove=remove)
        changed = LimitChange(replace(limit, owner=owner), limit_revision, remove=remove)
        outrun(monkeypatch, store.schedules, "write_schedule", fired)
        outrun(monkeypatch, store.limits, "write_limit", changed)
        await app.schedules.reconcile({})
        await app.limits.reconcile({})
        return [each.owner for each in (*await app.schedules.find_all(), *await app.limits.find_all())]


async def test_definition_that_another_writer_changes_meanwhile_is_removed(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await reconcile(home, monkeypatch, "shop", remove=False) == []


async def test_definition_that_another_owner_takes_meanwhile_stays(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await reconcile(home, monkeypatch, "billing", remove=False) == ["billing", "billing"]


async def test_definition_that_another_worker_removes_meanwhile_is_gone(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await reconcile(home, monkeypatch, "shop", remove=True) == []
