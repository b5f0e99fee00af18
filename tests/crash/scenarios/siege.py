"""Whatever others may do to a Redis while a fleet works there: RELIABILITY F27, F28, B84."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from holdfast.stores import open_store
from holdfast.stores.base import Store
from tests.crash.report import Report
from tests.crash.scenarios.kinds import REDIS
from tests.crash.scenarios.load import DRAINED, Load
from tests.crash.scenarios.submitting import await_quiet
from tests.support.keys import Keys

BETWEEN = 0.05  # seconds between two assaults, at most
LISTS, SORTED = ("ready", "ready@3", "ready:mail"), ("schedule", "leases", "quarantine:default", "ended:dead")
STRUCTURES = (*LISTS, *SORTED, "priorities:default", "tombstones", "outlived", "paused", "due", "ended:cancelled")
CALLS = 12  # a time, of which some are cancelled
FAR = timedelta(hours=1)
STEPS = 60  # turns of the event loop after which a call may be cancelled, at most


def siege(folder: Path, *, assaults: int, within: float, seed: int) -> Report:
    """Scripts are flushed and connections killed, unknown ids and keys of another type appear where ours belong, and
    calls are cancelled in the middle: every answer is true, and everything ends."""
    rng = random.Random(seed)
    with REDIS.start() as server, Load(folder, lambda _: nullcontext(REDIS.url(server))) as load:
        keys = Keys(REDIS.url(server))
        kinds = _assaults(REDIS.url(server), keys, rng, load.report)
        began = time.monotonic()
        for number in range(assaults):
            kinds[number % len(kinds)]()
            time.sleep(rng.uniform(0.0, BETWEEN))
        load.resumed(began, time.monotonic(), within=within)
        load.report.figures |= {"seed": seed, "assaults": assaults}
        load.stop_submitters()
        _tidied(load)
        keys.client.close()
        return load.judged()


def _assaults(url: str, keys: Keys, rng: random.Random, report: Report) -> Sequence[Callable[[], object]]:
    client: Any = keys.client

    def kill(kind: str) -> None:
        client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def push_nobody() -> None:
        nobody = str(uuid.uuid4()) if rng.random() < 0.5 else "nobody"
        keys.patient(lambda: keys.lpush("ready", nobody))
        keys.patient(lambda: keys.zadd(rng.choice(["schedule", "leases"]), {nobody: 1}))

    def put_another_type() -> None:
        keys.patient(lambda: keys.set(rng.choice(STRUCTURES), "not ours", nx=True))

    return (
        lambda: client.execute_command("SCRIPT", "FLUSH"),
        lambda: kill("normal"),
        lambda: kill("pubsub"),
        push_nobody,
        put_another_type,
        lambda: asyncio.run(_cancelled(url, rng, report)),
    )


async def _cancelled(url: str, rng: random.Random, report: Report) -> None:
    """Calls of one store, some of them cancelled wherever they are: the others get the answers to their questions."""
    async with _opened(url) as store:
        jobs = [NewJob(id=new_id(), task=f"siege.{number}", payload="{}", delay=FAR) for number in range(CALLS)]
        await store.queueing.submit(jobs[::2])
        asked = [asyncio.create_task(_asked(store, job, known=not number % 2)) for number, job in enumerate(jobs)]
        for task in rng.sample(asked, CALLS // 2):
            for _ in range(rng.randrange(STEPS)):
                await asyncio.sleep(0)
            task.cancel()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            failed = isinstance(answer, Exception)
            report.expect(not failed and answer is not False, f"a call beside cancelled ones was answered {answer!r}")
        await store.admin.delete([job.id for job in jobs])


async def _asked(store: Store, job: NewJob, *, known: bool) -> bool:
    """Whether the store answers what was asked: of a job that is there, or of one that it gets."""
    if known:
        found = await store.query.get(job.id)
        return found is not None and (found.id, found.task) == (job.id, job.task)
    return [(each.job_id, each.created) for each in await store.queueing.submit([job])] == [(job.id, True)]


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _tidied(load: Load) -> None:
    """Once everything has ended, a repair takes away what strangers left; there is nothing else to mend after it."""
    await_quiet(load.fleet, DRAINED)

    async def repaired() -> list[str]:
        async with _opened(load.fleet.url) as store:
            await store.health.repair()
            return [each.text for each in await store.health.repair()]

    left = asyncio.run(repaired())
    load.report.expect(not left, f"a second repair found: {left}")
