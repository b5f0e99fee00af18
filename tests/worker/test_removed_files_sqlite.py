"""A worker whose files are removed while it starts or works ends with that error, and reports it once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.errors import StoreReplaced
from holdfast.core.events import StoreTrouble, WorkerStarted
from holdfast.worker.worker import Worker
from tests.worker.support import Recorder


async def test_removal_before_the_first_write_is_the_error_itself(app: Holdfast) -> None:
    events = Recorder(app)
    shm = Path(app.settings.url.removeprefix("sqlite:///") + "-shm")
    app.events.subscribe(lambda started: shm.unlink(), WorkerStarted)
    app.limit("api", queue="default", concurrency=1)
    with pytest.raises(StoreReplaced, match=r"-shm was removed"):
        await Worker(app).run()
    assert not [trouble for trouble in events.of(StoreTrouble) if trouble.service == "worker"]
    await app.close()


async def test_removal_that_only_the_heartbeat_notices_is_the_error_itself(app: Holdfast) -> None:
    shm = Path(app.settings.url.removeprefix("sqlite:///") + "-shm")

    @app.task("removes")
    async def removes() -> None:
        shm.unlink()
        (heartbeat,) = (thread for thread in threading.enumerate() if thread.name == "holdfast-heartbeat")
        heartbeat.join(60)  # blocks the event loop, so that no other service asks the store

    await removes.enqueue()
    with pytest.raises(StoreReplaced, match=r"-shm was removed"):
        await Worker(app, settings=app.settings.replace_values(lease="3s", heartbeat="1s", grace="0s")).run()
    await app.close()
