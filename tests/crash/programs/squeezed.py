"""Submits, and works, while its files may not grow: a full disk, as far as this process can tell.

A limit on the size of files (RLIMIT_FSIZE) makes a write fail in the middle like a full disk does, without one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path
from typing import Any

from holdfast import Holdfast, JobHandle, Unavailable
from holdfast.worker.worker import Worker
from tests.crash.ledger import append
from tests.crash.programs.tasks import app

LEDGER = Path(os.environ["CRASH_LEDGER"])
HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


def squeeze(size: int | None) -> None:
    """Files of this process may be ``size`` bytes long at most; None: as long as before."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (HARD if size is None else size, HARD))


async def submit(app: Holdfast, seconds: float, padding: int) -> JobHandle[Any] | None:
    """Submit one job; None where it was refused."""
    try:
        handle = await app.enqueue("crash.work", {"seconds": seconds}, metadata={"padding": "x" * padding})
    except Unavailable as error:
        append(LEDGER, what="refused", text=str(error))
        return None
    except Exception as error:
        append(LEDGER, what="error", text=f"{type(error).__name__}: {error}")
        return None
    append(LEDGER, what="ack", jobs=[handle.id])
    return handle


async def submitting(size: int) -> None:
    """Submit until nothing goes any more, then on with room again."""
    squeeze(size)
    refused = 0
    while refused < 20:
        refused += await submit(app, 0.0, 4000) is None
    squeeze(None)
    append(LEDGER, what="lifted")
    for _ in range(20):
        await submit(app, 0.0, 4000)
    await app.close()


async def working(size: int) -> None:
    """Work through a while in which nothing can be written."""
    handles = [await submit(app, 0.1, 0) for _ in range(60)]
    worker = Worker(app)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0.5)
    squeeze(size)
    await asyncio.sleep(1.5)
    squeeze(None)
    append(LEDGER, what="lifted")
    for handle in filter(None, handles):
        await handle.result(timeout=40)
    worker.stop()
    await running
    await app.close()


if __name__ == "__main__":
    asyncio.run({"submitting": submitting, "working": working}[sys.argv[1]](int(sys.argv[2])))
