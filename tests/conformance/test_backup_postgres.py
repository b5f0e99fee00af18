"""A queue that is dumped and restored with PostgreSQL's own programs: every job is there, and what ran runs again."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import ConfigError
from holdfast.core.models import JobState
from holdfast.stores import open_store
from tests.conformance.support import lose_all, new_job, put, running, settle, state_of, stored, take_ids
from tests.support import postgres
from tests.support.postgres import installed


def command(line: str) -> None:
    words = shlex.split(line)
    subprocess.run([installed(postgres.MAIN) / "bin" / words[0], *words[1:]], check=True, timeout=60)


async def test_what_backup_advises_makes_a_copy_that_works(clock: ManualClock, tmp_path: Path) -> None:
    server = postgres.shared()
    with server.fresh_schema() as schema:
        store = open_store(server.url(schema=schema, pooled=1), now=clock)
        await store.open()
        interrupted, done = await running(store), await running(store)
        (waiting,) = await put(store, new_job(key="waiting"))
        await settle(store, done)
        with pytest.raises(ConfigError, match="pg_dump") as caught:
            await store.health.backup(str(tmp_path / "queue.dump"))
        advice = str(caught.value)
        command(advice[advice.index("pg_dump") :])
        await store.close()

        target = server.create_database()
        command(f"pg_restore --exit-on-error --no-owner --dbname='{server.url(target)}' {tmp_path / 'queue.dump'}")

        copy = open_store(server.url(target, schema=schema), now=clock)
        await copy.open()
        assert await copy.migrate() == []
        assert await take_ids(copy) == [waiting]
        assert (await copy.queueing.submit([new_job(key="waiting")]))[0].job_id == waiting
        assert await state_of(copy, done.id) is JobState.SUCCEEDED
        assert (await stored(copy, interrupted.id)).state is JobState.RUNNING
        assert set(await lose_all(copy, clock)) == {interrupted.id, waiting}  # their leases ran out, as after any crash
        await copy.close()
