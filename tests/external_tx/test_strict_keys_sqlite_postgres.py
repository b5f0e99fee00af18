"""``strict_idempotency`` inside the caller's transaction: a refused submission leaves no job in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import Holdfast
from holdfast.core.errors import Conflict
from tests.external_tx.kinds import plain
from tests.support.stores import MIGRATED


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Holdfast]:
    with MIGRATED[request.param](tmp_path) as url:
        app = Holdfast(url, strict_idempotency=True)
        yield app
        app.sync.close()


def connect(app: Holdfast) -> Any:
    """Returns a connection to the database of the jobs."""
    url = plain(app.settings.url)
    return sqlite3.connect(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else psycopg.connect(url)


SUBMISSIONS: dict[str, Callable[[Holdfast, list[Any], Any], object]] = {
    "enqueue_many": lambda app, jobs, held: app.sync.enqueue_many(jobs, connection=held),
    "enqueue_batch": lambda app, jobs, held: app.sync.enqueue_batch(jobs, connection=held),
}


@pytest.mark.parametrize("submit", list(SUBMISSIONS.values()), ids=list(SUBMISSIONS))
@pytest.mark.parametrize("keys", [("a", "k", "b"), ("a", "b", "b")], ids=["against the store", "in the batch"])
def test_batch_with_a_conflict_leaves_no_job_in_the_transaction(
    app: Holdfast, keys: tuple[str, ...], submit: Callable[[Holdfast, list[Any], Any], object]
) -> None:
    app.sync.enqueue("work", {"n": -1}, key="k")
    with closing(connect(app)) as held:
        app.sync.enqueue("work", {"n": 9}, connection=held)
        with pytest.raises(Conflict, match="already stands for") as refused:
            submit(app, [app.draft_job("work", {"n": n}, key=key) for n, key in enumerate(keys)], held)
        held.commit()
    assert list(refused.value.stored) == []
    assert app.sync.count() == 2


def test_keys_that_stand_for_the_same_jobs_are_accepted(app: Holdfast) -> None:
    first = app.sync.enqueue("work", {"n": 1}, key="k")
    with closing(connect(app)) as held:
        jobs = [app.draft_job("work", {"n": n}, key=key) for n, key in ((1, "k"), (2, "b"), (2, "b"))]
        stored, other, again = app.sync.enqueue_many(jobs, connection=held)
        held.commit()
    assert (stored.id, stored.created, other.created, again.created) == (first.id, False, True, False)
    assert again.id == other.id
