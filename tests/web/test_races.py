"""Everything at once on a handful of keys: no error of ours, and in the end every key stands for one job at most."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from holdfast.core.ids import new_id
from tests.web.client import Api
from tests.web.garbage import BRIEF

JOB = {"task": "work", "payload": {}}
KEYS = ("a", "b", "c")
EXPECTED = {200, 201, 204, 404, 409}


def test_64_parallel_posts_of_one_id_make_one_job(api: Api) -> None:
    body = JOB | {"id": new_id()}

    async def race() -> list[httpx.Response]:
        return await asyncio.gather(*[api.send("POST", "/v1/jobs", json=body) for _ in range(64)])

    answers = api.run(race())
    assert Counter(each.status_code for each in answers) == {201: 1, 200: 63}
    assert api.count() == 1


def _move(rng: random.Random) -> tuple[str, str, dict[str, Any] | None]:
    """Something that a client may do to one of the keys."""
    path = f"/v1/jobs/key:{rng.choice(KEYS)}"
    batch = [JOB | {"key": rng.choice(KEYS)} for _ in range(3)]
    moves: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/v1/jobs", JOB | {"key": rng.choice(KEYS), "delay": rng.choice([0, 0, 60])}),
        ("POST", "/v1/jobs/batch", {"jobs": batch}),
        ("POST", f"{path}/cancel", None),
        ("POST", f"{path}/replay", None),
        ("POST", f"{path}/replay", {"force": True}),
        ("DELETE", path, None),
        ("GET", path, None),
        ("GET", f"{path}?wait=1", None),
        ("GET", f"{path}/why", None),
        ("GET", "/v1/jobs?limit=2", None),
        ("POST", "/v1/jobs/cancel", {"filter": {"queue": "default"}, "limit": 2}),
        ("POST", "/v1/claims", {"worker": "w", "limit": 2}),
        ("GET", "/v1/queues", None),
    ]
    return rng.choice(moves)


@pytest.mark.timeout(400)
def test_everything_at_once_is_answered(home: str) -> None:
    rng = random.Random(7)
    moves = [_move(rng) for _ in range(240)]

    async def one(api: Api, free_slots: asyncio.Semaphore, method: str, path: str, body: Any) -> str | None:
        async with free_slots:
            answer = await api.send(method, path, **({} if body is None else {"json": body}))
        return None if answer.status_code in EXPECTED else f"{method} {path} {body}: {answer.text}"

    async def all_of_them(api: Api) -> list[str]:
        free_slots = asyncio.Semaphore(24)
        outcomes = await asyncio.gather(*[one(api, free_slots, *move) for move in moves])
        return [each for each in outcomes if each is not None]

    with Api(home, **BRIEF) as api:
        assert api.run(all_of_them(api), seconds=200) == []
        listed = [job["key"] for job in api.get("/v1/jobs", limit=500)["jobs"]]
        assert len(listed) == len(set(listed)) == api.count()
        for key in listed:
            assert api.get(f"/v1/jobs/key:{key}")["key"] == key
