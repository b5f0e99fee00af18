"""Dependencies inside the callers' transactions, on every kind of connection."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Context, JobFilter, JobState
from holdfast.core.batches import BatchProgress
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.ids import new_id
from tests.external_tx.kinds import KINDS, Hold, does
from tests.external_tx.support import Place
from tests.external_tx.test_tx_completion_postgres import completes, register, serve


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_job_submitted_in_a_transaction_waits_for_others(place: Place, kind: str) -> None:
    open_one = place.app.sync.enqueue("work", {})
    ended = place.app.sync.enqueue("work", {})
    place.app.sync.cancel(ended.id)
    handles: list[Any] = []

    async def body(held: Any) -> None:
        handles.extend(
            [
                await does(place.app, "enqueue", "work", {"n": "é"}, connection=held.connection, after=after)
                for after in (open_one, Dependency(ended.id, Condition.END), ended)
            ]
        )
        handles.append(await does(place.app, "enqueue", "work", {}, connection=held.connection, after=handles[0]))
        with pytest.raises(Invalid, match="after"):
            await does(place.app, "enqueue", "work", {}, connection=held.connection, after=new_id())

    place.holding(kind, body)

    jobs = [place.app.sync.get(handle.id) for handle in handles]
    assert [job.state for job in jobs] == [JobState.WAITING, JobState.SCHEDULED, JobState.CANCELLED, JobState.WAITING]
    assert jobs[2].error == f"job {ended.id}, for which it waited, is cancelled"
    assert place.both() == (1, 6)
    place.app.sync.cancel(open_one.id)
    assert [place.app.sync.get(handle.id).state for handle in (handles[0], handles[3])] == [JobState.CANCELLED] * 2


def test_batch_is_submitted_and_joined_in_a_transaction(place: Place, kind: str) -> None:
    ended = place.app.sync.enqueue_batch([place.app.draft_job("work", {})])
    [member] = [each.job_id for each in place.app.sync.read_waits(ended.id).dependencies]
    place.app.sync.cancel(member)
    handles: list[Any] = []

    async def body(held: Any) -> None:
        drafts = [place.app.draft_job("work", {"n": n}) for n in range(2)]
        callback = place.app.draft_job("callback", {})
        handles.append(await does(place.app, "enqueue_batch", drafts, on_end=callback, connection=held.connection))
        await does(place.app, "enqueue", "work", {}, connection=held.connection, batch=handles[0].id)
        for refused in (ended.id, member, new_id()):
            with pytest.raises((Invalid, Conflict), match=refused):
                await does(place.app, "enqueue", "work", {}, connection=held.connection, batch=refused)

    place.holding(kind, body)

    assert place.both() == (1, 7)
    batch = handles[0].id
    assert place.app.sync.read_batch(batch) == BatchProgress(members=3, ended=0, failed=0)
    members = [each.job_id for each in place.app.sync.read_waits(batch).dependencies]
    place.app.sync.cancel(JobFilter(tasks=("work",)))
    assert [place.app.sync.get(job_id).state for job_id in members] == [JobState.CANCELLED] * 3
    assert place.app.sync.get(batch).state is JobState.DEAD
    [callback] = [each.job_id for each in place.app.sync.read_waits(batch).dependents]
    assert place.app.sync.get(callback).state is JobState.SCHEDULED


def test_completion_in_a_transaction_decides_with_its_commit(place: Place, kind: str) -> None:
    async def body(context: Context, held: Hold) -> str:
        async with held.savepoint():
            await completes(kind, context, held, 1)
        assert place.execute("select count(*) from SCHEMA.job where state = 4") == [(2,)], "seen before the commit"
        return ""

    work = register(place, kind, body)
    waiting: list[Any] = []

    async def submit() -> Any:
        handle = await work.enqueue()
        waiting.extend(
            [
                await place.app.enqueue("other", {}, after=Dependency(handle.id, on), queue="other")
                for on in (Condition.SUCCESS, Condition.FAILURE)
            ]
        )
        return handle

    handle = serve(place, submit)

    jobs = [place.app.sync.get(each.id) for each in waiting]
    assert jobs[0].state in (JobState.SCHEDULED, JobState.QUEUED)  # the worker makes due jobs of every queue ready
    assert (jobs[1].state, jobs[1].reason) == (JobState.CANCELLED, "dependency")
    assert jobs[1].error == f"job {handle.id}, for which it waited, is succeeded"
    assert sorted(place.execute("select state from SCHEMA.dependency")) == [("failed",), ("met",)]
