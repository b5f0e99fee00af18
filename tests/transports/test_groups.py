"""A transport on a cluster, and on a primary that sentinels know."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import ConfigError, Holdfast
from tests.support.redis_groups import SERVICE, Cluster, Sentinel, replicated
from tests.transports.support import QUICK, Pairing, Recorder, until, until_true, working

KINDS = pytest.mark.parametrize("transport", ["redis_list", "redis_stream"])


def noop(app: Holdfast) -> list[int]:
    """Register the task ``work``; what it has run."""
    done: list[int] = []

    @app.task("work")
    async def work() -> None:
        done.append(1)

    return done


@KINDS
async def test_keys_of_a_transport_share_one_cluster_slot(postgres_url: str, transport: str) -> None:
    with Cluster() as cluster:
        url = cluster.url().partition("?")[0]
        app = Holdfast(postgres_url, transport=transport, transport_url=url)
        done, events = noop(app), Recorder(app)
        async with app, working(app):
            for number in range(10):
                handle = await app.enqueue("work", queue=f"q{number % 3}")
                assert not handle.wake_up_delayed
            await until(lambda: len(done) == 10, "the jobs")
        assert [each.name for each in events.events if each.name.startswith("transport")] == []


@pytest.mark.parametrize(
    ("key", "dead_key"), [("ids", "dead"), ("{a}:ids", "dead"), ("ids", "{a}:dead"), ("{a}", "{b}")]
)
async def test_keys_in_several_cluster_slots_are_refused(key: str, dead_key: str) -> None:
    keys: dict[str, Any] = {"transport_key": key, "transport_dead_key": dead_key}
    app = Holdfast("postgresql://db/x", transport="redis_list", transport_url="redis+cluster://h", **keys)
    with pytest.raises(ConfigError, match=r"must have the same {tag}"):
        await app.open_store()
    await app.close()


@KINDS
async def test_a_failover_costs_wake_ups_and_no_job(postgres_url: str, transport: str) -> None:
    with replicated() as (primary, _), Sentinel(primary) as sentinel:
        url = sentinel.url().partition("?")[0]
        assert SERVICE in url
        pairing = Pairing(postgres_url, primary, transport=transport, transport_url=url)
        app = pairing.app(**QUICK)
        done = noop(app)
        async with app, working(app):
            await app.enqueue("work")
            await until(lambda: len(done) == 1, "the first job")
            primary.kill()
            await app.enqueue("work")
            await until(lambda: len(done) == 2, "the second")

            async def is_prompt() -> bool:
                return not (await app.enqueue("work")).wake_up_delayed

            await until_true(is_prompt, "the new primary")
