"""Opening, closing, migrating, copying; and callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import Store
from tests.conformance.support import Opener, new_job, put, state_of, take_ids
from tests.support.stores import STORES

HOMES = STORES


async def test_opening_and_closing_twice_is_harmless(opener: Opener) -> None:
    store = await opener()
    await store.open()
    (job_id,) = await put(store)
    await store.close()
    await store.close()

    again = await opener()
    assert await state_of(again, job_id) is JobState.QUEUED


async def test_a_store_that_was_never_opened_closes(opener: Opener) -> None:
    await opener.unopened().close()


async def test_a_closed_store_can_be_opened_again(opener: Opener) -> None:
    store = await opener()
    (job_id,) = await put(store)
    await store.close()
    await store.open()

    assert await take_ids(store) == [job_id]


async def test_a_closed_store_says_so(opener: Opener) -> None:
    store = await opener()
    await store.close()

    with pytest.raises(HoldfastError):
        await put(store)


async def test_migration_already_applied_by_opening_is_reported_once(store: Store, opener: Opener) -> None:
    assert len(await store.migrate()) >= 1
    assert await store.migrate() == []
    assert await (await opener()).migrate() == []


async def test_racing_openers_of_an_empty_store_all_find_it_ready(opener: Opener) -> None:
    stores = [opener.unopened() for _ in range(4)]

    await asyncio.gather(*[store.open() for store in stores])
    await asyncio.gather(*[store.migrate() for store in stores])

    for store in stores:
        await put(store)
    assert await stores[0].query.count(JobFilter()) == 4


async def test_a_cancelled_opening_hinders_no_other(opener: Opener) -> None:
    store = opener.unopened()
    alone = asyncio.create_task(store.open())
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.wait([alone])
    cancelled, other = asyncio.create_task(store.open()), asyncio.create_task(store.open())
    await asyncio.sleep(0)
    cancelled.cancel()
    await other

    assert len(await put(store)) == 1


async def test_migrating_keeps_the_jobs(store: Store) -> None:
    ids = await put(store, *[new_job() for _ in range(10)])
    await store.migrate()

    assert await take_ids(store) == ids


async def test_closing_finishes_what_is_under_way(opener: Opener) -> None:
    store = await opener()
    jobs = [new_job() for _ in range(20)]
    submissions = [asyncio.create_task(store.queueing.submit([job])) for job in jobs]
    await asyncio.sleep(0)
    await store.close()
    answers = await asyncio.gather(*submissions, return_exceptions=True)

    again = await opener()
    for job, answer in zip(jobs, answers, strict=True):
        acknowledged = isinstance(answer, list) and [(each.job_id, each.created) for each in answer] == [(job.id, True)]
        assert acknowledged or isinstance(answer, HoldfastError)
        assert not acknowledged or await again.query.get(job.id) is not None


async def test_a_backup_never_overwrites(store: Store, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("precious")

    with pytest.raises(HoldfastError):
        await store.health.backup(str(taken))
    assert taken.read_text() == "precious"


async def test_a_backup_to_nowhere_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError):
        await store.health.backup(str(tmp_path / "no" / "such" / "folder" / "copy"))


async def test_the_doctor_finds_a_new_store_healthy(store: Store) -> None:
    findings = await store.health.doctor()

    assert findings[0] == await store.health.durability()
    # The servers of tests are hasty, and it must say so; a durable one is looked at in test_doctor_postgres.
    wrong = [finding.name for finding in findings if finding.level == "error"]
    assert wrong == (["durability"] if store.url.startswith("postgresql:") else [])
    assert all(finding.level in ("ok", "warning", "error") and finding.text for finding in findings)


async def count_jobs(store: Store) -> int:
    """Counts all jobs; a family of verbs belongs to the event loop in which it is read."""
    return await store.query.count(JobFilter())


async def find_broken(store: Store) -> None:
    await store.query.find(JobFilter(), cursor="broken")


def test_a_blocking_caller_gets_the_same_answers(opener: Opener) -> None:
    store = opener.unopened()
    store.blocking(store.open())
    new = new_job()

    assert store.blocking(put(store, new)) == [new.id]
    assert store.blocking(count_jobs(store)) == 1
    store.blocking(store.close())


def test_blocking_callers_may_come_from_any_thread(opener: Opener) -> None:
    store = opener.unopened()
    store.blocking(store.open())
    jobs = [new_job() for _ in range(40)]
    answers: list[str] = []

    def submit(part: int) -> None:
        for job in jobs[part::4]:
            answers.extend(store.blocking(put(store, job)))

    threads = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(answers) == sorted(job.id for job in jobs)
    assert store.blocking(count_jobs(store)) == 40
    store.blocking(store.close())


def test_a_blocking_error_arrives_as_itself(opener: Opener) -> None:
    store = opener.unopened()
    store.blocking(store.open())

    with pytest.raises(HoldfastError):
        store.blocking(find_broken(store))
    store.blocking(store.close())


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/db", "sqlite", "://", "sqlite://host/path", "\0"])
def test_an_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)

    assert str(caught.value)


async def test_store_is_missing_until_opened_and_checking_creates_nothing(opener: Opener) -> None:
    asking = opener.unopened()
    first = await asking.missing()
    assert first is not None
    assert first.endswith(" yet")
    assert await asking.missing() == first

    await opener()
    assert await asking.missing() is None
