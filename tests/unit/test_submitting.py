"""Submitting through the application: keys that stand for something else, limits, and streams too long to hold."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast import Holdfast, JobHandle, JobState, chain_jobs
from holdfast.app.submitter import Submitter
from holdfast.core.errors import Conflict, HoldfastError, Invalid, QueueFull, TooLarge, Unavailable
from holdfast.core.ids import new_id
from holdfast.core.limits import Limit
from holdfast.core.models import NewJob, Submitted
from holdfast.stores.base import Store
from holdfast.worker import Worker


def application(folder: Path, **settings: Any) -> Holdfast:
    return Holdfast(f"sqlite:///{folder}/jobs.db", **settings)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Holdfast]:
    app = application(tmp_path)
    yield app
    app.sync.close()


# ── strict idempotency ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Holdfast]:
    app = application(tmp_path, strict_idempotency=True)
    yield app
    app.sync.close()


@pytest.mark.parametrize(
    "other",
    [{"payload": {"n": 2}}, {"task": "rest"}, {"queue": "slow"}],
    ids=["another payload", "another task", "another queue"],
)
def test_conflicting_key_names_the_first_job(strict: Holdfast, other: dict[str, Any]) -> None:
    first = strict.sync.enqueue("work", {"n": 1}, key="k")
    with pytest.raises(Conflict, match=f"'k' already stands for job {first.id}"):
        strict.sync.enqueue(**{"task": "work", "payload": {"n": 1}, "key": "k", **other})
    assert strict.sync.count() == 1


def test_same_key_for_the_same_job_returns_the_first(strict: Holdfast) -> None:
    first = strict.sync.enqueue("work", {"n": 1}, key="k")
    again = strict.sync.enqueue("work", {"n": 1}, key="k", priority=5)
    assert (first.created, again.created, again.id) == (True, False, first.id)


def test_key_without_strictness_returns_its_job_for_any_request(app: Holdfast) -> None:
    first = app.sync.enqueue("work", {"n": 1}, key="k")
    again = app.sync.enqueue("other", {"n": 2}, key="k")
    assert (again.created, again.id) == (False, first.id)


def test_a_conflict_in_a_group_is_the_guilty_callers_alone(strict: Holdfast) -> None:
    async def submit() -> list[Any]:
        async with strict:
            await strict.enqueue("work", {"n": 0}, key="k")
            calls = [strict.enqueue("work", {"n": number}, key="k" if number == 3 else None) for number in range(6)]
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(submit())
    assert [type(answer) is Conflict for answer in answers] == [False, False, False, True, False, False]
    assert strict.sync.count() == 6


@pytest.mark.parametrize("keys", [("a", "k", "b"), ("a", "b", "b")], ids=["against the store", "in the batch"])
def test_a_batch_with_a_conflict_is_refused_whole(strict: Holdfast, keys: tuple[str, ...]) -> None:
    strict.sync.enqueue("work", {"n": -1}, key="k")
    with pytest.raises(Conflict, match="already stands for"):
        strict.sync.enqueue_many([strict.draft_job("work", {"n": n}, key=key) for n, key in enumerate(keys)])
    assert strict.sync.count() == 1


def test_a_batch_may_repeat_its_keys_for_the_same_jobs(strict: Holdfast) -> None:
    jobs = [strict.draft_job("work", {"n": 1}, key="k"), strict.draft_job("work", {"n": 1}, key="k")]
    first, second = strict.sync.enqueue_many(jobs)
    assert (first.created, second.created, second.id) == (True, False, first.id)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_grouped_submitters_fail_together_if_the_store_is_down(app: Holdfast) -> None:
    """One by one, each would wait as long as a store waits for its server, after all those before it."""
    tries: list[None] = []

    async def away() -> Store:
        tries.append(None)
        await asyncio.sleep(0)
        raise Unavailable("the server does not answer")

    async def submit_all() -> list[object]:
        submitter = Submitter(away, lambda: app.settings, app.events, None, app._as_stored)
        jobs = [NewJob(id=new_id(), task="work", payload="{}") for _ in range(20)]
        return await asyncio.gather(*[submitter.submit(job) for job in jobs], return_exceptions=True)

    answers = asyncio.run(submit_all())

    assert [type(answer) for answer in answers] == [Unavailable] * 20
    assert len(tries) == 1


def test_grouped_submitters_do_not_share_individual_errors(app: Holdfast) -> None:
    class Held(Unavailable):
        affects_all = False

    tries: list[None] = []

    async def opened() -> Store:
        tries.append(None)
        await asyncio.sleep(0)
        if len(tries) == 1:
            raise Held("another holds its key")
        return await app.open_store()

    async def submit_all() -> list[object]:
        submitter = Submitter(opened, lambda: app.settings, app.events, None, app._as_stored)
        jobs = [NewJob(id=new_id(), task="work", payload="{}") for _ in range(5)]
        return await asyncio.gather(*[submitter.submit(job) for job in jobs], return_exceptions=True)

    answers = asyncio.run(submit_all())

    assert [type(answer) for answer in answers] == [Held, *[Submitted] * 4]


class NoLimits:
    """The limits of a store that has none."""

    async def read_limits(self) -> list[Limit]:
        return []


class Counting:
    """A store that answers on demand, and knows how many transactions it was given at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.under_way = self.most = 0
        self.queueing = self
        self.limits = NoLimits()

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        self.sizes.append(len(jobs))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        if any(job.task == "defect" for job in jobs):
            raise RuntimeError("unforeseen")
        return [Submitted(job.id, created=True) for job in jobs]


def submitted_together(app: Holdfast, store: Counting, jobs: Sequence[NewJob]) -> list[object]:
    """What each of the submitters hears who come at the same time."""

    async def opened() -> Store:
        return cast("Store", store)

    async def submit_all() -> list[object]:
        submitter = Submitter(opened, lambda: app.settings, app.events, None, app._as_stored)
        calls = [submitter.submit(job) for job in jobs]
        return list(await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60))

    return asyncio.run(submit_all())


@pytest.mark.parametrize(
    ("together", "sizes"), [(1, [1]), (16, [1, 15]), (17, [1, 8, 8]), (102, [1, 51, 50]), (1002, [1, 250, 500, 251])]
)
def test_many_grouped_submitters_use_two_transactions_at_a_time(app: Holdfast, together: int, sizes: list[int]) -> None:
    store = Counting()
    jobs = [NewJob(id=new_id(), task="work", payload="{}") for _ in range(together)]

    answers = submitted_together(app, store, jobs)

    assert answers == [Submitted(job.id, created=True) for job in jobs]
    assert store.sizes == sizes
    assert store.most == (2 if len(sizes) > 2 else 1)


def test_defect_in_a_group_does_not_strand_other_submitters(app: Holdfast) -> None:
    jobs = [NewJob(id=new_id(), task="work", payload="{}") for _ in range(602)]
    jobs[3] = NewJob(id=new_id(), task="defect", payload="{}")

    answers = submitted_together(app, Counting(), jobs)

    assert Counter(type(answer) for answer in answers) == {RuntimeError: 250, Submitted: 352}


def test_partly_stored_group_answers_each_submitter_for_its_job(app: Holdfast) -> None:
    class Half:
        def __init__(self) -> None:
            self.queueing = self
            self.limits = NoLimits()

        async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
            await asyncio.sleep(0)
            if len(jobs) == 1:
                return [Submitted(jobs[0].id, created=True)]
            error = Unavailable("it is full")
            error.stored = [job.id if job.task == "work" else None for job in jobs]
            raise error

    async def opened() -> Store:
        return cast("Store", Half())

    async def submit_all() -> list[object]:
        submitter = Submitter(opened, lambda: app.settings, app.events, None, app._as_stored)
        return await asyncio.gather(*[submitter.submit(job) for job in jobs], return_exceptions=True)

    jobs = [NewJob(id=new_id(), task=task, payload="{}") for task in ("work", "work", "rest", "work")]
    first, second, third, fourth = asyncio.run(submit_all())

    assert [first, second, fourth] == [Submitted(jobs[place].id, created=True) for place in (0, 1, 3)]
    assert isinstance(third, Unavailable)
    assert third.stored == ()


def test_a_submission_asks_for_no_more_attempts_than_the_limit(tmp_path: Path) -> None:
    app = application(tmp_path, max_attempts_limit=7)
    for asked in (8, 0, -1, True, "7"):
        with pytest.raises(Invalid, match=r"max_attempts.*from 1 to 7"):
            app.sync.enqueue("work", max_attempts=asked)
    assert app.sync.count() == 0
    assert app.sync.get(app.sync.enqueue("work", max_attempts=7).id).max_attempts == 7
    assert app.sync.get(app.sync.enqueue("work", max_attempts=None).id).max_attempts is None
    app.sync.close()


def test_a_key_is_no_longer_than_the_limit(tmp_path: Path) -> None:
    app = application(tmp_path, key_limit=10)
    with pytest.raises(TooLarge, match=r"key.*at most 10 characters"):
        app.sync.enqueue("work", key="k" * 11)
    assert app.sync.enqueue("work", key="k" * 10).created
    assert app.sync.count() == 1
    app.sync.close()


def test_payload_limit_applies_to_every_way_of_submitting(tmp_path: Path) -> None:
    app = application(tmp_path, payload_limit="1KiB")

    @app.task("text")
    def text(words: str) -> None: ...

    fits = "w" * (1024 - len('{"words":""}'))
    for submit in (
        lambda: app.sync.enqueue("text", {"words": fits + "w"}),
        lambda: app.sync.enqueue("unregistered", {"words": fits + "w"}),
        lambda: text.sync.enqueue(fits + "w"),
        lambda: text.options(priority=1).sync.enqueue(fits + "w"),
        lambda: text.new_job(fits + "w"),
        lambda: app.draft_job("text", '{"words":"' + fits + 'w"}'),
    ):
        with pytest.raises(TooLarge, match="payload"):
            submit()
    assert app.sync.count() == 0
    assert text.sync.enqueue(fits).created
    app.sync.close()


def test_a_result_is_no_longer_than_the_limit(tmp_path: Path) -> None:
    app = application(tmp_path, result_limit="1KiB")

    @app.task("grow")
    async def grow(size: int) -> str:
        return "r" * size

    async def run() -> list[tuple[JobState, str | None]]:
        async with app:
            handles = [await grow.enqueue(1022), await grow.enqueue(1023)]
            async with asyncio.timeout(60):
                await Worker(app, drain=True).run()
            return [((job := await handle.job()).state, job.reason) for handle in handles]

    assert asyncio.run(run()) == [(JobState.SUCCEEDED, None), (JobState.DEAD, "result")]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [(Unavailable, [3]), (Unavailable, []), (QueueFull, [])],
    ids=["a part of it is stored", "nothing of it is stored", "it is refused"],
)
def test_failed_batch_tells_what_earlier_ones_have_stored(
    app: Holdfast, kind: type[HoldfastError], parts: list[int]
) -> None:
    class Full:
        def __init__(self) -> None:
            self.queueing = self
            self.limits = NoLimits()

        async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
            await asyncio.sleep(0)
            if jobs[0] is drafts[0]:
                return [Submitted(job.id, created=job.key is None) for job in jobs]
            error = kind("it is full")
            error.stored = [job.id if number in parts else None for number, job in enumerate(jobs)] if parts else ()
            raise error

    async def opened() -> Store:
        return cast("Store", Full())

    drafts = [app.draft_job("work", {}, key="k" if number == 2 else None) for number in range(12)]
    submitter = Submitter(opened, lambda: app.settings, app.events, None, app._as_stored)
    with pytest.raises(kind) as error:
        asyncio.run(submitter.submit_many(drafts, 5))
    assert [number for number, job_id in enumerate(error.value.stored) if job_id] == [0, 1, 3, 4, *[8 for _ in parts]]
    assert len(error.value.stored) == 10
    assert all(job_id in (None, job.id) for job_id, job in zip(error.value.stored, drafts, strict=False))


def test_error_of_the_source_tells_what_earlier_batches_have_stored(app: Holdfast) -> None:
    def drafts() -> Iterator[NewJob]:
        yield from (app.draft_job("work", {"n": number}) for number in range(7))
        yield app.draft_job("work", {}, max_attempts=0)

    async def submit() -> int:
        async with app:
            with pytest.raises(Invalid, match="max_attempts") as error:
                await app.enqueue_many(drafts(), batch_size=3)
            return len([job_id for job_id in error.value.stored if job_id])

    assert asyncio.run(submit()) == 6


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
def endless(app: Holdfast, drawn: list[int]) -> Iterator[NewJob]:
    for number in itertools.count():
        drawn.append(number)
        yield app.draft_job("work", {"n": number})


def test_endless_generator_is_stored_batch_by_batch(app: Holdfast) -> None:
    drawn: list[int] = []

    async def stream() -> None:
        async with app:
            batches = 0
            async for handles in app.enqueue_stream(endless(app, drawn), batch_size=10):
                batches += 1
                assert [handle.created for handle in handles] == [True] * 10
                assert len(drawn) == await app.count() == 10 * batches
                if batches == 3:
                    return

    asyncio.run(stream())
    assert len(drawn) == 30


def test_an_async_iterable_is_stored_in_its_order(app: Holdfast) -> None:
    async def rows() -> AsyncIterator[NewJob]:
        for number in range(25):
            await asyncio.sleep(0)
            yield app.draft_job("work", {"n": number})

    async def store() -> tuple[list[int], list[str]]:
        async with app:
            sizes = [len(handles) async for handles in app.enqueue_stream(rows(), batch_size=10)]
            handles = await app.enqueue_many(rows(), batch_size=7)
            return sizes, [(await handle.job()).payload for handle in handles]

    sizes, payloads = asyncio.run(store())
    assert sizes == [10, 10, 5]
    assert payloads == [f'{{"n":{number}}}' for number in range(25)]


def test_async_iterable_is_refused_where_no_event_loop_runs(app: Holdfast, tmp_path: Path) -> None:
    async def rows() -> AsyncIterator[NewJob]:
        await asyncio.sleep(0)
        yield app.draft_job("work", {})

    app.sync.count()
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as held:
        for connection in (None, held):
            with pytest.raises(Invalid, match=r"^jobs: <async_generator .* is not valid; give a list of drafted jobs"):
                app.sync.enqueue_many(rows(), connection=connection)
    assert app.sync.count() == 0


def failing(app: Holdfast) -> Iterator[NewJob]:
    for number in range(25):
        yield app.draft_job("work", {"n": number}, priority=0 if number < 15 else 1000)


def test_failing_item_keeps_earlier_batches_and_drops_its_own(app: Holdfast) -> None:
    stored: list[str] = []

    async def stream() -> None:
        async with app:
            async for handles in app.enqueue_stream(failing(app), batch_size=10):
                stored.extend(handle.id for handle in handles)

    with pytest.raises(Invalid, match="priority"):
        asyncio.run(stream())
    assert len(stored) == app.sync.count() == 10
    with pytest.raises(Invalid, match="priority"):
        app.sync.enqueue_many(failing(app), batch_size=4)
    assert app.sync.count() == 22


def test_job_refused_by_the_store_fails_its_whole_batch(app: Holdfast) -> None:
    def jobs() -> Iterator[NewJob]:
        for number in range(9):
            bad = NewJob(id=f"id-{number}", task="work", payload='"\ud800"')
            yield bad if number == 7 else app.draft_job("work", {"n": number})

    with pytest.raises(Invalid, match="surrogate"):
        app.sync.enqueue_many(jobs(), batch_size=5)
    assert app.sync.count() == 5


def keyed_chain(app: Holdfast, length: int) -> list[NewJob]:
    return chain_jobs(*[app.draft_job("work", {"n": number}, key=f"k{number}") for number in range(length)])


async def waits_of(app: Holdfast, handles: Sequence[JobHandle[Any]]) -> list[list[str]]:
    return [[each.job_id for each in (await app.read_waits(handle.id)).dependencies] for handle in handles]


@pytest.mark.parametrize("way", ["list", "stream"])
def test_keyed_chain_that_was_cut_off_is_completed_by_repeating_it(app: Holdfast, way: str) -> None:
    async def store() -> None:
        async with app:
            known = await app.enqueue_many(keyed_chain(app, 10), batch_size=5)
            if way == "list":
                handles = await app.enqueue_many(keyed_chain(app, 17), batch_size=5)
            else:
                stream = app.enqueue_stream(keyed_chain(app, 17), batch_size=5)
                handles = [handle async for batch in stream for handle in batch]
            assert [handle.id for handle in handles[:10]] == [handle.id for handle in known]
            assert [handle.created for handle in handles] == [False] * 10 + [True] * 7
            assert await waits_of(app, handles) == [[], *[[handle.id] for handle in handles[:-1]]]

    asyncio.run(store())


@pytest.mark.parametrize("size", [0, -1, 10_001])
def test_a_batch_has_bounds(app: Holdfast, size: int) -> None:
    with pytest.raises(Invalid, match="batch"):
        app.sync.enqueue_many([], batch_size=size)


# ── options of a job ──────────────────────────────────────────────────────────────────────────────────────
def test_a_text_is_not_taken_for_a_list_of_tags(app: Holdfast) -> None:
    @app.task("work", tags=["season"])
    def work() -> None: ...

    for submit in (
        lambda: work.options(tags="spring").new_job(),  # type: ignore[arg-type]  # the mistake that is meant
        lambda: app.sync.enqueue("work", tags="spring"),
        lambda: app.task("other", tags="spring"),
    ):
        with pytest.raises(Invalid, match=r"tags: 'spring' is not valid; give a list of tags: \['spring'\]"):
            submit()
    assert app.sync.count() == 0


def test_spans_accept_the_formats_of_settings(app: Holdfast) -> None:
    @app.task("work", timeout="5m")
    def work() -> None: ...

    job = work.options(delay="90s", key="k", key_for="2h", timeout="500ms").new_job()
    assert (job.delay, job.key_for) == (timedelta(seconds=90), timedelta(hours=2))
    assert job.options is not None
    assert (work.timeout, job.options.timeout) == (300, 0.5)
    with pytest.raises(Invalid, match="delay: '5' is not valid; give seconds as a number"):
        work.options(delay="5").new_job()
    with pytest.raises(Invalid, match=r'delay: .* write a number of seconds, or a span such as "30s"'):
        work.options(delay="5x").new_job()


def test_complete_message_hides_the_underlying_errors(app: Holdfast) -> None:
    @app.task("work")
    def work(n: int) -> None: ...

    for mistake in (
        lambda: work.new_job("1"),  # type: ignore[arg-type]  # the mistake that is meant
        lambda: app.draft_job("work", {"n": "1"}),
        lambda: work.options(delay="5x").new_job(1),
        lambda: work.options(delay=1e300).new_job(1),
        lambda: work.options(retry="fixed:5x").new_job(1),
    ):
        with pytest.raises(Invalid) as caught:
            mistake()
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
