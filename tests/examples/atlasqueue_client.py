"""``python -m tests.examples.atlasqueue_client NUMBER``: submits jobs under the keys key-0, key-1, …, eight at a time.

It logs as the API will; the lines of jobs it created are its account of the answers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from atlasqueue.app import app

from holdfast.telemetry.logs import configure_logs


async def submit(keys: Iterator[str]) -> None:
    """One after another, while there are keys."""
    for key in keys:
        await app.enqueue("noop", {}, key=key)


async def main(number: int) -> None:
    """Submit that many."""
    keys = (f"key-{each}" for each in range(number))
    async with app:
        await asyncio.gather(*(submit(keys) for _ in range(8)))


if __name__ == "__main__":
    finish = configure_logs(app.settings, app.events)
    try:
        asyncio.run(main(int(sys.argv[1])))
    finally:
        finish()
