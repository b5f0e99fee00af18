"""Several programs come to a new file at the same moment."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.stores import open_store


def test_opening_a_file_that_another_creates_waits(tmp_path: Path) -> None:
    """SQLite itself refuses at once to turn a file to WAL that is written to, whatever the timeout says."""
    path = tmp_path / "holdfast.db"
    ended = threading.Event()
    troubles: list[HoldfastError] = []

    async def come() -> None:
        store = open_store(f"sqlite:///{path}")
        try:
            await store.open()
        finally:
            await store.close()

    def coming() -> None:
        try:
            asyncio.run(come())
        except HoldfastError as error:
            troubles.append(error)
        ended.set()

    with closing(sqlite3.connect(path, isolation_level=None)) as maker:
        maker.execute("create table customer (name text)")
        maker.execute("begin immediate")
        opener = threading.Thread(target=coming)
        opener.start()
        came_early = ended.wait(0.1)
        maker.execute("commit")
    opener.join(60)
    assert troubles == []
    assert not came_early
