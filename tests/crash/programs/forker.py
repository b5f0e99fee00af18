"""Forks while a store is open and its threads work. The child finds the parent's store refused and gets its own."""

from __future__ import annotations

import asyncio
import os
import warnings
from pathlib import Path

from holdfast import ForkedConnection, Holdfast
from holdfast.core.models import JobFilter
from holdfast.stores.base import Store
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])


async def parent(app: Holdfast) -> None:
    """Submit, fork, submit again."""
    for _ in range(5):
        append(LEDGER, what="ack", jobs=[(await app.enqueue("crash.note", {})).id])
    store = await app.open_store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: it is what this is about
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = in_child(app, store)
        finally:  # whatever happens: what the parent's event loop holds must not be touched from here
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    append(LEDGER, what="child", code=code)
    for _ in range(5):
        append(LEDGER, what="ack", jobs=[(await app.enqueue("crash.note", {})).id])
    await app.close()


async def count_jobs(store: Store) -> int:
    return await store.query.count(JobFilter())


def in_child(app: Holdfast, store: Store) -> int:
    """0: the parent's store was refused, and the application opened another."""
    asyncio._set_running_loop(None)  # the parent's does not run here
    try:
        app.run_blocking(count_jobs(store))
    except ForkedConnection:
        append(LEDGER, what="ack", jobs=[app.sync.enqueue("crash.note", {}).id])
        return 0
    return 1


if __name__ == "__main__":
    asyncio.run(parent(Holdfast()))
