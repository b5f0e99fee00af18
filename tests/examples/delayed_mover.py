"""Moves due jobs, a few at a time, in a process of its own for each line of input: ``delayed_mover URL``."""

from __future__ import annotations

import asyncio
import os
import sys

from holdfast.stores import open_store


async def move(url: str) -> None:
    """Say who we are when the first are moved; go on until none is left, and then until killed."""
    store = open_store(url)
    await store.open()
    await store.maintenance.promote_due(limit=2)
    print(os.getpid(), flush=True)
    moved = 2
    while moved:
        moved = await store.maintenance.promote_due(limit=2)
        await asyncio.sleep(0.001)  # on a busy machine, too, the kill comes while there is something left
    await asyncio.Event().wait()


if __name__ == "__main__":
    open_store(sys.argv[1])  # what it imports is there for every child
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            asyncio.run(move(sys.argv[1]))
        os.waitpid(child, 0)
        print("gone", flush=True)
