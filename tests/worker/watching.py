"""A worker in the test's own event loop, and what its sidecar answers_with."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Holdfast, JobHandle
from holdfast.core.events import Event, MetricsServed
from holdfast.core.models import JobState
from holdfast.worker.metrics_server import MetricsServer
from holdfast.worker.worker import Worker
from tests.support.plain_http import PLAIN

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Watched:
    """A worker in this event loop, and what its sidecar answers_with."""

    def __init__(self, app: Holdfast, **settings: Any) -> None:
        self.app = app
        self.worker = Worker(
            app, settings=app.settings.replace_values(**{"metrics_port": 0, "grace": "0s", **settings})
        )
        self._overseen = MetricsServer(self.worker.shared)
        self._served: list[Event] = []
        app.events.subscribe(self._served.append, MetricsServed)

    async def __aenter__(self) -> Watched:
        self._overseen.__enter__()
        await self.app.__aenter__()
        self._running = asyncio.create_task(self.worker.run())
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.worker.stop()
        await self._running
        await self.app.__aexit__()
        self._overseen.__exit__(None, None, None)

    def fetch(self, path: str) -> tuple[int, str]:
        (served,) = self._served
        assert isinstance(served, MetricsServed)
        answer = httpx.get(served.address + path, timeout=60, verify=PLAIN)
        return answer.status_code, answer.text

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self.fetch, path)

    def lag(self) -> float:
        """Seconds the event loop was found to be late, all together."""
        return self._samples()["loop_lag_seconds_sum", frozenset()]

    async def samples(self) -> Samples:
        return await asyncio.to_thread(self._samples)

    def _samples(self) -> Samples:
        status, text = self.fetch("/metrics")
        assert status == 200
        return {
            (sample.name.removeprefix("holdfast_"), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def status(self, path: str) -> tuple[int, str]:
        code, text = await self.get(path)
        return code, json.loads(text)["status"]


async def until(true: Callable[[], Any | Awaitable[Any]]) -> None:
    while True:
        answer = true()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        await asyncio.sleep(0.02)


async def ended(app: Holdfast, handles: list[JobHandle[Any]]) -> bool:
    return {(await app.get(handle.id)).state for handle in handles} <= {JobState.SUCCEEDED, JobState.DEAD}


async def answers_with(watched: Watched, path: str, code: int, status: str) -> bool:
    return await watched.status(path) == (code, status)
