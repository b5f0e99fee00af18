"""A batch that Redis takes in pieces, and of which a later piece is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.core.events import ApiSubmission
from holdfast.stores.connections.redis_protocol import Argument, RedisConnection
from tests.support.redis import Redis
from tests.web.client import Api

JOBS = [{"task": "work", "payload": {"n": number}} for number in range(450)]


def _fill_after_the_first_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has no memory left from the second script on that goes out with others."""
    ask_each = RedisConnection.ask_each

    def asked(wire: RedisConnection, commands: Iterable[tuple[Argument, ...]]) -> asyncio.Future[list[Any]]:
        given = list(commands)
        scripts = [place for place, words in enumerate(given) if words[0] == "EVALSHA"]
        if len(scripts) < 2:
            return ask_each(wire, given)
        given.insert(scripts[1], ("CONFIG", "SET", "maxmemory", 1))

        async def answers() -> list[Any]:
            replies = await ask_each(wire, given)
            return replies[: scripts[1]] + replies[scripts[1] + 1 :]

        return asyncio.ensure_future(answers())

    monkeypatch.setattr(RedisConnection, "ask_each", asked)


@pytest.mark.parametrize("ids", ["uuid", "ulid"])
def test_a_batch_that_is_refused_halfway_says_what_is_stored(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Redis() as server, Api(server.url(namespace="half", ids=ids)) as api:
        reported: list[ApiSubmission] = []
        api.app.events.subscribe(reported.append, ApiSubmission)
        with monkeypatch.context() as patch:
            _fill_after_the_first_piece(patch)
            problem = api.refused("POST", "/v1/jobs/batch", 503, json={"jobs": JOBS})
        stored = problem["stored"]
        assert [each is not None for each in stored] == [True] * 200 + [False] * 250
        assert [api.get(f"/v1/jobs/{each}")["payload"] for each in stored[::199] if each] == [{"n": 0}, {"n": 199}]
        assert [(event.status, event.count, event.ids) for event in reported] == [(503, 200, stored[:50])]
        assert "none of the others" in problem["remedy"]
        assert "stored" not in api.refused("POST", "/v1/jobs/batch", 503, json={"jobs": JOBS[:2]})

        server.execute("CONFIG", "SET", "maxmemory", 0)
        rest = [job for job, job_id in zip(JOBS, stored, strict=True) if job_id is None]
        api.post("/v1/jobs/batch", {"jobs": rest}, 201)
        assert api.count() == 450
