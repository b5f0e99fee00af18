"""What a worker is called."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from holdfast import Holdfast
from holdfast.core.errors import Unavailable
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat
from tests.worker.support import harness


async def test_named_worker_signs_its_jobs_and_unnamed_mints_one(app: Holdfast) -> None:
    @app.task("quick")
    async def quick() -> None: ...

    names = []
    for given in ("mail-1", "minted", "minted"):
        async with harness(app, worker_id=given) as harnessed:
            job = await quick.enqueue()
            hand = await harnessed.start()
            await harnessed.run_until_idle()
            assert [each.heartbeat.worker for each in await app.workers()] == [hand.worker.id]
            names.append((await job.job()).worker)
    assert names[0] == "mail-1"
    assert len({*names, "minted"}) == 4


async def test_worker_reports_its_memory_and_version(app: Holdfast) -> None:
    for given in ("2.4.1", "none"):
        async with harness(app, app_version=given) as harnessed:
            await harnessed.start()
            (worker,) = await app.workers()
            assert worker.heartbeat.version == (None if given == "none" else given)
            assert 5 << 20 < (worker.heartbeat.memory or 0) < 5 << 30


async def test_command_for_a_dead_worker_of_the_name_is_ignored(app: Holdfast) -> None:
    @app.task("quick")
    async def quick() -> None: ...

    async with harness(app, worker_id="mail-1") as harnessed:
        store = await app.open_store()
        with subprocess.Popen(["true"]) as process:
            dead = WorkerHeartbeat(
                worker="mail-1", host=socket.gethostname(), pid=process.pid, queues="*", concurrency=1
            )
        await store.queueing.heartbeat(dead, [], lease_for=timedelta(seconds=30))
        assert await store.admin.send_command(WorkerCommand.STOP) == ["mail-1"]
        hand = await harnessed.start()
        await harnessed.advance(25)
        job = await quick.enqueue()
        await harnessed.run_until_idle()
        assert await job.state() == "succeeded"
        assert not hand.running.done()


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()], ids=["elsewhere", "here"])
async def test_name_of_a_live_worker_is_refused_until_lease_end(app: Holdfast, host: str) -> None:
    living = WorkerHeartbeat(worker="mail-1", host=host, pid=os.getppid(), queues="*", concurrency=1)
    async with harness(app, worker_id="mail-1") as harnessed:
        store = await app.open_store()
        await store.queueing.heartbeat(living, [], lease_for=timedelta(seconds=30))
        with pytest.raises(Unavailable, match="mail-1 is the name of a living worker"):
            await harnessed.start()
        assert [each.heartbeat.host for each in await app.workers()] == [host]
    async with harness(app, worker_id="mail-1") as harnessed:
        harnessed.clock.advance(31)
        await harnessed.start()
        assert [(each.heartbeat.pid, each.alive) for each in await app.workers()] == [(os.getpid(), True)]


async def test_name_taken_during_start_is_refused_and_resources_closed(app: Holdfast) -> None:
    faster = WorkerHeartbeat(worker="mail-1", host="elsewhere", pid=1, queues="*", concurrency=1)
    seen = []

    @app.lifespan
    @asynccontextmanager
    async def slow(own: Holdfast) -> AsyncIterator[None]:
        await (await own.open_store()).queueing.heartbeat(faster, [], lease_for=timedelta(seconds=30))
        seen.append("opened")
        yield
        seen.append("closed")

    async with harness(app, worker_id="mail-1") as harnessed:
        with pytest.raises(Unavailable, match="mail-1 is the name of a living worker"):
            await harnessed.start()
        assert [each.heartbeat.host for each in await app.workers()] == ["elsewhere"]
    assert seen == ["opened", "closed"]
