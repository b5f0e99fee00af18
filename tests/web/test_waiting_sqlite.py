"""Requests that wait: so many at once of one caller, and never so many that others find no connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.settings.settings import Settings
from holdfast.web.keys import Principal
from holdfast.web.messages import Refusal
from holdfast.web.rate_limit import WaitLimiter
from tests.web.client import Api
from tests.web.keyed import Keys, refused

CLAIM = {"worker": "w", "wait": 60}


def waiting(**settings: int) -> WaitLimiter:
    return WaitLimiter(Settings.load(environ={}, **settings))


def test_a_caller_has_so_many_places_and_has_them_back() -> None:
    places = waiting(long_polls_per_key=1)
    one, near, far = (Principal(address=each) for each in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"))
    with places.limit_wait(one):
        with pytest.raises(Refusal, match="setting long_polls_per_key"), places.limit_wait(near):
            pass
        with places.limit_wait(far), places.limit_wait(Principal(key="k", address="2001:db8::1")):
            pass
    with places.limit_wait(near):
        pass


def test_a_quarter_of_connections_is_reserved_for_non_waiters() -> None:
    places = waiting(connections=4)
    with contextlib.ExitStack() as there:
        for name in "abc":
            there.enter_context(places.limit_wait(Principal(key=name)))
        with pytest.raises(Refusal, match="three quarters"):
            there.enter_context(places.limit_wait(Principal(key="d")))


def test_places_are_counted_whatever_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event loop that the application is served on is a thread of its own."""

    class Slow(Counter[str]):
        def total(self) -> int:
            there = super().total()
            time.sleep(0.02)
            return there

    monkeypatch.setattr("holdfast.web.rate_limit.Counter", Slow)
    places = waiting(connections=2)  # one place

    def enter(name: str) -> bool:
        with contextlib.suppress(Refusal):
            there.enter_context(places.limit_wait(Principal(key=name)))
            return True
        return False

    with contextlib.ExitStack() as there, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(enter, "abcd")) == 1


@pytest.fixture
def asks(tmp_path: Path) -> Any:
    """Asks at an API where a key may have one request waiting."""
    keys = Keys(tmp_path)
    with Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path), long_polls_per_key=1) as api:
        shown = {name: {"authorization": f"Bearer {keys.make('admin')}"} for name in ("first", "second")}

        async def ask(name: str, method: str, path: str, body: Any = None) -> httpx.Response:
            return await api.send(method, path, json=body, headers=shown[name])

        yield api, ask


async def until_it_waits(task: asyncio.Task[httpx.Response]) -> None:
    await asyncio.sleep(0.2)
    assert not task.done()


Ask = Callable[..., Awaitable[httpx.Response]]


def test_key_at_its_wait_limit_is_refused_and_others_wait(asks: tuple[Api, Ask]) -> None:
    api, ask = asks

    async def body() -> None:
        job = (await ask("first", "POST", "/v1/jobs", {"task": "work", "payload": {}, "queue": "aside"})).json()
        claim = {**CLAIM, "queues": ["default"]}
        held = asyncio.create_task(ask("first", "POST", "/v1/claims", claim))
        await until_it_waits(held)
        for answer in (
            await ask("first", "POST", "/v1/claims", {**claim, "worker": "v"}),
            await ask("first", "GET", f"/v1/jobs/{job['id']}?wait=60"),
        ):
            problem = refused(answer, 429, "too_many_long_polls")
            assert (answer.headers["retry-after"], "long_polls_per_key" in problem["detail"]) == ("5", True)
        assert (await ask("first", "GET", f"/v1/jobs/{job['id']}")).status_code == 200
        assert (await ask("second", "GET", f"/v1/jobs/{job['id']}?wait=1")).json()["state"] == "queued"
        there = {"worker": "v", "queues": ["aside"], "wait": 60}
        assert len((await ask("first", "POST", "/v1/claims", there)).json()["jobs"]) == 1  # what is there needs no wait
        await ask("second", "POST", "/v1/jobs", {"task": "work", "payload": {}})
        assert len((await held).json()["jobs"]) == 1
        assert (await ask("first", "POST", "/v1/claims", {**claim, "wait": 1})).json()["jobs"] == []

    api.run(body())


def test_stopped_worker_is_answered_however_many_wait(asks: tuple[Api, Ask]) -> None:
    api, ask = asks

    async def body() -> None:
        await ask("first", "POST", "/v1/claims", {"worker": "v"})
        held = asyncio.create_task(ask("first", "POST", "/v1/claims", CLAIM))
        await until_it_waits(held)
        workers = (await ask("second", "GET", "/v1/workers")).json()["workers"]
        stop = {"workers": [each["id"] for each in workers if each["id"].endswith(".v")], "drain": True}
        assert (await ask("second", "POST", "/v1/workers/stop", stop)).status_code == 200
        command = ""
        while command != "drain":
            await ask("first", "POST", "/v1/claims/extend", {"worker": "v", "leases": []})
            command = (await ask("first", "POST", "/v1/claims", {"worker": "v", "wait": 1})).json()["command"]
        held.cancel()

    api.run(body())
