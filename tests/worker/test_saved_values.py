"""State, progress and cursors that handlers keep with their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobState, Retry
from holdfast.core.steps import Progress
from tests.worker.stepping import steps_of
from tests.worker.support import harness


@pytest.mark.rows("S48")
async def test_state_is_read_by_the_next_attempt(app: Holdfast) -> None:
    seen: list[Any] = []

    @app.task("work", retry=Retry.fixed(1))
    async def work(context: Context) -> None:
        seen.append(await context.state.read())
        await context.state.save({"page": len(seen)})
        await context.state.save({"page": len(seen), "rows": [1, 2]})
        seen.append(await context.state.read())
        if len(seen) < 4:
            raise RuntimeError

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await work.enqueue()
        await harnessed.run_until_idle()
        assert seen == [None, {"page": 1, "rows": [1, 2]}, {"page": 1, "rows": [1, 2]}, {"page": 3, "rows": [1, 2]}]
        assert (await app.saved_values(handle.id)).state == {"page": 3, "rows": [1, 2]}
        assert await app.steps(handle.id) == []


async def test_state_that_cannot_be_stored_fails_the_attempt(app: Holdfast) -> None:
    @app.task("work", max_attempts=1)
    async def work(context: Context) -> None:
        await context.state.save(object())

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await work.enqueue()
        await harnessed.run_until_idle()
        assert "result" in str((await handle.job()).error)


async def test_values_saved_side_by_side_are_all_written(app: Holdfast) -> None:
    @app.task("work")
    async def work(context: Context) -> None:
        await asyncio.gather(*[context.state.save(n) for n in range(20)], context.progress(1, 1))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await work.enqueue()
        await harnessed.run_until_idle()
        saved = await app.saved_values(handle.id)
        assert (saved.state, saved.progress) == (19, Progress(1, 1))


async def test_progress_is_written_once_a_second_and_at_the_end(app: Holdfast) -> None:
    seen: list[Progress | None] = []

    async with harness(app) as harnessed:

        @app.task("work")
        async def work(context: Context) -> None:
            for n in range(1, 6):
                await context.progress(n, 5, f"page {n}")
                seen.append((await app.saved_values(context.id)).progress)
                await harnessed.clock.sleep(0.6)

        await harnessed.start()
        await work.enqueue()
        await harnessed.run_until_idle()
    assert [None if each is None else each.done for each in seen] == [1, 1, 3, 3, 5]


@pytest.mark.parametrize("numbers", [(-1, None), ("1", 2), (1, -1), (float("nan"), None), (True, 2), (10**400, None)])
async def test_progress_that_is_no_number_is_refused(app: Holdfast, numbers: tuple[Any, Any]) -> None:
    @app.task("work", max_attempts=1)
    async def work(context: Context) -> None:
        await context.progress(*numbers)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await work.enqueue()
        await harnessed.run_until_idle()
        assert "progress" in str((await handle.job()).error)


async def test_loop_goes_on_behind_the_saved_cursor(app: Holdfast) -> None:
    asked: list[int | None] = []
    met: list[int] = []

    async def fetch(after: int | None) -> AsyncIterator[int]:
        asked.append(after)
        for n in range(0 if after is None else after + 1, 25):
            yield n

    @app.task("work", retry=Retry.fixed(1))
    async def work(context: Context) -> str:
        async for row in context.iterate(fetch, cursor=lambda row: row, every=10):
            met.append(row)
            if row == 17 and len(asked) == 1:
                raise RuntimeError
        if len(asked) == 2:
            await context.step("behind", str, 1)
        if len(met) == 26 and len(asked) == 2 and context.claims == 2:
            raise RuntimeError
        return "done"

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await work.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    assert asked == [None, 9]
    assert met == [*range(18), *range(10, 25)]


async def test_step_inside_the_loop_is_refused_and_one_behind_it_is_not(app: Holdfast) -> None:
    @app.task("work", max_attempts=1)
    async def work(context: Context, inside: bool) -> None:
        async for row in context.iterate(lambda after: range(3), cursor=lambda row: row):
            if inside:
                await context.step("no", str, row)
            if row == 1:
                break
        await context.step("yes", str, 1)

    async with harness(app) as harnessed:
        await harnessed.start()
        refused, taken = await work.enqueue(inside=True), await work.enqueue(inside=False)
        await harnessed.run_until_idle()
        assert "the cursor is the record" in str((await refused.job()).error)
        assert await taken.state() is JobState.SUCCEEDED
        assert [each.name for each in await steps_of(app, taken.id)] == ["yes"]


async def test_limit_of_results_does_not_hold_for_the_record_of_calls(app: Holdfast) -> None:
    @app.task("child")
    async def child(number: int) -> int:
        return number

    @app.task("parent")
    async def parent(context: Context) -> int:
        return sum(await context.gather(*[context.call(child, number) for number in range(100)]))

    async with harness(app, result_limit="1KiB") as harnessed:
        await harnessed.start()
        handle = await parent.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == 4950
