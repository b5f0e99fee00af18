"""Stores that a test names, beside PostgreSQL: a namespace of Redis and a SQLite file, empty before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Holdfast, Invalid, testing
from holdfast.testing.temporary_stores import PREFIX
from tests.support.redis import shared as shared_redis

app = Holdfast("postgresql://app@127.0.0.1:9/none")


@app.task("note")
async def note(number: int) -> int:
    return number


def test_redis_namespace_is_emptied_and_removed() -> None:
    server = shared_redis()
    with testing.inline(app, url=server.url()):
        assert app.sync.enqueue("note", {"number": 1}).sync.result() == 1
    with server.client() as client:
        assert list(client.scan_iter(f"*{PREFIX}*")) == []


def test_new_sqlite_file_is_removed(tmp_path: Path) -> None:
    with testing.manual(app, url=f"sqlite:///{tmp_path}/new.db"):
        app.sync.enqueue("note", {"number": 1})
    assert list(tmp_path.iterdir()) == []


def test_sqlite_file_that_other_tests_use_is_refused(tmp_path: Path) -> None:
    """As workers of pytest-xdist do with one URL: each would delete the rows of the other, and then its tables."""
    url = f"sqlite:///{tmp_path}/new.db"
    with testing.manual(app, url=url):
        app.sync.enqueue("note", {"number": 1})
        with (
            pytest.raises(Invalid, match=r"is used by other tests; .*PYTEST_XDIST_WORKER"),
            testing.temporary_store(url),
        ):
            pytest.fail("the store was made")
        assert app.sync.count() == 1
    with testing.temporary_store(url):
        pass
    assert list(tmp_path.iterdir()) == []


def test_sqlite_file_with_a_limit_is_refused(tmp_path: Path) -> None:
    """Its rows would be deleted with those of the test."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    real = Holdfast(url)
    real.limits.sync.add("mail", queue="mail", concurrency=1)
    with pytest.raises(Invalid, match="holds jobs, schedules or limits; give"), testing.manual(app, url=url):
        pytest.fail("the mode was entered")
    assert [each.name for each in real.limits.sync.find_all()] == ["mail"]
    real.sync.close()


def test_sqlite_file_with_jobs_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    real = Holdfast(url)
    real.sync.enqueue("note", {"number": 1})
    real.sync.close()
    with (
        pytest.raises(Invalid, match="holds jobs, schedules or limits; give a file of the tests' own"),
        testing.manual(app, url=url),
    ):
        pytest.fail("the mode was entered")
    assert real.sync.count() == 1
    real.sync.cancel([job.id for job in real.sync.find().jobs])
    real.sync.delete([job.id for job in real.sync.find().jobs])
    real.sync.close()
    with testing.manual(app, url=url):
        app.sync.enqueue("note", {"number": 1})
    assert real.sync.count() == 0
    real.sync.close()
