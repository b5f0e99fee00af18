"""``python -m tests.examples.racer FOLDER NAME ROUNDS``: claims as fast as it can; one round a line of stdin."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from queuectl.app import open_app
from queuectl.config import Place

from holdfast.stores.base import ClaimRequest


async def race(folder: Path, name: str, rounds: int) -> None:
    """Each round: wait for the starting shot, claim, say what came of it."""
    async with open_app(Place(folder / "queuectl.db", folder / "queuectl.json")) as app:
        store = await app.open_store()
        print("ready", flush=True)
        for _ in range(rounds):
            sys.stdin.readline()
            claim = await store.queueing.claim(ClaimRequest(name, {"*": 1}, limit=1, lease_for=app.settings.lease))
            print(len(claim.jobs), flush=True)


if __name__ == "__main__":
    asyncio.run(race(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
