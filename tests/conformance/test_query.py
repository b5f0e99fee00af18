"""Family query: filters, keyset pages, counts, queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Dependency
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobFilter, JobState, Options, Reason, to_datetime
from holdfast.stores.base import Store
from holdfast.stores.common import searches
from holdfast.stores.redis import query as redis_query
from tests.conformance.support import MINUTE, ended, ending, lose, new_job, put, queues, running, settle, stored, take

HOUR = timedelta(hours=1)


async def every_page(store: Store, where: JobFilter, limit: int) -> list[Job]:
    jobs: list[Job] = []
    cursor = None
    while True:
        page = await store.query.find(where, limit=limit, cursor=cursor)
        assert len(page.jobs) <= limit
        jobs += page.jobs
        if page.cursor is None:
            return jobs
        cursor = page.cursor


async def found(store: Store, **where: object) -> set[str]:
    """Ids matching the filter; ``count`` has to agree."""
    filtered = JobFilter(**where)  # type: ignore[arg-type]  # the tests' own keywords
    ids = {job.id for job in await every_page(store, filtered, 2)}
    assert await store.query.count(filtered) == len(ids)
    return ids


async def test_an_unknown_job_is_none(store: Store) -> None:
    assert await store.query.get(new_id()) is None
    assert await store.query.get("no id at all") is None
    assert await store.query.by_key("nobody") is None


async def test_outlines_are_jobs_without_what_may_be_large(store: Store, clock: ManualClock) -> None:
    job = await running(store, payload='{"a":"' + "x" * 1000 + '"}', key="k", options=Options(timeout=5.0, tags=("t",)))
    await store.admin.cancel([job.id])
    dead = await ended(store, JobState.DEAD)
    whole = await stored(store, job.id)

    asked = [dead, new_id(), job.id, "no id at all", job.id]
    first, unknown, second, nobody, again = await store.query.summaries(asked)

    assert (unknown, nobody) == (None, None)
    assert first is not None
    assert (first.state, first.error) == (JobState.DEAD, (await stored(store, dead)).error)
    assert second == again == msgspec.structs.replace(whole, payload="{}", key=None)
    assert await store.query.summaries([]) == []


async def test_states_may_be_given_as_plain_text(store: Store, clock: ManualClock) -> None:
    dead = await ended(store, JobState.DEAD)
    text: Any = "dead"
    where = JobFilter(states=(text,))
    assert [job.id for job in (await store.query.find(where, limit=10)).jobs] == [dead]
    assert await store.query.count(where) == 1


async def test_filters_match_what_they_say(store: Store, clock: ManualClock) -> None:
    queued, tagged = await put(
        store, new_job("a"), new_job("b", queue="other", options=Options(tags=("red", "two words")))
    )
    clock.advance(10)
    dead = await ended(store, JobState.DEAD, task="c", options=Options(tags=("redder",)))
    alive = await running(store, task="c")

    assert await found(store) == {queued, tagged, dead, alive.id}
    assert await found(store, states=(JobState.QUEUED,)) == {queued, tagged}
    assert await found(store, states=(JobState.DEAD, JobState.RUNNING)) == {dead, alive.id}
    assert await found(store, states=(JobState.WAITING,)) == set()
    assert await found(store, queue="other") == {tagged}
    assert await found(store, tasks=("a",)) == {queued}
    assert await found(store, tasks=("a", "c", "nothing")) == {queued, dead, alive.id}
    assert await found(store, tag="red") == {tagged}
    assert await found(store, tag="two words") == {tagged}
    assert await found(store, tag="two") == set()
    assert await found(store, tag="redder", states=(JobState.DEAD,)) == {dead}
    assert await found(store, tag="red", states=(JobState.DEAD,)) == set()
    assert await found(store, reason="error") == {dead}
    assert await found(store, worker="worker-1", states=(JobState.RUNNING,)) == {alive.id}
    assert await found(store, worker="worker-2") == set()
    assert await found(store, tasks=("c",), states=(JobState.DEAD,), queue="default") == {dead}
    assert await found(store, tasks=("c",), states=(JobState.DEAD,), queue="other") == set()


@pytest.mark.parametrize("where", [JobFilter(), JobFilter(tasks=("work",))], ids=["simple", "looked for"])
async def test_jobs_are_counted_up_to_a_number(store: Store, where: JobFilter) -> None:
    await put(store, *[new_job() for _ in range(3)])
    for state in (JobState.DEAD, JobState.DEAD, JobState.CANCELLED):
        await ended(store, state, priority=1)
    over = msgspec.structs.replace(where, states=(JobState.DEAD, JobState.CANCELLED))

    counts = [await store.query.count(each, limit=limit) for each in (where, over) for limit in (1, 2, 7, None)]

    assert counts == [1, 2, 6, 6, 1, 2, 3, 3]


async def test_filters_by_time_leave_out_the_instant_itself(store: Store, clock: ManualClock) -> None:
    ids, instants = [], []
    for _ in range(5):
        ids += await put(store)
        instants.append(clock())
        clock.advance(1)

    assert await found(store, created_after=to_datetime(instants[1])) == set(ids[2:])
    assert await found(store, created_before=to_datetime(instants[3])) == set(ids[:3])
    assert await found(store, created_after=to_datetime(instants[0]), created_before=to_datetime(instants[2])) == {
        ids[1]
    }


async def test_jobs_that_have_not_started_after_an_instant_are_found(store: Store, clock: ManualClock) -> None:
    before = await ended(store, JobState.DEAD)
    (never,) = await put(store, new_job(delay=timedelta(hours=1)))
    instant = to_datetime(clock())
    clock.advance(1)
    await running(store)

    assert await found(store, not_started_after=instant) == {before, never}
    assert await found(store, not_started_after=instant, states=(JobState.DEAD,)) == {before}
    assert await store.query.count(JobFilter(not_started_after=instant)) == 2


@pytest.mark.parametrize("piece", ["%", "_", "a%b", "\\", "'", "ÜBER", "x\0y", "[abc]*"])
async def test_a_piece_of_the_error_is_matched_literally(store: Store, piece: str) -> None:
    async def dead_of(error: str) -> str:
        job = await running(store)
        await settle(store, job, JobState.DEAD, error=error, reason=Reason.ERROR)
        return job.id

    hit = await dead_of(f"before {piece} after")
    await dead_of("before a-b after")

    assert await found(store, error=piece) == {hit}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_are_newest_first_and_complete(store: Store, clock: ManualClock, limit: int) -> None:
    ids: list[str] = []
    for n in range(4):
        ids += await put(store, *[new_job() for _ in range(n + 1)])
        clock.advance(n % 2)

    assert [job.id for job in await every_page(store, JobFilter(), limit)] == ids[::-1]
    assert [job.id for job in await every_page(store, JobFilter(states=(JobState.QUEUED,)), limit)] == ids[::-1]


async def test_a_full_last_page_says_that_was_all(store: Store) -> None:
    await put(store, *[new_job() for _ in range(4)])

    first = await store.query.find(JobFilter(), limit=2)
    assert first.cursor is not None
    second = await store.query.find(JobFilter(), limit=2, cursor=first.cursor)

    assert len(second.jobs) == 2
    assert second.cursor is None


async def test_pages_are_stable_while_jobs_are_added_and_deleted(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job() for _ in range(10)])
    first = await store.query.find(JobFilter(), limit=4)
    await put(store, *[new_job() for _ in range(5)])
    clock.advance(1)
    await put(store)
    await store.admin.delete([first.jobs[-1].id, ids[0]])

    rest: list[str] = []
    cursor = first.cursor
    while cursor is not None:
        page = await store.query.find(JobFilter(), limit=4, cursor=cursor)
        rest += [job.id for job in page.jobs]
        cursor = page.cursor

    assert [job.id for job in first.jobs] == ids[:5:-1]
    assert rest == ids[5:0:-1]


async def test_a_page_without_time_ends_with_a_cursor_and_no_match_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searches, "FIRST_PART", 3)
    for size in ("_PART", "_SCANNED"):
        monkeypatch.setattr(redis_query, size, 3)
    queues = ["rare" if number % 8 == 5 else "default" for number in range(20)]
    ids = await put(store, *[new_job(queue=queue) for queue in queues])
    for queue in ("rare", "none"):
        where = JobFilter(queue=queue)
        expected = [job_id for job_id, name in reversed([*zip(ids, queues, strict=True)]) if name == queue]
        for limit in (1, 2, 50):
            found, numbers = await _pages_without_time(store, where, limit)
            assert found == expected, (queue, limit)
            assert numbers.count(0) > 2, (queue, limit)
    for states in ((), (JobState.QUEUED,), (JobState.QUEUED, JobState.SUCCEEDED)):
        whole, _ = await _pages_without_time(store, JobFilter(states=states), 50)
        assert whole == ids[::-1]


async def _pages_without_time(store: Store, where: JobFilter, limit: int) -> tuple[list[str], list[int]]:
    """Ids of matching jobs by pages that may take no time, and the number of each page."""
    found: list[str] = []
    numbers: list[int] = []
    cursor = None
    while not numbers or cursor is not None:
        page = await store.query.find(where, limit=limit, cursor=cursor, seconds=0.0)
        found += [job.id for job in page.jobs]
        numbers.append(len(page.jobs))
        cursor = page.cursor
    return found, numbers


async def test_a_page_of_an_empty_store_is_empty(store: Store) -> None:
    page = await store.query.find(JobFilter())

    assert (page.jobs, page.cursor) == ([], None)
    assert await store.query.count(JobFilter()) == 0


@pytest.mark.parametrize("cursor", ["", "x", "☃", "-1", "9" * 400, "a:b:c", "' OR 1=1 --", "\0"])
async def test_a_broken_cursor_is_refused(store: Store, cursor: str) -> None:
    await put(store)

    with pytest.raises(Invalid) as caught:
        await store.query.find(JobFilter(), cursor=cursor)

    assert caught.value.field == "cursor"


async def test_texts_that_cannot_be_stored_match_nothing_or_are_refused(store: Store) -> None:
    """A terminal or a URL can hand over lone surrogates; the driver's own complaint is no answer."""
    await put(store)
    bad = "\ud800"
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.query.get(bad),
        lambda: store.query.by_key(bad),
        lambda: store.query.by_keys(["a", bad]),
        lambda: store.query.find(JobFilter(queue=bad)),
        lambda: store.query.count(JobFilter(tasks=(bad,))),
        lambda: store.admin.cancel([bad]),
        lambda: store.admin.delete(JobFilter(error=bad)),
        lambda: store.admin.pause(bad),
    ]

    for call in calls:
        with suppress(HoldfastError):
            await call()
    assert await store.query.count(JobFilter(states=(JobState.QUEUED,))) == 1


async def test_a_listed_job_is_the_job(store: Store) -> None:
    await ended(store, JobState.DEAD, key="k", options=Options(tags=("t",)), priority=4)
    (listed,) = (await store.query.find(JobFilter())).jobs

    assert listed == await store.query.get(listed.id) == await store.query.by_key("k")
    assert (listed.key, listed.state, listed.options_or_default.tags) == ("k", JobState.DEAD, ("t",))


async def test_the_states_of_the_queues_sum_to_the_jobs_accepted(store: Store) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED):
        await ended(store, state, queue="b")
    await put(store, new_job(queue="a"), new_job(queue="a"), new_job(queue="a", delay=HOUR))
    await take(store, 1, {"a": 1})

    infos = await queues(store)

    assert [info.name for info in infos] == ["a", "b"]
    states = {info.name: {state: n for state, n in info.states.items() if n} for info in infos}
    assert states == {
        "a": {"queued": 1, "running": 1, "scheduled": 1},
        "b": {"succeeded": 1, "dead": 1, "cancelled": 1, "failed": 1},
    }
    assert sum(sum(info.states.values()) for info in infos) == await store.query.count(JobFilter()) == 7


async def test_a_glance_sees_what_goes_on_in_every_queue(store: Store, clock: ManualClock) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.DEAD, JobState.CANCELLED, JobState.FAILED):
        await ended(store, state, queue="b")
    await ended(store, JobState.SUCCEEDED, queue="done")
    await put(store, *[new_job(queue="a", priority=n) for n in range(4)], new_job(queue="d", delay=HOUR))
    (job,) = await take(store, 1, {"a": 1})
    await store.admin.pause("e")
    clock.advance(5)

    infos = await store.query.queue_depths(max_count=1000)

    assert {info.name: info.states for info in infos} == {
        "a": {"queued": 3, "running": 1},
        "b": {"dead": 2, "failed": 1},
        "d": {"scheduled": 1},
        "e": {},
    }
    assert [info.name for info in infos] == ["a", "b", "d", "e"]
    assert [info.paused for info in infos] == [False, False, False, True]
    assert [info.oldest_ready for info in infos] == [timedelta(seconds=5), None, None, None]
    await lose(store, clock, job)
    assert (await store.query.queue_depths(max_count=1000))[0].states == {"queued": 4}


async def test_queue_depths_count_waiting_jobs(store: Store) -> None:
    first = await running(store, queue="other")
    await put(store, *[new_job(queue="steps", after=(Dependency(first.id),)) for _ in range(2)])
    await settle(store, first, JobState.FAILED, delay=MINUTE)

    found = {info.name: info.states for info in await store.query.queue_depths(max_count=1000)}

    assert found == {"other": {"failed": 1}, "steps": {"waiting": 2}}
    assert await take(store, capacity={"steps": 9}) == []


async def test_queue_depths_report_a_lower_bound_for_many_jobs(store: Store) -> None:
    await put(store, *[new_job(queue=queue) for queue in ("a", "b") for _ in range(6)])

    counts = {info.name: info.states["queued"] for info in await store.query.queue_depths(max_count=2)}

    assert set(counts) == {"a", "b"}
    assert all(2 <= count <= 6 for count in counts.values())


async def test_queues_say_of_which_states_they_may_have_more(store: Store) -> None:
    """Redis keeps the counts. Elsewhere so many jobs are looked at: of what waits each queue's, else all queues'."""
    await put(store, *[new_job(queue=queue) for queue in ("a", "a", "a", "b")], new_job(queue="a", delay=HOUR))
    for queue in ("a", "b", "b"):
        await ended(store, JobState.SUCCEEDED, queue=queue)
    await ended(store, JobState.DEAD, queue="b")

    everything, some = [{info.name: info for info in await queues(store, most)} for most in (10, 2)]

    exact = {"a": {"scheduled": 1, "queued": 3, "succeeded": 1}, "b": {"queued": 1, "succeeded": 2, "dead": 1}}
    assert {name: info.states for name, info in everything.items()} == exact
    assert {info.at_least for info in everything.values()} == {frozenset()}
    beyond = {name: set(info.at_least) for name, info in some.items()}
    if store.url.startswith("redis"):
        assert ({name: info.states for name, info in some.items()}, beyond) == (exact, {"a": set(), "b": set()})
    else:
        assert beyond == {"a": {JobState.QUEUED, JobState.SUCCEEDED}, "b": {JobState.SUCCEEDED}}
        assert (some["a"].states["queued"], some["b"].states["queued"], some["b"].states["dead"]) == (2, 1, 1)
        assert sum(info.states.get("succeeded", 0) for info in some.values()) == 2


async def test_queues_say_how_many_of_their_jobs_ended_a_second(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED, queue="b")
    await ended(store, JobState.SUCCEEDED, queue="old")
    clock.advance(301)
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED):
        await ended(store, state, queue="b")
    replayed = await ended(store, JobState.DEAD, queue="a")
    await store.admin.replay([replayed])
    await ended(store, JobState.FAILED, queue="a")
    clock.advance(299)

    rates = {info.name: info.ended_per_second for info in await queues(store)}

    assert rates == {"a": 0, "b": pytest.approx(3 / 300), "old": 0}


async def test_the_rate_of_many_endings_is_that_of_the_latest(store: Store, clock: ManualClock) -> None:
    """Those that were looked at are counted over the time that they took, not over the minutes asked for."""
    for _ in range(3):
        await put(store, *[new_job(queue=queue) for queue in ("a", "b") for _ in range(50)])
        await store.queueing.settle([ending(job) for job in await take(store, 100, {"a": 50, "b": 50})])
        clock.advance(1)

    rates = {info.name: info.ended_per_second for info in await queues(store, max_count=100)}

    assert rates == {"a": pytest.approx(50), "b": pytest.approx(50)}


async def test_age_of_oldest_ready_job_counts_from_readiness(store: Store, clock: ManualClock) -> None:
    await put(store, new_job(queue="a"), new_job(queue="b", delay=HOUR))
    clock.advance(5)
    await put(store, new_job(queue="a"), new_job(queue="c"))
    clock.advance(2.5)

    ages = {info.name: info.oldest_ready for info in await queues(store)}

    assert ages == {"a": timedelta(seconds=7.5), "b": None, "c": timedelta(seconds=2.5)}


@pytest.mark.parametrize("lost_leases", [0, 1, 2])
async def test_oldest_ready_job_may_have_any_priority_or_tier(
    store: Store, clock: ManualClock, lost_leases: int
) -> None:
    (oldest,) = await put(store, new_job(queue="a", priority=-7))
    for lost in range(lost_leases):
        (job,) = await take(store, 1, {"a": 1}, max_must_start=lost)
        await lose(store, clock, job)
    clock.advance(10)
    isolated = [info.oldest_ready for info in await queues(store)]
    await put(store, *[new_job(queue="a", priority=priority) for priority in (-100, -8, -7, 5)])

    together = [info.oldest_ready for info in await queues(store)]

    age = timedelta(microseconds=clock() - (await stored(store, oldest)).run_at_us)
    assert age >= timedelta(seconds=10)
    assert (isolated, together) == ([age], [age])


async def test_a_paused_queue_is_listed_even_without_jobs(store: Store) -> None:
    await put(store, new_job(queue="busy"))
    await store.admin.pause("empty")
    await store.admin.pause("empty")
    await store.admin.pause("resumed")
    await store.admin.resume("resumed")
    await store.admin.resume("unheard of")

    infos = {info.name: info for info in await queues(store)}

    assert infos["empty"].paused
    assert Counter(infos["empty"].states) == Counter()
    assert infos["empty"].oldest_ready is None
    assert not infos["busy"].paused
    assert all(not info.paused for name, info in infos.items() if name != "empty")


async def test_the_stores_clock_is_the_one_it_was_opened_with(store: Store, clock: ManualClock) -> None:
    assert await store.health.server_time_us() == clock()
    clock.advance(1.5)
    assert await store.health.server_time_us() == clock()
