"""When PostgreSQL's notifications are sent: soon, not too often, and less often where the server is slow."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from holdfast.stores.postgres import notifications
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool, parse_url
from holdfast.stores.postgres.store import PostgresStore

_SQL = PostgresStore("postgresql://localhost/jobs").sql


class Server:
    """A PostgreSQL that only takes notifications, each in so many seconds of its own clock."""

    def __init__(self, seconds: float) -> None:
        self.address = parse_url("postgresql://localhost/jobs")
        self.now = 100.0
        self.sent: list[tuple[float, list[str]]] = []
        self.seconds = seconds

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Nothing else happens meanwhile."""
        self.now += seconds

    async def fetch(self, _query: object, *, channel: str, payload: str) -> None:
        await next_turn()
        self.now += self.seconds
        self.sent.append((self.now, payload.split("\n")[1:]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Server:
    server = Server(request.param)
    monkeypatch.setattr(notifications, "time", server)
    monkeypatch.setattr(notifications.asyncio, "sleep", server.sleep)
    return server


async def next_turn() -> None:
    """Let the event loop's other tasks run."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


async def delays(server: Server, per_second: int, topics: tuple[str, str]) -> list[float]:
    """Seconds from each of 1,000 commits, evenly spaced, until its topics have been sent."""
    notifications = PostgresNotifications(cast("PostgresPool", server), _SQL)
    queue, job_id = topics
    found, start = [], server.now
    for number in range(1000):
        at = start + number / per_second
        server.now = max(server.now, at)
        number_before = len(server.sent)
        notifications.notify_committed([f"queue:{queue}"] if queue else [], [job_id] if job_id else [])
        while len(server.sent) == number_before:
            await next_turn()
        found.append(server.sent[-1][0] - at)
    return found


@pytest.mark.parametrize("server", [0.0005], indirect=True)
@pytest.mark.parametrize("per_second", [5, 20, 50, 100, 300])
@pytest.mark.parametrize("topics", [("mail", ""), ("", "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77")])
def test_notification_follows_its_commit_within_5_ms(server: Server, per_second: int, topics: tuple[str, str]) -> None:
    found = sorted(asyncio.run(delays(server, per_second, topics)))
    assert found[989] <= 0.005


@pytest.mark.parametrize("server", [0.02], indirect=True)
def test_slow_server_gets_fewer_notifications(server: Server) -> None:
    begun = server.now
    asyncio.run(delays(server, 1000, ("mail", "")))
    assert len(server.sent) / (server.now - begun) < 20


@pytest.mark.parametrize("server", [10.0], indirect=True)
def test_notification_is_prompt_after_the_server_was_stuck(server: Server) -> None:
    async def use() -> float:
        notifications = PostgresNotifications(cast("PostgresPool", server), _SQL)
        for name in ("a", "b"):  # each takes 10 seconds
            notifications.notify_committed([f"queue:{name}"])
            await notifications.flush()
        begun, server.seconds = server.now, 0.001
        notifications.notify_committed(["queue:c"])
        await notifications.flush()
        return server.now - begun

    assert asyncio.run(use()) < 0.5


@pytest.mark.parametrize("server", [0.001], indirect=True)
def test_topics_that_come_meanwhile_share_a_notification(server: Server) -> None:
    async def use() -> None:
        notifications = PostgresNotifications(cast("PostgresPool", server), _SQL)
        for name in ("a", "b", "c"):
            notifications.notify_committed([f"queue:{name}"])
        await notifications.flush()

    asyncio.run(use())
    assert [sorted(topics) for _, topics in server.sent] == [["queue:a", "queue:b", "queue:c"]]


@pytest.mark.parametrize("server", [0.001], indirect=True)
@pytest.mark.parametrize("turns", [0, 1], ids=["not begun", "under way"])
def test_notification_is_sent_although_its_task_is_cancelled(server: Server, turns: int) -> None:
    async def use() -> None:
        notifications = PostgresNotifications(cast("PostgresPool", server), _SQL)
        notifications.notify_committed(["queue:mail"])
        for _ in range(turns):
            await next_turn()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await notifications.flush()

    asyncio.run(use())
    assert [topics for _, topics in server.sent] == [["queue:mail"]]


@pytest.mark.parametrize("server", [0.001], indirect=True)
def test_lone_job_takes_its_notification_along_unless_one_was_just_sent(server: Server) -> None:
    async def use() -> list[bool]:
        notifications = PostgresNotifications(cast("PostgresPool", server), _SQL)
        went = []
        for gap in (0.0, 0.1, 0.001, 0.0005, 0.1):
            server.now += gap
            along = notifications.reserve_notification("queue:mail")["channel"] is not None
            went.append(along)
            notifications.record_transaction() if along else notifications.notify_committed(["queue:mail"])
            await notifications.flush()
        return went

    assert asyncio.run(use()) == [True, True, False, False, True]
