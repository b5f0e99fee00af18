"""``waited`` of a claim's answer: a worker counts the leases of its jobs from then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Unavailable
from holdfast.core.events import LeaseAcquired
from tests.web.client import Api

STEP = 0.2507  # seconds the time moves at once
DELAYS = pytest.mark.parametrize("delay", [0, 20])
"""Seconds between the store's answer and the API's."""


async def claim_slowly(api: Api, clock: ManualClock, *, wait: int, submit_after: float) -> dict[str, Any]:
    """The answer of a claim, while time moves; a job is submitted after so many seconds."""
    begun, submitted = clock.monotonic(), False
    claiming = asyncio.create_task(api.send("POST", "/v1/claims", json={"worker": "js-1", "wait": wait}))
    await api.until(api.app.workers)
    while not claiming.done():
        clock.advance(STEP)
        await asyncio.sleep(0.02)
        if not submitted and clock.monotonic() - begun >= submit_after:
            submitted = True
            await api.send("POST", "/v1/jobs", json={"task": "work", "payload": {}})
    answer: dict[str, Any] = claiming.result().json()
    return answer


@DELAYS
def test_immediate_claim_has_not_waited(api: Api, clock: ManualClock, delay: int) -> None:
    api.app.events.subscribe(lambda _: clock.advance(delay), LeaseAcquired)
    api.submit()
    answer = api.post("/v1/claims", {"worker": "js-1", "wait": 60})
    assert (len(answer["jobs"]), answer["waited"]) == (1, 0)


@DELAYS
def test_claim_has_waited_until_its_jobs_were_claimed(api: Api, clock: ManualClock, delay: int) -> None:
    api.app.events.subscribe(lambda _: clock.advance(delay), LeaseAcquired)
    begun = clock.monotonic()
    answer = api.run(claim_slowly(api, clock, wait=60, submit_after=12))
    assert len(answer["jobs"]) == 1
    assert 12 <= answer["waited"] <= clock.monotonic() - begun - delay
    assert answer["waited"] == round(answer["waited"], 3)


def test_claim_without_jobs_has_waited_0(api: Api, clock: ManualClock) -> None:
    answer = api.run(claim_slowly(api, clock, wait=5, submit_after=3600))
    assert (answer["jobs"], answer["waited"]) == ([], 0)


def test_waiting_claims_outlast_a_short_absence_of_the_store(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """First their notifications cannot be had, then the store refuses the claims that a notification causes."""
    refused = {"claim": 0, "wait": 4}
    both_wait, waiting = asyncio.Event(), set[str]()

    def refuse(verb: str) -> None:
        if refused[verb]:
            refused[verb] -= 1
            raise Unavailable("the store has just gone")

    async def claim_meanwhile() -> list[Any]:
        queueing = type((await api.app.open_store()).queueing)
        claim, wait = queueing.claim, queueing.wait

        async def refusing_claim(self: Any, request: Any) -> Any:
            refuse("claim")
            return await claim(self, request)

        async def refusing_wait(self: Any, topics: Any, **options: Any) -> None:
            refuse("wait")
            waiting.update(topics)
            if {"worker:js-0", "worker:js-1"} <= waiting:
                both_wait.set()
            await wait(self, topics, **options)

        monkeypatch.setattr(queueing, "claim", refusing_claim)
        monkeypatch.setattr(queueing, "wait", refusing_wait)
        bodies = [{"worker": f"js-{number}", "wait": 40, "limit": 1} for number in range(2)]
        claims = [asyncio.ensure_future(api.send("POST", "/v1/claims", json=body)) for body in bodies]
        await asyncio.wait([*claims, asyncio.ensure_future(both_wait.wait())], return_when=asyncio.FIRST_COMPLETED)
        refused["claim"] = 3
        for _ in claims:
            await api.send("POST", "/v1/jobs", json={"task": "work", "payload": {}})
        return [answer.json() for answer in await asyncio.gather(*claims)]

    answers = api.run(claim_meanwhile())
    assert [len(answer.get("jobs", ())) for answer in answers] == [1, 1], answers
    assert refused == {"claim": 0, "wait": 0}
