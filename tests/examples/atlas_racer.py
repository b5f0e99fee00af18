"""``python -m tests.examples.atlas_racer URL NAME``: at each line of stdin claims what it can get; tells the ids."""

from __future__ import annotations

import asyncio
import random
import sys

from holdfast import Holdfast
from holdfast.stores.base import ClaimRequest


async def race(url: str, name: str) -> None:
    """Each round: wait for the starting shot, claim until there is nothing left, say what came of it."""
    chance = random.Random(name)
    async with Holdfast(url) as app:
        store = await app.open_store()
        print("ready", flush=True)
        while sys.stdin.readline():
            won: list[str] = []
            while True:
                limit = chance.randint(1, 4)
                claim = await store.queueing.claim(
                    ClaimRequest(name, {"*": limit}, limit=limit, lease_for=app.settings.lease)
                )
                if not claim.jobs:
                    break
                won += [job.id for job in claim.jobs]
            print(*won, flush=True)


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], sys.argv[2]))
