"""Searches by state and tag: through indexes or through all jobs, the pages are the same."""

from __future__ import annotations

from datetime import timedelta
from itertools import chain, combinations

import pytest

from holdfast.core.dependencies import Dependency
from holdfast.core.models import JobFilter, JobState, Options
from holdfast.stores.base import Store
from holdfast.stores.common import searches
from holdfast.stores.postgres import query as postgres_query
from holdfast.stores.sqlite import query as sqlite_query
from tests.conformance.limited import limit
from tests.conformance.support import ended, new_job, put, running, stored

UNENDED = (JobState.QUEUED, JobState.SCHEDULED, JobState.RUNNING, JobState.FAILED, JobState.WAITING)


async def _fill(store: Store) -> dict[str, JobState]:
    """Three jobs in each state and queue, each second one tagged, some of them under a limit; their states."""
    await limit(store, queue="limited", concurrency=1)
    ids = []
    for number in range(3):
        options = Options(tags=("red",) if number % 2 else ("redder",))
        for queue in ("default", "limited"):
            ids += await put(
                store,
                new_job(queue=queue, options=options),
                new_job(queue=queue, options=options, delay=timedelta(hours=1)),
                new_job(queue=queue, options=options, after=(Dependency(ids[0]),) if ids else ()),
            )
        ids += [(await running(store, options=options)).id]
        ids += [await ended(store, state, options=options) for state in (JobState.FAILED, JobState.DEAD)]
        ids += [await ended(store, JobState.SUCCEEDED, options=options)]
    return {job_id: (await stored(store, job_id)).state for job_id in ids}


async def _pages(store: Store, where: JobFilter) -> list[str]:
    found, cursor, is_first = [], None, True
    while is_first or cursor is not None:
        page = await store.query.find(where, limit=2, cursor=cursor)
        found += [job.id for job in page.jobs]
        cursor, is_first = page.cursor, False
    return found


@pytest.mark.parametrize("most", [0, 20_000])
async def test_pages_of_states_are_the_same_by_index_and_by_scan(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    for module in (sqlite_query, postgres_query, searches):
        monkeypatch.setattr(module, "max_unended", lambda where: most)
    states = await _fill(store)
    assert set(UNENDED) <= set(states.values())
    everything = await _pages(store, JobFilter())
    assert sorted(everything) == sorted(states)
    for chosen in chain.from_iterable(combinations(UNENDED, length) for length in (1, 2, 5)):
        expected = [job_id for job_id in everything if states[job_id] in chosen]
        assert await _pages(store, JobFilter(states=chosen)) == expected, chosen
    for chosen in ((JobState.DEAD, JobState.FAILED), (JobState.DEAD, *UNENDED), (JobState.SUCCEEDED, JobState.QUEUED)):
        expected = [job_id for job_id in everything if states[job_id] in chosen]
        assert await _pages(store, JobFilter(states=chosen)) == expected, chosen
    failed = [job_id for job_id in everything if states[job_id] in (JobState.DEAD, JobState.FAILED)]
    assert await _pages(store, JobFilter(error="oo")) == failed
    assert await _pages(store, JobFilter(error="oo", states=(JobState.SUCCEEDED,))) == []
    limited = await _pages(store, JobFilter(states=UNENDED, queue="limited"))
    assert limited == [job_id for job_id in everything if (await stored(store, job_id)).queue == "limited"]


async def test_way_to_jobs_of_a_state_depends_on_the_number_of_those_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def choose(where: JobFilter, unended: int) -> list[searches.Search]:
        numbers.append(unended)
        return searches.choose_searches(where, unended)

    for module in (sqlite_query, postgres_query):
        monkeypatch.setattr(module, "choose_searches", choose)
    states = await _fill(store)
    for chosen in ((JobState.QUEUED,), (JobState.SCHEDULED, JobState.FAILED), (JobState.RUNNING,), (JobState.WAITING,)):
        await store.query.find(JobFilter(states=chosen))
        assert numbers.pop() == sum(state in chosen for state in states.values()) > 0, chosen


async def test_pages_of_a_tag_are_newest_first_and_match_all_filters(store: Store) -> None:
    states = await _fill(store)
    everything = await _pages(store, JobFilter())
    tagged = [each for each in everything if "red" in (await stored(store, each)).options.tags]
    assert 0 < len(tagged) < len(everything)
    assert await _pages(store, JobFilter(tag="red")) == tagged
    assert await _pages(store, JobFilter(tag="none")) == []
    for state in JobState:
        expected = [each for each in tagged if states[each] is state]
        assert await _pages(store, JobFilter(tag="red", states=(state,))) == expected, state
