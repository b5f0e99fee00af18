"""Batches, as applications submit them and workers end them, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast import Conflict, Context, Holdfast, Invalid, JobFailed, JobState
from holdfast.core.errors import NotFound
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter
from holdfast.views.explain import explain_job, job_facts
from tests.worker.support import harness


@dataclass
class Tasks:
    """Tasks of a batch: members that succeed, or fail if their names say so, and callbacks that note their names."""

    app: Holdfast
    done: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        @self.app.task("member", max_attempts=1)
        async def member(name: str) -> None:
            if name in self.failing:
                raise ValueError(name)
            self.done.append(name)

        @self.app.task("callback")
        async def callback(name: str) -> None:
            self.done.append(name)

        self.member, self.callback = member, callback

    def callbacks(self) -> dict[str, Any]:
        names = ("on_success", "on_failure", "on_end")
        return {name: self.callback.new_job(name) for name in names}

    def members(self, *names: str) -> list[Any]:
        return [self.member.new_job(name) for name in names]


async def progress_of(app: Holdfast, job_id: str) -> tuple[int, int, int]:
    found = await app.read_batch(job_id)
    return found.members, found.ended, found.failed


async def test_batch_that_succeeds_runs_the_callbacks_for_it(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app) as harnessed:
        batch = await app.enqueue_batch(tasks.members("a", "b"), **tasks.callbacks(), tags=["spring"])
        assert batch.created
        assert await progress_of(app, batch.id) == (2, 0, 0)
        await harnessed.start()
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["a", "b", "on_end", "on_success"]
        assert await batch.result(timeout=0) == {"members": 2}
        job = await batch.job()
        assert (job.task, job.options_or_default.tags, job.queue) == ("holdfast.batch", ("spring",), "default")
        assert await progress_of(app, batch.id) == (2, 2, 0)


async def test_batch_that_fails_goes_on_after_a_replay_of_its_dead_job(app: Holdfast) -> None:
    tasks = Tasks(app, failing={"b"})
    async with harness(app) as harnessed:
        batch = await app.enqueue_batch(tasks.members("a", "b", "c"), **tasks.callbacks())
        await harnessed.start()
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["a", "c", "on_end", "on_failure"]
        with pytest.raises(JobFailed, match="1 of 3 jobs of the batch have failed"):
            await batch.result(timeout=0)
        with pytest.raises(Conflict, match="it is a batch; replay its jobs"):
            await app.replay_one(batch.id)
        tasks.failing.clear()
        [dead] = (await app.find(JobFilter(states=(JobState.DEAD,), tasks=("member",)))).jobs
        await app.replay_one(dead.id)
        assert await batch.state() is JobState.WAITING
        await harnessed.run_until_idle()
        assert tasks.done[-2:] == ["b", "on_success"]
        assert sorted(tasks.done) == ["a", "b", "c", "on_end", "on_failure", "on_success"]
        assert await batch.state() is JobState.SUCCEEDED


async def test_job_of_a_batch_adds_further_ones(app: Holdfast) -> None:
    tasks = Tasks(app)

    @app.task("load")
    async def load(context: Context, pages: int) -> None:
        assert context.batch_id is not None
        await app.enqueue_many([tasks.member.options(batch=context.batch_id).new_job(str(n)) for n in range(pages)])

    async with harness(app) as harnessed:
        batch = await app.enqueue_batch([load.new_job(3)], on_success=[tasks.callback.new_job("done")])
        await harnessed.start()
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["0", "1", "2", "done"]
        assert tasks.done[-1] == "done"
        assert await progress_of(app, batch.id) == (4, 4, 0)


async def test_batch_with_an_id_is_submitted_again_harmlessly(app: Holdfast) -> None:
    tasks, batch_id = Tasks(app), new_id()
    async with harness(app) as harnessed:
        for number in range(2):
            batch = await app.enqueue_batch(tasks.members("a", "b"), **tasks.callbacks(), id=batch_id)
            assert (batch.id, batch.created) == (batch_id, number == 0)
        await harnessed.start()
        await harnessed.run_until_idle()
        again = await app.enqueue_batch(tasks.members("a", "b"), **tasks.callbacks(), id=batch_id)
        assert not again.created
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["a", "b", "on_end", "on_success"]


async def test_repeated_batch_with_further_jobs_stores_all_of_them(app: Holdfast) -> None:
    tasks, batch_id = Tasks(app), new_id()
    async with harness(app) as harnessed:
        await app.enqueue_batch(tasks.members("a"), on_success=tasks.callback.new_job("success"), id=batch_id)
        callbacks = {"on_success": tasks.callback.new_job("success"), "on_end": tasks.callback.new_job("end")}
        await app.enqueue_batch(tasks.members("a", "b"), **callbacks, id=batch_id)
        assert await progress_of(app, batch_id) == (2, 0, 0)
        await harnessed.start()
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["a", "b", "end", "success"]
        with pytest.raises(Conflict, match=f"batch {batch_id} has ended"):
            await app.enqueue_batch(tasks.members("a", "b", "c"), **callbacks, id=batch_id)
        assert await app.count() == 5


async def test_batch_within_a_batch(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app) as harnessed:
        outer = await app.enqueue_batch(tasks.members("a"), on_success=tasks.callback.new_job("outer"))
        inner = await app.enqueue_batch(
            tasks.members("b"), on_success=tasks.callback.new_job("inner"), batch=outer, queue="elsewhere"
        )
        assert await progress_of(app, outer.id) == (2, 0, 0)
        await harnessed.start()
        await harnessed.run_until_idle()
        assert sorted(tasks.done) == ["a", "b", "inner", "outer"]
        assert [await each.state() for each in (outer, inner)] == [JobState.SUCCEEDED] * 2


async def test_why_names_the_failed_jobs_of_a_batch(app: Holdfast) -> None:
    tasks = Tasks(app, failing={"b"})
    async with harness(app) as harnessed:
        batch = await app.enqueue_batch(tasks.members("a", "b"), on_success=tasks.callback.new_job("done"))
        await harnessed.start()
        await harnessed.run_until_idle()
        [dead] = (await app.find(JobFilter(states=(JobState.DEAD,), tasks=("member",)))).jobs
        [callback] = (await app.find(JobFilter(tasks=("callback",)))).jobs
        remedies = {}
        for job in (await batch.job(), callback):
            [first, *_] = explain_job(job, await job_facts(app, job))
            remedies[job.id] = first.remedy
        assert remedies[batch.id].endswith(f"holdfast replay {dead.id}")
        assert remedies[callback.id].endswith(f"holdfast why {batch.id}")
        with pytest.raises(Conflict, match="edit its jobs"):
            await app.edit(batch.id, priority=5)


async def test_drafts_of_a_batch_with_an_id_may_wait_for_each_other(app: Holdfast) -> None:
    tasks, batch_id = Tasks(app), new_id()
    first = tasks.member.new_job("first")
    second = tasks.member.options(after=first).new_job("second")
    async with harness(app) as harnessed:
        for _ in range(2):
            await app.enqueue_batch([first, second], on_end=tasks.callback.new_job("end"), id=batch_id)
        assert await progress_of(app, batch_id) == (2, 0, 0)
        await harnessed.start()
        await harnessed.run_until_idle()
        assert tasks.done == ["first", "second", "end"]


async def test_batch_that_cannot_be_is_refused_whole(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app):
        [outside] = tasks.members("x")
        with pytest.raises(Invalid, match="give at least one"):
            await app.enqueue_batch([])
        with pytest.raises(Invalid, match="a job of the batch may add further ones"):
            await app.enqueue_batch([outside] * 10_001)
        with pytest.raises(Invalid, match="give drafted jobs"):
            await app.enqueue_batch(["x"])  # type: ignore[list-item]
        given: Any
        for given in (None, 5, outside):
            with pytest.raises(Invalid, match=r"^jobs: .* is not valid; give a list of drafted jobs"):
                await app.enqueue_batch(given)
        with pytest.raises(Invalid, match=r"^jobs\[1\]\.batch: .* in no batch yet"):
            await app.enqueue_batch([outside, tasks.member.options(batch=new_id()).new_job("x")])
        with pytest.raises(Invalid, match=r"^id: .*give a UUID"):
            await app.enqueue_batch([outside], id="mine")
        with pytest.raises(Invalid, match=r"on_failure.*give drafted jobs"):
            await app.enqueue_batch([outside], on_failure=tasks.callback)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match=r"on_end.*give drafted jobs"):
            await app.enqueue_batch([outside], on_end="x")  # type: ignore[arg-type]
        for task, remedy in {"batch": "submit a batch with its jobs", "faults": "switch", "alerts": "rules"}.items():
            with pytest.raises(Invalid, match=remedy):
                await app.enqueue(f"holdfast.{task}", {})
        with pytest.raises(Invalid, match="tags"):
            await app.enqueue_batch([outside], tags="spring")
        assert await app.count() == 0


@pytest.mark.parametrize("given", ["a member", "another callback", "the same callback"])
async def test_callback_with_the_id_of_another_job_of_its_batch_is_refused(app: Holdfast, given: str) -> None:
    """The store would take it for that job, and it would never run."""
    tasks, own = Tasks(app), new_id()
    callback = tasks.callback.options(id=own).new_job("end")
    member = tasks.member.options(id=own if given == "a member" else None).new_job("a")
    others = {"another callback": tasks.callback.options(id=own).new_job("success"), "the same callback": callback}
    async with harness(app):
        for batch_id in (None, new_id()):
            with pytest.raises(
                Invalid, match=rf"^on_end: '{own}' is that of another job of the batch; give each callback"
            ):
                await app.enqueue_batch([member], on_success=others.get(given, ()), on_end=callback, id=batch_id)
        assert await app.count() == 0
        keyed = tasks.callback.options(key="done").new_job("end")
        with pytest.raises(Invalid, match=r"^on_failure: 'done' is that of another job of the batch"):
            await app.enqueue_batch([tasks.member.new_job("a")], on_success=keyed, on_failure=keyed)
        assert await app.count() == 0
        twice = tasks.callback.new_job("twice")
        await app.enqueue_batch([member], on_success=twice, on_end=twice)
        assert await app.count() == 4


async def test_job_joins_no_batch_that_is_none_or_has_ended(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app) as harnessed:
        batch = await app.enqueue_batch(tasks.members("a"))
        await harnessed.start()
        await harnessed.run_until_idle()
        with pytest.raises(Conflict, match=f"batch {batch.id} has ended"):
            await tasks.member.options(batch=batch).enqueue("late")
        [plain] = await app.enqueue_many(tasks.members("b"))
        for no_batch in (plain.id, new_id()):
            with pytest.raises(Invalid, match=f"batch.*{no_batch}"):
                await tasks.member.options(batch=no_batch).enqueue("lost")
        with pytest.raises(Invalid, match="give a batch: its id or handle"):
            tasks.member.options(batch="mine")
        with pytest.raises(NotFound, match="there is no batch"):
            await app.read_batch(plain.id)


async def test_batch_of_many_jobs_is_counted_without_looking_at_them(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app):
        batch = await app.enqueue_batch(tasks.members(*map(str, range(500))))
        assert await progress_of(app, batch.id) == (500, 0, 0)
        await app.cancel(JobFilter(tasks=("member",)))
        assert await progress_of(app, batch.id) == (500, 500, 500)
        assert await batch.state() is JobState.DEAD


async def test_same_draft_stands_for_a_callback_of_each_condition(app: Holdfast) -> None:
    tasks = Tasks(app, failing={"a"})
    async with harness(app) as harnessed:
        notify = tasks.callback.new_job("notify")
        await app.enqueue_batch(tasks.members("a"), on_success=notify, on_failure=notify)
        await harnessed.start()
        await harnessed.run_until_idle()
        assert tasks.done == ["notify"]


async def test_member_cannot_wait_for_its_own_batch(app: Holdfast) -> None:
    tasks = Tasks(app)
    async with harness(app):
        batch_id = new_id()
        inside = tasks.callback.options(batch=batch_id).new_job("inside")
        waiting = tasks.member.options(after=batch_id).new_job("a")
        for jobs, callbacks in (([waiting], ()), (tasks.members("a"), inside)):
            with pytest.raises(Invalid, match="ends after it"):
                await app.enqueue_batch(jobs, on_end=callbacks, id=batch_id)
        with pytest.raises(Invalid, match="ends after it"):
            tasks.member.options(batch=batch_id, after=batch_id).new_job("a")


@pytest.mark.parametrize("given", [None, "callback", 5, [None]])
async def test_callback_that_is_no_draft_is_refused(app: Holdfast, given: Any) -> None:
    tasks = Tasks(app)
    async with harness(app):
        with pytest.raises(Invalid, match="on_success"):
            await app.enqueue_batch(tasks.members("a"), on_success=given)
