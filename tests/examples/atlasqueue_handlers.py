"""Handlers for the tests of the AtlasQueue example, in a module that HANDLER_MODULES names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import asyncpg
from atlasqueue.app import app
from atlasqueue.worker.handlers import register

from holdfast import Context

_meeting = asyncio.Barrier(3)


@register("test.echo")
async def echo(payload: dict[str, Any]) -> dict[str, Any]:
    """What it was given."""
    assert type(payload) is dict
    return payload


@register("test.row")
async def row(payload: dict[str, Any], job: Context) -> dict[str, Any]:
    """What a handler sees of its job."""
    return {"id": job.id, "type": job.job.task, "attempts": job.attempts, "max_attempts": job.max_attempts} | payload


@register("test.fail")
async def fail(payload: dict[str, Any], job: Context) -> int:
    """Fail the first ``times`` attempts, or all; the number of the attempt that did not."""
    if job.attempts <= payload.get("times", job.attempts):
        raise LookupError(payload.get("message", "not today") * payload.get("length", 1))
    return job.attempts


RESULTS: Mapping[str, Any] = MappingProxyType(
    {
        "set": {1, 2},
        "path": Path("a"),
        "object": object(),
        "infinity": float("inf"),
        "keys": {1: 2},
        "long": "x" * 2**21,
        "exact": {"a": [None, True, 1.5, "ü"]},
        "text": "",
    }
)


@register("test.result")
async def result(payload: dict[str, Any]) -> Any:
    """Returns one of ``RESULTS``, most of which JSON cannot hold or which are too long."""
    return RESULTS[payload["name"]]


@register("test.complete")
async def complete(payload: dict[str, Any], job: Context) -> None:
    """End the job in a transaction of its own."""
    connection = await asyncpg.connect(app.settings.url)
    async with connection.transaction():
        await job.complete(connection)
    await connection.close()


@register("test.wait")
async def wait(payload: dict[str, Any]) -> None:
    """Take until there is a file of that name."""
    while not Path(payload["until"]).exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.02)


@register("test.sleep")
async def sleep(payload: dict[str, Any]) -> None:
    """Take that long."""
    await asyncio.sleep(payload["seconds"])


@register("test.meet")
async def meet(payload: dict[str, Any]) -> None:
    """Take until three jobs are here at once."""
    await _meeting.wait()


@register("test.submit")
async def submit(payload: dict[str, Any]) -> list[bool]:
    """Submit a job under each of these keys; whether it is a new one."""
    return [(await app.enqueue("noop", {}, key=key)).created for key in payload["keys"]]


@register("test.paced", per_second=20)
async def paced(payload: dict[str, Any]) -> float:
    """When it began."""
    return time.time()
