"""Log lines of a job: stored under its lease and no other, kept as long as the job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Invalid
from holdfast.core.ids import new_id
from holdfast.core.job_logs import LogBatch, LogLine, NewLine
from holdfast.core.models import Job, JobFilter, JobState, Lease
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, ended, failing, lose, new_job, put, running, settle, take


def given(*texts: str, first: int = 1, ago: float = 0) -> list[NewLine]:
    return [NewLine(first + n, timedelta(seconds=ago), "info", text) for n, text in enumerate(texts)]


def record(job: Job | Lease, lines: Sequence[NewLine]) -> LogBatch:
    return LogBatch(job.lease if isinstance(job, Job) else job, lines)


async def lines_of(store: Store, job_id: str) -> list[LogLine]:
    page = await store.query.logs(job_id)
    assert page.cursor is None
    return page.lines


async def texts_of(store: Store, job_id: str) -> list[str]:
    return [line.text for line in await lines_of(store, job_id)]


async def test_line_is_kept_as_it_was_logged(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(5)
    line = NewLine(1, timedelta(milliseconds=1500), "warning", "größer als\nerwartet", '{"rows":3}')

    assert await store.queueing.append_logs([record(job, [line])]) == [True]

    kept = LogLine(1, 1, 1, clock() - 1_500_000, "warning", "größer als\nerwartet", '{"rows":3}')
    assert await lines_of(store, job.id) == [kept]


async def test_lines_of_many_jobs_are_kept_together(store: Store) -> None:
    jobs = [await running(store) for _ in range(3)]

    answers = await store.queueing.append_logs([record(job, given(f"{n} a", f"{n} b")) for n, job in enumerate(jobs)])

    assert answers == [True] * 3
    assert [await texts_of(store, job.id) for job in jobs] == [[f"{n} a", f"{n} b"] for n in range(3)]


async def test_logs_longer_than_one_chunk_keep_their_order(store: Store) -> None:
    job, other = await running(store), await running(store)
    many = [str(n) for n in range(450)]

    assert (
        await store.queueing.append_logs([record(other, given("a")), record(job, given(*many)), record(other, [])])
        == [True] * 3
    )

    assert await texts_of(store, job.id) == many


async def test_a_lost_lease_keeps_nothing(store: Store, clock: ManualClock) -> None:
    expired, retaken, freed = await running(store), await running(store), await running(store)
    await store.queueing.settle([failing(freed)])
    clock.advance(LEASE.total_seconds() + 1)
    await lose(store, clock, retaken)
    (again,) = await take(store, ids=[retaken.id], max_must_start=1)
    nobody = Lease(new_id(), 1)
    leases = [expired, retaken, freed, nobody, Lease("nonsense", 1), Lease(again.id, 99), again]

    answers = await store.queueing.append_logs([record(lease, given("late")) for lease in leases])

    assert answers == [False] * 6 + [True]
    assert await store.queueing.append_logs([record(Lease("nonsense", 1), given("late"))]) == [False]
    assert await texts_of(store, expired.id) == await texts_of(store, freed.id) == []
    assert [line.claims for line in await lines_of(store, again.id)] == [again.claims]


async def test_a_lease_under_which_the_job_succeeded_still_stands(store: Store) -> None:
    job = await running(store)
    await settle(store, job)

    assert await store.queueing.append_logs([record(job, given("done"))]) == [True]
    assert await store.queueing.append_logs([record(Lease(job.id, 7), given("forged"))]) == [False]

    assert await texts_of(store, job.id) == ["done"]


async def test_no_other_ending_leaves_the_lease_standing(store: Store) -> None:
    for state in (JobState.FAILED, JobState.DEAD, JobState.CANCELLED):
        job = await running(store)
        await settle(store, job, state, delay=timedelta(hours=1) if state is JobState.FAILED else None)

        assert await store.queueing.append_logs([record(job, given("late"))]) == [False]


async def test_a_repeated_record_changes_nothing(store: Store) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given("one", "two"))])

    assert await store.queueing.append_logs([record(job, given("other", "two", "three"))]) == [True]

    assert await texts_of(store, job.id) == ["one", "two", "three"]


async def test_lines_that_come_late_are_kept_in_their_places(store: Store, clock: ManualClock) -> None:
    """A worker could not reach the store with the first lines, sent the next, and then those again."""
    job = await running(store)
    await store.queueing.append_logs([record(job, given("before"))])
    await lose(store, clock, job)
    (again,) = await take(store, max_must_start=1)
    lines = given(*"abcdefg", "größer")

    for some in (lines[5:6], lines[3:5], lines[:2], [lines[7], lines[2], lines[6], lines[2]], lines):
        assert await store.queueing.append_logs([record(again, some)]) == [True]

    kept = [(line.claims, line.number, line.text) for line in await lines_of(store, job.id)]
    assert kept == [(1, 1, "before"), *((again.claims, n, text) for n, text in enumerate([*"abcdefg", "größer"], 1))]


async def test_each_attempt_adds_its_lines(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given("first"))])
    await store.queueing.settle([failing(job)])
    (again,) = await take(store, 1)
    clock.advance(1)
    await store.queueing.append_logs([record(again, given("second"))])

    kept = [(line.claims, line.attempt, line.text) for line in await lines_of(store, job.id)]

    assert kept == [(1, 1, "first"), (2, 2, "second")]


async def test_late_lines_come_behind_those_of_earlier_attempts(store: Store) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given(*[f"1:{n}" for n in range(1, 6)]))])
    await store.queueing.settle([failing(job)])
    (again,) = await take(store)
    for first in (1, 4, 3, 2):
        await store.queueing.append_logs([record(again, given(f"2:{first}", first=first))])
    assert await texts_of(store, job.id) == [f"1:{n}" for n in range(1, 6)] + [f"2:{n}" for n in range(1, 5)]


async def test_lines_survive_a_replay(store: Store) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given("before"))])
    await settle(store, job, JobState.DEAD)
    await store.admin.replay([job.id])
    (again,) = await take(store, 1)
    await store.queueing.append_logs([record(again, given("after"))])

    kept = [(line.attempt, line.text) for line in await lines_of(store, job.id)]

    assert kept == [(1, "before"), (1, "after")]


async def test_pages_of_lines_follow_one_another(store: Store) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given(*"abcde"))])
    await store.queueing.settle([failing(job)])
    (again,) = await take(store, 1)
    await store.queueing.append_logs([record(again, given(*"fg"))])

    pages, cursor = [], None
    while not pages or cursor is not None:
        page = await store.query.logs(job.id, limit=3, cursor=cursor)
        pages.append("".join(line.text for line in page.lines))
        cursor = page.cursor

    assert pages == ["abc", "def", "g"]


async def test_unknown_log_cursor_is_refused(store: Store) -> None:
    for cursor in ["", "x", "1", "1-", "-1", "1-x", "1-1-1", "٣-1", "1-" + "9" * 30]:
        with pytest.raises(Invalid, match="cursor"):
            await store.query.logs(new_id(), cursor=cursor)


async def test_a_job_that_is_not_there_has_no_lines(store: Store) -> None:
    assert await lines_of(store, new_id()) == await lines_of(store, "nonsense") == []


async def test_deleting_a_job_deletes_its_lines(store: Store) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given("x"))])
    await settle(store, job)
    await store.admin.delete([job.id])
    await put(store, new_job(id=job.id))

    assert await lines_of(store, job.id) == []
    assert await store.health.repair() == []


async def test_pruning_a_job_deletes_its_lines(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.queueing.append_logs([record(job, given("x"))])
    await settle(store, job)
    kept = await ended(store, JobState.DEAD)
    clock.advance(10)

    assert await store.maintenance.prune({"succeeded": timedelta(seconds=5)}, limit=10) == 1

    assert await store.query.count(JobFilter()) == 1
    await put(store, new_job(id=job.id))
    assert await texts_of(store, job.id) == await texts_of(store, kept) == []
    assert await store.health.repair() == []


async def test_any_text_comes_back_as_it_was(store: Store) -> None:
    job = await running(store)
    texts = ["", "NUL \0 in it", "€" * 3000, '{"a":"\\u0000"}', "' or 1=1 --", "\ufffe\U0010ffff"]
    lines = [NewLine(n, timedelta(0), "info", text, '{"a":"\\u0000"}') for n, text in enumerate(texts, 1)]

    assert await store.queueing.append_logs([record(job, lines)]) == [True]

    assert [(line.text, line.fields) for line in await lines_of(store, job.id)] == [
        (text, '{"a":"\\u0000"}') for text in texts
    ]
