"""Queues of a store with more ended jobs than are looked at, and the names of queues that a claim asks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.models import QueueInfo
from holdfast.stores.forwarding import ForwardingQuery
from tests.web.client import Api
from tests.web.keyed import Keys, ask

FILL = """
with recursive n (n) as (values (1) union all select n + 1 from n where n < 10000)
insert into holdfast_job (id, queue, task, state, rank, run_at, created_at, claims, ended_at)
select 'id-' || n, 'busy', 'work', 5, 0, 1, 1, 1, (unixepoch() - 1) * 1000000 from n
"""


@pytest.fixture
def full(home: str) -> Iterator[Api]:
    """10,000 jobs of queue ``busy`` have succeeded a moment ago, one of ``idle`` before them."""
    with Api(home) as api:
        api.succeed(api.submit(queue="idle")["id"])
        with closing(sqlite3.connect(home.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("update holdfast_job set ended_at = ended_at - 9000000")
            connection.execute(FILL)
        yield api


def test_queue_reports_lower_bounds_and_its_rate(full: Api) -> None:
    full.submit(queue="busy")
    (busy,) = full.get("/v1/queues")["queues"]
    assert (busy["states"]["succeeded"], busy["states"]["queued"], busy["at_least"]) == (10_000, 1, ["succeeded"])
    assert 10_000 / 60 < busy["ended_per_second"] <= 10_000  # over the time that those took, not over five minutes
    shown = full.get("/v1/queues/busy")
    assert [shown[name] for name in ("name", "states", "at_least")] == ["busy", busy["states"], busy["at_least"]]


def test_queue_without_counted_jobs_is_still_found(full: Api) -> None:
    idle = full.get("/v1/queues/idle")
    assert (set(idle["states"].values()), idle["at_least"], idle["paused"]) == ({0}, ["succeeded"], False)


@pytest.mark.parametrize(("queues", "asked"), [(("mail", "news"), 0), (("mail", "news.*"), 1)])
def test_only_a_key_with_patterns_reads_queue_names(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queues: tuple[str, ...], asked: int
) -> None:
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path)) as api:
        store: Any = api.run(api.app.open_store())
        calls: list[int] = []
        reads = type(store).query

        class CountedQuery(ForwardingQuery):
            async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
                calls.append(max_count)
                return await super().queues(recent=recent, max_count=max_count)

        monkeypatch.setattr(type(store), "query", property(lambda each: CountedQuery(reads.fget(each))))
        answer = ask(api, keys.make("work", queues=queues), "POST", "/v1/claims", {"worker": "w"})
        assert (answer.json()["jobs"], calls) == ([], [100] * asked)
