"""A Redis server that loses the end of its log, and one whose replica takes over: RELIABILITY F06, F21, F52."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from holdfast.core.models import Finding, JobFilter
from holdfast.stores import open_store
from tests.crash.checker import SINCE_A_LOSS
from tests.crash.database import database_of
from tests.crash.report import Report
from tests.crash.scenarios.load import Load
from tests.support.keys import Keys
from tests.support.redis import PASSWORD, Redis
from tests.support.redis_groups import Sentinel, follow, replicated, role_of
from tests.support.servers import until

NAMESPACE = "crash"
DOWN = 1.0  # seconds at most until the server is started again
UNSYNCED = 1.5  # seconds before a power cut from which on anything may be missing
MANY = 5  # power cuts, of which at least one takes what was acknowledged
DOWN_AFTER = 5000  # milliseconds until a sentinel believes that its primary is gone


def power_cuts(folder: Path, *, cuts: int, within: float, seed: int) -> Report:
    """The server's machine loses its power, and the log whatever had not reached the disk: any number of bytes.

    What is left agrees with itself. If a job is missing that was acknowledged, that is reported."""
    rng = random.Random(seed)
    with (
        Redis(password=PASSWORD) as server,
        Load(folder, lambda _: nullcontext(server.url(namespace=NAMESPACE))) as load,
    ):
        gone: set[str] = set()
        missed: list[int] = []
        for _ in range(cuts):
            synced = server.written_log.stat().st_size
            time.sleep(rng.uniform(0.2, UNSYNCED))
            away = time.monotonic()
            server.kill()
            server.cut_log(rng.randint(synced, server.written_log.stat().st_size))
            left, reported_before = _on_disk(server, load.report)
            missing = {job for line in load.fleet.lines("ack") for job in line["jobs"]} - left - gone
            time.sleep(rng.uniform(0.0, DOWN))
            server.start()
            load.resumed(away, time.monotonic(), within=within)
            reported = _reported_losses(server) > reported_before
            load.report.expect(reported or not missing, f"{len(missing)} acknowledged jobs are gone and not reported")
            gone |= missing
            missed.append(len(missing))
        load.report.expect(cuts < MANY or any(missed), "no cut took anything: the report of lost_leases was not tried")
        load.report.figures |= {
            "seed": seed,
            "power cuts": cuts,
            "acknowledged jobs gone": sum(missed),
            "cuts with such a loss": sum(map(bool, missed)),
            "lost writes reported": _reported_losses(server),
        }
        return load.judged(SINCE_A_LOSS, gone=gone)


def _is_primary(server: Redis) -> bool:
    return role_of(server)[0] == b"master"


def _on_disk(server: Redis, report: Report) -> tuple[set[str], int]:
    """State of a server that is down, for its restart: its jobs, and the number of lost writes reported.

    Nothing there contradicts anything else, for any reader."""
    with server.copy() as copy:
        url = copy.url(namespace=NAMESPACE)
        keys, reported = Keys(url), _reported_losses(copy)
        strays = list(keys.strays())
        report.expect(not strays, f"the log's head does not agree with itself: {strays[:3]}")
        jobs = set(keys.jobs())
        keys.client.close()
        counted, agreement, mended = asyncio.run(_examined(url))
        report.expect(counted == len(jobs), f"{counted} jobs are counted and {len(jobs)} are there")
        report.expect(agreement.level == "ok", f"the doctor says: {agreement.text}")
        report.expect(not mended, f"a repair found: {[each.text for each in mended]}")
        return jobs, reported


async def _examined(url: str) -> tuple[int, Finding, list[Finding]]:
    """How many jobs are counted, what the doctor says of the structures, and what a repair did."""
    store = open_store(url)
    await store.open()
    counted, findings = await store.query.count(JobFilter()), await store.health.doctor()
    mended = await store.health.repair()
    await store.close()
    return counted, next(each for each in findings if each.name == "structures"), mended


def _reported_losses(server: Redis) -> int:
    """How many lost writes the server knows of."""
    return int(server.execute("HGET", f"{{{NAMESPACE}}}:meta", "lost") or 0)


def takeovers(folder: Path, *, count: int, within: float, seed: int) -> Report:
    """The primary is killed and a sentinel promotes its replica; what was the primary becomes the replica.

    Nothing is acknowledged that the replica has not got, and everybody goes on within so many seconds."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        settings = {"appendfsync": "everysec"}
        primary, replica = stack.enter_context(replicated(password=PASSWORD, settings=settings))
        sentinel = stack.enter_context(Sentinel(primary, down_after=DOWN_AFTER))
        url = sentinel.url(namespace=NAMESPACE, replicas="1")
        load = stack.enter_context(Load(folder, lambda _: nullcontext(url), direct=primary.url(namespace=NAMESPACE)))
        for _ in range(count):
            sentinel.await_order(primary, replica)
            time.sleep(rng.uniform(0.2, 1.0))
            away = time.monotonic()
            primary.kill()
            until(partial(_is_primary, replica), "the replica to be promoted")
            load.fleet.database = database_of(replica.url(namespace=NAMESPACE))
            primary.start()
            follow(primary, replica)
            load.resumed(away, time.monotonic(), within=within)
            primary, replica = replica, primary
        load.report.figures |= {"seed": seed, "takeovers": count}
        return load.judged(SINCE_A_LOSS)
