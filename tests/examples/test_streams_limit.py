"""The `streams` example's token bucket: calls of the provider over all workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations_with_replacement
from typing import NamedTuple
from uuid import uuid4

import httpx
import pytest
from redis.asyncio import Redis

from tests.examples.common import PATIENCE, until
from tests.examples.streams_support import DELAYS, UNLIMITED, Service, Streams

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
SECOND = 1_000_000
CAPACITY, REFILL = 5, 20
LIMITS = [(5, 20), (15, 60), (3, 15), (20, 40)]
"""Capacity and refill, one after the other."""
CALLS = [60, 140, 170, 230]
"""Calls by which the provider has seen enough of each limit."""


class Phase(NamedTuple):
    """A limit, and the time in which it may have been in force."""

    capacity: float
    refill: float
    begin: float
    end: float


@contextmanager
def limited(streams: Streams, capacity: float, refill: float) -> Iterator[None]:
    """Changes the limit of the service while this lasts. The bucket is full at first."""
    streams.notifications.redis.delete("notifications:bucket")
    streams.call("notifications", "PUT", "/limit", {"capacity": capacity, "refill": refill})
    try:
        yield
    finally:
        streams.call("notifications", "PUT", "/limit", UNLIMITED)


def take_for_a_second(url: str) -> list[float]:
    """Takes tokens as fast as it can; returns the times at which it got one."""
    from streams.errors import RateLimitExceeded
    from streams.notifications.token_bucket import Limit, TokenBucket

    async def take() -> list[float]:
        taken, end = [], time.monotonic() + 1
        async with Redis.from_url(url, decode_responses=True) as redis:
            bucket = TokenBucket(redis, "test:bucket")
            await bucket.change_limit(Limit(CAPACITY, REFILL))
            while time.monotonic() < end:
                try:
                    taken.append(await bucket.take())
                except RateLimitExceeded as error:
                    assert str(error) == "rate limited: more than 5 calls, and 20 per second"  # noqa: PT017
        return taken

    return asyncio.run(take())


@pytest.mark.rows("S59")
def test_processes_together_take_no_more_than_the_bucket_gives(streams: Streams) -> None:
    streams.notifications.redis.delete("test:bucket")
    with multiprocessing.get_context("spawn").Pool(3) as processes:
        taken = sorted(at for each in processes.map(take_for_a_second, [streams.redis_url] * 3) for at in each)
    assert len(taken) > CAPACITY
    for first, last in combinations_with_replacement(range(len(taken)), 2):
        calls, seconds = last - first + 1, taken[last] - taken[first]
        assert calls <= CAPACITY + REFILL * seconds + 0.001


@pytest.mark.rows("S59", "S62")
def test_provider_sees_no_more_calls_than_the_limit_while_it_changes_and_a_worker_dies(streams: Streams) -> None:
    service, changes = streams.notifications, []
    service.redis.delete(DELAYS)
    with limited(streams, *LIMITS[0]), streams.workers("notifications", 4, "bursts") as workers:
        jobs = _submit_messages(service, CALLS[-1])
        for number, (capacity, refill) in enumerate(LIMITS):
            asked = time.time()
            if number:
                streams.call("notifications", "PUT", "/limit", {"capacity": capacity, "refill": refill})
            changes.append((asked, time.time()))
            if number == 1:
                workers[0].kill()
            until(lambda number=number: len(_call_times(streams, jobs)) >= CALLS[number], "further calls")
        service.all_ended(jobs)
    ends = [answered for _, answered in changes[1:]] + [time.time()]
    phases = [Phase(*limit, asked, end) for limit, (asked, _), end in zip(LIMITS, changes, ends, strict=True)]
    calls = _call_times(streams, jobs)
    delay = max(float(seconds) for seconds in service.redis.lrange(DELAYS, 0, -1))
    assert len(calls) >= len(jobs)
    for first, last in combinations_with_replacement(range(len(calls)), 2):
        allowed = _allowed_calls(phases, calls[first] - delay, calls[last])
        assert last - first + 1 <= allowed + 0.001, f"{last - first + 1} calls, {allowed:.1f} are allowed"


def _submit_messages(service: Service, number: int) -> list[str]:
    """Submits messages that are tried again and again until they get through."""
    payloads = [{"email": f"{uuid4()}@example.com", "template": "news"} for _ in range(number)]
    drafts = [
        service.app.draft_job(
            "notification.send", payload, key=str(uuid4()), queue="bursts", retry="0.1", max_attempts=1000
        )
        for payload in payloads
    ]
    return [handle.id for handle in service.app.sync.enqueue_many(drafts)]


def _call_times(streams: Streams, jobs: Sequence[str]) -> list[float]:
    """Returns the times of the calls for these jobs in the provider's log."""
    wanted = set(jobs)
    return sorted(call["at"] for call in streams.call("provider", "GET", "/calls") if call["key"] in wanted)


def _allowed_calls(phases: Sequence[Phase], begin: float, end: float) -> float:
    """Returns the most calls whose tokens may have been taken in this time."""
    full = max(phase.capacity for phase in phases if phase.begin <= max(begin, phases[0].begin) <= phase.end)
    return full + sum(phase.refill * max(0.0, min(end, phase.end) - max(begin, phase.begin)) for phase in phases)


@pytest.mark.rows("S25", "S59", "S60", "S61")
def test_excess_calls_fail_as_rate_limited_and_follow_the_schedule(streams: Streams) -> None:
    service, began = streams.notifications, time.time()
    with limited(streams, 8, 0.001):
        emails = [f"{uuid4()}@example.com" for _ in range(16)]
        jobs = [service.submit("notification.send", "limited", email=email, template="news") for email in emails]
        with streams.workers("notifications", 2, "limited"):
            until(lambda: any(service.job(each).state == "failed" for each in jobs), "a rate limited job")
            streams.call("notifications", "PUT", "/limit", {"capacity": 8, "refill": 2})
            service.all_ended(jobs)
    calls = sorted(call["at"] for job_id in jobs for call in streams.calls(job_id))
    assert len(calls) == len(jobs)
    assert all(number <= 8 + 2 * (at - began) for number, at in enumerate(calls, 1))
    attempts = {job_id: service.app.sync.attempts(job_id) for job_id in jobs}
    assert any(attempts.values())
    for job_id, failed in attempts.items():
        assert {each.error for each in failed} <= {
            f"RateLimitExceeded: rate limited: more than 8 calls, and {rate} per second" for rate in ("0.001", "2")
        }
        starts = [*(each.started_at_us for each in failed), service.job(job_id).started_at_us][1:]
        waited = [(start - each.ended_at_us) / SECOND for start, each in zip(starts, failed, strict=True)]
        assert all(seconds >= least for seconds, least in zip(waited, [1, 5, 25, 125], strict=False))


@pytest.mark.rows("S60", "S61")
def test_rate_limited_job_is_scheduled_as_any_failed_one(streams: Streams) -> None:
    service = streams.notifications
    with limited(streams, 1, 0.001):
        jobs = [service.submit("notification.send", email=f"{uuid4()}@example.com", template="news") for _ in range(2)]
        (first,) = until(lambda: [each for each in jobs if service.job(each).state == "failed"], "a rate limited job")
        for attempt, delay in enumerate([1, 5, 25, 125], 1):
            job = service.wait_for(first, "failed", attempt)
            assert "rate limited" in str(job.error)
            ended = service.app.sync.attempts(first)[-1].ended_at_us
            assert (job.run_at_us - ended) / SECOND == pytest.approx(delay, abs=0.2)
            if attempt < 4:
                service.make_due(first)
    service.make_due(first)
    assert service.wait_for(first, "succeeded").attempts == 5


@pytest.mark.rows("S62")
def test_changed_limit_takes_effect_at_run_time(streams: Streams) -> None:
    service = streams.notifications
    with limited(streams, 1, 0.001):
        assert streams.call("notifications", "GET", "/limit") == {"capacity": 1, "refill": 0.001}
        jobs = [service.submit("notification.send", email=f"{uuid4()}@example.com", template="news") for _ in range(6)]
        expected = Counter(failed=5, succeeded=1)
        until(lambda: Counter(service.job(each).state for each in jobs) == expected, "one job sent and five limited")
        streams.call("notifications", "PUT", "/limit", {"capacity": 100, "refill": 100})
        service.all_ended(jobs)
    for body in ({"capacity": 0, "refill": 1}, {"capacity": 1, "refill": 0}):
        streams.call("notifications", "PUT", "/limit", body, status=422)


@pytest.mark.parametrize(
    "body",
    [
        '{"capacity": Infinity, "refill": 1}',
        '{"capacity": 1e999, "refill": 1}',
        '{"capacity": "inf", "refill": 1}',
        '{"capacity": 1e308, "refill": 1}',
        '{"capacity": 1, "refill": 1e308}',
        '{"capacity": 1, "refill": 1e-320}',
        '{"capacity": true, "refill": 1}',
        '{"capacity": "7", "refill": 1}',
        '{"capacity": 1, "refill": 1, "burst": 1}',
    ],
)
def test_limit_out_of_bounds_is_refused(streams: Streams, body: str) -> None:
    url, headers = f"{streams.urls['notifications']}/limit", {"Content-Type": "application/json"}
    refused = httpx.put(url, content=body, headers=headers, timeout=PATIENCE)
    assert (refused.status_code, type(refused.json()["detail"])) == (422, str)
    assert streams.call("notifications", "GET", "/limit") == UNLIMITED
