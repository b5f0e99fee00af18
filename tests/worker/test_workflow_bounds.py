"""Workflows that cannot be, or are too large: each refusal says what is wrong, and how to go on."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Context, Holdfast, Invalid, JobState
from holdfast.core.ids import new_id
from tests.worker.support import harness


def _ring(app: Holdfast, size: int) -> list[Any]:
    """Drafts of which each waits for the one before it, and the first one for the last."""

    @app.task(f"ring.{size}")
    async def link() -> None: ...

    ids = [new_id() for _ in range(size)]
    return [link.options(id=ids[n], after=ids[n - 1]).new_job() for n in range(size)]


@pytest.mark.parametrize(
    ("size", "shown"),
    [(1, r"JOB → JOB\b"), (3, r"JOB → JOB → JOB → JOB\b"), (10_000, r"(JOB → ){5}\(9995 more\) → JOB\b")],
    ids=["itself", "three", "ten thousand"],
)
async def test_jobs_that_wait_for_each_other_are_refused_whole(app: Holdfast, size: int, shown: str) -> None:
    async with harness(app):
        with pytest.raises(Invalid, match=shown.replace("JOB", "[0-9a-f-]{36}")) as refusal:
            await app.enqueue_many(_ring(app, size), batch_size=10_000)
        assert "let no job wait for itself, nor for one that waits for it" in str(refusal.value)
        assert await app.count() == 0


async def test_batch_of_a_hundred_thousand_members_is_refused_with_the_way_to_load_it(app: Holdfast) -> None:
    @app.task("member")
    async def member() -> None: ...

    async with harness(app):
        with pytest.raises(Invalid, match=r"give up to 10,000; a job of the batch may add .*batch=context.batch_id"):
            await app.enqueue_batch([member.new_job()] * 100_000)
        assert await app.count() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing 1 required keyword-only argument: 'timeout'"),
        ({"timeout": None}, "timeout: None is not valid"),
        ({"timeout": "-1s"}, "timeout: '-1s' is not valid"),
        ({"timeout": "99999d"}, "timeout: '99999d' is not valid"),
    ],
    ids=["none", "None", "negative", "too long"],
)
async def test_wait_without_a_bounded_timeout_is_refused(app: Holdfast, options: dict[str, Any], message: str) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.wait_for("approved", **options)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert job.state is JobState.DEAD
        assert message in str(job.error)


async def test_child_of_a_task_that_no_worker_has_any_more_fails_its_parent(app: Holdfast) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.call(older.task("charge")(_charge))

    async def _charge() -> None: ...

    older = Holdfast(app.settings.url)  # a deploy has taken its task away
    async with harness(app, defer_for="1m") as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        [dependency] = (await app.read_waits(handle.id)).dependencies
        await harnessed.advance(120)
        await harnessed.run_until_idle()
        child, parent = await app.get(dependency.job_id), await handle.job()
        assert (child.state, child.reason) == (JobState.DEAD, "no_handler")
        assert parent.state is JobState.DEAD
        assert "charge" in str(parent.error)
