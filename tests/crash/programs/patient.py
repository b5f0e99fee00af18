"""Submits jobs until it is stopped, through a store that comes and goes: ``patient MODE NAME``.

What was not acknowledged is submitted again under its key, as a careful application does. A job without a key is given
up instead: it is unknown whether it was stored.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import Holdfast, JobHandle, Unavailable
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])
TASK = "crash.work"
SECONDS = 0.1
"""What each job takes."""
ATTEMPTS = 25
"""As many as trouble may cost; none of these jobs is to fail."""
BATCH = 10
PAUSE = 0.1
"""Seconds a job: what each submitter submits in a second is 1 / PAUSE."""
AGAIN = 0.1  # seconds until the next try

stopping = threading.Event()


def given(name: str, index: int) -> dict[str, Any]:
    """The payload: who submitted it, and which of theirs it is."""
    return {"seconds": SECONDS, "by": name, "index": index}


def away(error: Unavailable, began: float) -> None:
    """Write down that the store was not there, and how long it took to hear that."""
    append(LEDGER, what="unavailable", text=str(error), seconds=time.monotonic() - began)


def acknowledged(name: str, index: int, handle: JobHandle[Any], key: str | None) -> None:
    append(LEDGER, what="ack", by=name, index=index, jobs=[handle.id], key=key)


def isolated(app: Holdfast, name: str, *, keyed: bool) -> None:
    """One after the other."""
    for index in itertools.count():
        key = f"{name}-{index}" if keyed else None
        handle = None
        while handle is None:
            began = time.monotonic()
            try:
                handle = app.sync.enqueue(
                    TASK, given(name, index), max_attempts=ATTEMPTS, **({"key": key} if keyed else {})
                )
            except Unavailable as error:
                away(error, began)
                if not keyed:
                    append(LEDGER, what="doubt", by=name, index=index)
                    break
                stopping.wait(AGAIN)
        if handle is not None:
            acknowledged(name, index, handle, key)
        if stopping.wait(PAUSE):
            return


async def together(app: Holdfast, name: str, *, bulk: bool) -> None:
    """In batches of one transaction each, or concurrently one by one."""
    await again(app.open_store)
    async with app:
        for first in itertools.count(0, BATCH):
            numbers = range(first, first + BATCH)
            keys = [f"{name}-{index}" for index in numbers]
            drafts = [
                app.draft_job(TASK, given(name, index), max_attempts=ATTEMPTS, key=key)
                for index, key in zip(numbers, keys, strict=True)
            ]
            if bulk:
                handles: Sequence[JobHandle[Any]] = await again(partial(app.enqueue_many, drafts))
            else:
                handles = await asyncio.gather(*[again(partial(app.submit, draft)) for draft in drafts])
            for index, handle, key in zip(numbers, handles, keys, strict=True):
                acknowledged(name, index, handle, key)
            if stopping.is_set():
                return
            await asyncio.sleep(PAUSE * BATCH)


async def again(send: Callable[[], Awaitable[Any]]) -> Any:
    """Try until the store has acknowledged it."""
    while True:
        began = time.monotonic()
        try:
            return await send()
        except Unavailable as error:
            away(error, began)
            await asyncio.sleep(AGAIN)


def main(mode: str, name: str) -> None:
    """Submit until stopped."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    app = Holdfast()
    if mode in ("keyed", "plain"):
        isolated(app, name, keyed=mode == "keyed")
    else:
        asyncio.run(together(app, name, bulk=mode == "bulk"))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except Exception as error:
        append(LEDGER, what="error", text=f"{type(error).__name__}: {error}")
        raise
