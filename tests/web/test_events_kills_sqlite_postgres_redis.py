"""A client that goes on where it was, through kills of the API: no ending is missed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from holdfast import Holdfast
from holdfast.core.lifecycle import Failed, Succeeded
from tests.web.following import end
from tests.web.serving import Served

pytestmark = pytest.mark.timeout(300)

JOBS = 90


def test_no_ending_is_missed_though_the_api_is_killed(home: str, tmp_path: Path) -> None:
    begun = threading.Event()
    expected: Counter[str] = Counter()
    worker = threading.Thread(target=lambda: asyncio.run(_work(home, begun, expected)), daemon=True)
    worker.start()
    seen: Counter[str] = Counter()
    last = ""
    for kill in (20, 40):  # events sent before it
        last = _followed(tmp_path, home, last, seen, begun, lambda kill=kill: len(seen) >= kill)
    worker.join(120)
    _followed(tmp_path, home, last, seen, begun, lambda: len(seen) >= JOBS)

    assert set(seen) == set(expected)
    assert len(expected) == JOBS
    again = seen - expected
    assert again.total() <= 2 * 500  # of the pieces in which it was killed


async def _work(url: str, begun: threading.Event, expected: Counter[str]) -> None:
    """One ending after the other, once a client follows."""
    async with Holdfast(url) as app:
        ids = [(await app.enqueue("work", {})).id for _ in range(JOBS)]
        await asyncio.to_thread(begun.wait, 280)
        for number, job_id in enumerate(ids):
            await end(app, job_id, Failed(error="no", retryable=False) if number % 3 == 0 else Succeeded())
            expected[job_id] += 1
            await asyncio.sleep(0.02)


def _followed(folder: Path, url: str, last: str, seen: Counter[str], begun: threading.Event, enough: object) -> str:
    """Follow from there until it is enough, then kill the API; the id of the last event."""
    assert callable(enough)
    with Served(folder, url) as served, served.client() as client:
        headers = {"Last-Event-ID": last} if last else {}
        with client.stream("GET", "/v1/events", headers=headers) as answer:
            last = _read(answer, last, seen, begun, enough)
        served.kill()
    return last


def _read(answer: httpx.Response, last: str, seen: Counter[str], begun: threading.Event, enough: object) -> str:
    assert callable(enough)
    data = ""
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            last = value
        elif name == "data":
            data = value
        elif not line:
            begun.set()
            if data:
                seen[data.partition('"id":"')[2].partition('"')[0]] += 1
            data = ""
            if enough():
                break
    return last
