"""A worker whose files are removed while it starts ends with that error, and reports it once."""

from __future__ import annotations

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
