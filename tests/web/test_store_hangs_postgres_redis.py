"""A store that neither refuses nor answers: frozen, or behind a network that swallows everything. Every client gets an
answer within two seconds, however many they are, and everything goes on when it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.load import slowness
from tests.support.postgres import shared as shared_postgres
from tests.support.redis import shared as shared_redis
from tests.web.client import JSON, UNKNOWN_ID, Api

CALLERS = 40
"""More than there are connections to the store."""
CONNECTIONS = 8
"""As many connections to the store as there may be for calls."""
ANSWERED, RECOVERED = 2.0, 90.0
"""Seconds."""
LATE = 1.0
"""What a machine adds that is not idle."""
SUBMISSION = '{"task": "work", "payload": {}}'
ASKED = (
    ("GET", "/v1/jobs?state=queued", None),
    ("GET", f"/v1/jobs/{UNKNOWN_ID}", None),
    ("GET", "/health/ready", None),
    ("POST", "/v1/jobs", SUBMISSION),
    ("POST", "/v1/jobs/cancel", '{"filter": {"queue": "default"}}'),
    ("POST", "/v1/claims", '{"worker": "silent", "limit": 5}'),
)


@pytest.fixture
def proxy(home: str) -> Iterator[FaultProxy]:
    port = urlsplit(home).port
    assert port is not None
    with FaultProxy(port) as proxy:
        yield proxy


async def _asked(api: Api, number: int) -> tuple[httpx.Response, float]:
    method, path, body = ASKED[number % len(ASKED)]
    begun = time.monotonic()
    answer = await api.raw(method, path, content=body, headers={**JSON, "idempotency-key": f"key-{number}"})
    return answer, time.monotonic() - begun


async def _all(api: Api) -> list[tuple[httpx.Response, float]]:
    return await asyncio.gather(*(_asked(api, number) for number in range(CALLERS)))


def test_silent_store_is_reported_to_every_caller_in_time(home: str, proxy: FaultProxy) -> None:
    url = home.replace(f":{urlsplit(home).port}/", f":{proxy.port}/")
    with Api(url, hurried=True) as api:
        api.run(_all(api))  # connections that are left behind, too, as many as there may be
        proxy.hold()
        answers = api.run(_all(api))
        assert {answer.status_code for answer, _ in answers} == {503}, [each.text for each, _ in answers]
        assert all(answer.headers["retry-after"].isdigit() for answer, _ in answers)
        assert max(seconds for _, seconds in answers) < ANSWERED + LATE * slowness()
        proxy.heal()
        until = time.monotonic() + RECOVERED
        while any(answer.status_code == 503 for answer, _ in api.run(_all(api))):
            assert time.monotonic() < until
        stored = api.get("/v1/jobs", limit=500)["jobs"]
        assert len({each["key"] for each in stored}) == len(stored), "a retry with its key made a second job"


def test_store_silent_from_the_start_is_reported(home: str, proxy: FaultProxy) -> None:
    url = home.replace(f":{urlsplit(home).port}/", f":{proxy.port}/")
    proxy.hold()
    api = Api(url, hurried=True)
    with api._runner:
        answer, seconds = api.run(_asked(api, 0))
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert seconds < ANSWERED + LATE * slowness()
        proxy.heal()
        api.run(api._close())


def test_requests_that_come_together_open_the_store_once(home: str, proxy: FaultProxy) -> None:
    async def ask_all() -> list[httpx.Response]:
        bodies = [f'{{"worker": "together-{number}"}}' for number in range(CALLERS)]
        return await asyncio.gather(*(api.raw("POST", "/v1/claims", content=each, headers=JSON) for each in bodies))

    url = home.replace(f":{urlsplit(home).port}/", f":{proxy.port}/")
    proxy.hold()
    api = Api(url, hurried=True)
    with api._runner:
        assert {answer.status_code for answer in api.run(ask_all())} == {503}
        assert proxy.accepted < CONNECTIONS
        proxy.heal()
        until = time.monotonic() + RECOVERED
        while any(answer.status_code == 503 for answer in api.run(ask_all())):
            assert time.monotonic() < until
        assert api.run(_count_sweepers()) == 1
        api.run(api._close())


async def _count_sweepers() -> int:
    return sum(task.get_name() == "holdfast-api-sweeper" for task in asyncio.all_tasks())


def test_a_silent_transport_delays_no_submission_for_long() -> None:
    with (
        shared_postgres().fresh_schema() as schema,
        shared_redis().fresh_namespace() as namespace,
        FaultProxy(shared_redis().port) as proxy,
    ):
        keys = {"transport_key": f"{{{namespace}}}:ready", "transport_dead_key": f"{{{namespace}}}:dead"}
        there = f"redis://127.0.0.1:{proxy.port}/0"
        with Api(
            shared_postgres().url(schema=schema), hurried=True, transport="redis_list", transport_url=there, **keys
        ) as api:
            api.submit()
            proxy.hold()
            answers = api.run(asyncio.wait_for(_submissions(api), 120))
            assert {answer.status_code for answer, _ in answers} == {201}
            assert {answer.json()["wake_up"] for answer, _ in answers} == {"delayed"}
            assert max(seconds for _, seconds in answers) < ANSWERED + LATE * slowness()
            proxy.heal()


async def _submissions(api: Api) -> list[tuple[httpx.Response, float]]:
    place = next(place for place, (_, path, _) in enumerate(ASKED) if path == "/v1/jobs" and place > 0)
    return await asyncio.gather(*(_asked(api, place + len(ASKED) * number) for number in range(CALLERS)))
