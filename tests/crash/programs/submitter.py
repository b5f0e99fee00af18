"""Submits jobs until it is killed: ``submitter MODE NAME FIRST``. Every id is written down once it is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path

from holdfast import Holdfast
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])
TASK = "crash.note"
BATCH = 20


def blocking(app: Holdfast, name: str, first: int, *, keyed: bool) -> None:
    """One after the other, with a key that a later incarnation repeats, or without."""
    for index in itertools.count(first):
        options = {"key": f"{name}-{index}"} if keyed else {}
        handle = app.sync.enqueue(TASK, {"by": name, "index": index}, **options)
        append(LEDGER, what="ack", by=name, index=index, jobs=[handle.id], key=options.get("key"))


async def many(app: Holdfast, name: str, first: int, *, bulk: bool) -> None:
    """In batches of one transaction each, or concurrently one by one."""
    async with app:
        for index in itertools.count(first):
            drafts = [app.draft_job(TASK, {"by": name, "index": index, "part": part}) for part in range(BATCH)]
            if bulk:
                handles = await app.enqueue_many(drafts, batch_size=BATCH)
            else:
                handles = await asyncio.gather(*[app.submit(draft) for draft in drafts])
            append(LEDGER, what="ack", by=name, index=index, jobs=[handle.id for handle in handles], key=None)


def main(mode: str, name: str, first: int) -> None:
    """Submit until killed."""
    app = Holdfast()
    if mode in ("keyed", "blocking"):
        blocking(app, name, first, keyed=mode == "keyed")
    else:
        asyncio.run(many(app, name, first, bulk=mode == "bulk"))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except Exception as error:
        append(LEDGER, what="error", text=f"{type(error).__name__}: {error}")
        raise
