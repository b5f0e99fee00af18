"""The `streams` example while its processes are killed: gateway, services, workers, Redis and the databases."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from tests.crash.report import Report
from tests.support.plain_http import PLAIN

EXAMPLE = Path(__file__).parents[3] / "examples" / "streams"
SETTINGS = {"HOLDFAST_LEASE": "5s", "HOLDFAST_HEARTBEAT": "1s", "HOLDFAST_SWEEP": "1s", "HOLDFAST_LOG_FORMAT": "json"}
SETTINGS |= {"BUCKET_CAPACITY": "1000", "BUCKET_REFILL": "1000"}
SETTLED, ENDED = 60.0, 200.0
"""Seconds after the last kill by which each job is where its policy puts it, and by which each has ended."""
DOWN = (0.5, 3.0)
"""Seconds for which a killed process stays away."""


def killed_parts(folder: Path, *, users: int, kills: int, seed: int) -> Report:
    """So many users are created through the gateway while parts are killed and started again, one at a time."""
    sys.path.insert(0, str(EXAMPLE))
    rng = random.Random(seed)
    report = Report(figures={"seed": seed, "users": users})
    folder.chmod(0o755)  # the servers may run as another user
    system = importlib.import_module("streams.local.system").System(folder, workers=2, settings=SETTINGS)
    try:
        system.start()
        killed = asyncio.run(_run(report, system, users=users, kills=kills, rng=rng))
    finally:
        system.stop()
    report.expect(not any(process.is_running for process in system.processes), "a process was left behind")
    report.figures |= {"kills": dict(sorted(killed.items()))}
    return report


async def _run(report: Report, system: Any, *, users: int, kills: int, rng: random.Random) -> Counter[str]:
    async with httpx.AsyncClient(timeout=20, verify=PLAIN) as http:
        creating = asyncio.create_task(_create_users(http, system, users, rng))
        killed = await _kill_parts(http, system, kills, rng, creating)
        accepted, repeated = await creating
        last_kill = time.monotonic()
        messages = await _await_ends(report, http, system, accepted, last_kill)
        await _check_effects(report, http, system, accepted, messages, sum(killed.values()))
        report.figures |= {"submissions repeated by the client": repeated}
        return killed


async def _create_users(
    http: httpx.AsyncClient, system: Any, users: int, rng: random.Random
) -> tuple[dict[str, str], int]:
    """Returns the job of each address. Whatever has no answer is submitted again, with the same key."""
    accepted: dict[str, str] = {}
    repeated = 0
    for number in range(users):
        email = f"user{number}@example.com"
        while email not in accepted:
            with suppress(httpx.TransportError):
                answer = await http.post(
                    f"{system.urls['gateway']}/users",
                    json={"email": email, "name": f"User {number}"},
                    headers={"Idempotency-Key": email},
                )
                if answer.status_code == 202:
                    accepted[email] = answer.json()["job_id"]
                    break
            repeated += 1
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        await asyncio.sleep(rng.uniform(0, 0.1))
    return accepted, repeated


async def _kill_parts(
    http: httpx.AsyncClient,
    system: Any,
    kills: int,
    rng: random.Random,
    creating: asyncio.Task[tuple[dict[str, str], int]],
) -> Counter[str]:
    """Kills any part, at random, as long as users are created; the provider is not part of the system."""
    parts = [process for process in system.processes if process.name != "provider"]
    killed: Counter[str] = Counter()
    while sum(killed.values()) < kills:
        await asyncio.sleep(rng.uniform(0.5, 2.0))
        if creating.done():
            creating.result()
        part = rng.choice(parts)
        await asyncio.to_thread(part.kill)
        killed[part.name] += 1
        await asyncio.sleep(rng.uniform(*DOWN))
        await asyncio.to_thread(getattr(part, "start_ready", part.start))
    return killed


async def _await_ends(
    report: Report, http: httpx.AsyncClient, system: Any, accepted: dict[str, str], last_kill: float
) -> dict[str, str]:
    """Waits for the ends of all jobs. Returns the job of each user's message."""
    urls, welcomes = system.urls, dict[str, str]()
    open_jobs, checked = set(accepted.values()), False
    while time.monotonic() - last_kill < ENDED and open_jobs:
        await asyncio.sleep(1)
        if not checked and time.monotonic() - last_kill > SETTLED:
            checked = True
            stuck = [
                job for job in open_jobs if (await _job(http, urls, job))["status"] not in ("failed", "processing")
            ]
            waiting = [job for job in stuck if not await _is_retried(http, urls, job)]
            report.expect(
                not waiting, f"{len(waiting)} jobs were stuck {SETTLED:g} s after the last kill: {waiting[:3]}"
            )
        for job_id in list(open_jobs):
            with suppress(httpx.HTTPError, KeyError):
                job = await _job(http, urls, job_id)
                if job["status"] == "completed":
                    open_jobs.discard(job_id)
                    welcome = (job["result"] or {}).get("welcome_job_id")
                    if welcome is not None:
                        welcomes[job_id] = welcome
                        open_jobs.add(welcome)
                elif job["status"] == "failed":
                    open_jobs.discard(job_id)
                    report.expect(False, f"job {job_id} is a dead letter: {job.get('error')}")
    report.expect(not open_jobs, f"{len(open_jobs)} jobs have not ended after {ENDED:g} s: {sorted(open_jobs)[:3]}")
    report.figures |= {"seconds until all had ended": round(time.monotonic() - last_kill, 1)}
    return welcomes


async def _job(http: httpx.AsyncClient, urls: dict[str, str], job_id: str) -> dict[str, Any]:
    answer = await http.get(f"{urls['gateway']}/jobs/{job_id}")
    answer.raise_for_status()
    job: dict[str, Any] = answer.json()
    return job


async def _is_retried(http: httpx.AsyncClient, urls: dict[str, str], job_id: str) -> bool:
    """Whether a job that has not started again waits for a retry of its policy, or runs or has ended by now."""
    job = await _job(http, urls, job_id)
    return job["status"] in ("processing", "completed", "failed") or job.get("attempts", 0) > 0


async def _check_effects(
    report: Report,
    http: httpx.AsyncClient,
    system: Any,
    accepted: dict[str, str],
    welcomes: dict[str, str],
    interruptions: int,
) -> None:
    users = Counter(await _read(system.databases["users"].url, "select email from users where status = 'active'"))
    wanted = Counter(list(accepted))
    report.expect(users == wanted, f"users: {_difference(users, wanted)}")
    accounts = await _read(system.databases["users"].url, "select count(*)::text from accounts")
    report.expect(accounts == [str(len(accepted))], f"{accounts} accounts for {len(accepted)} users")
    deliveries = Counter(await _read(system.databases["notifications"].url, "select job_id::text from deliveries"))
    report.expect(deliveries == Counter(welcomes.values()), "deliveries are not one for each welcome message")
    calls = Counter(call["key"] for call in (await http.get(f"{system.urls['provider']}/calls")).json())
    repeats = sum(calls.values()) - len(calls)
    report.expect(set(calls) == set(welcomes.values()), f"calls for {len(calls)} messages, not {len(welcomes)}")
    report.expect(max(calls.values(), default=0) <= 1 + interruptions, "a message was repeated without an interruption")
    report.figures |= {"messages": len(calls), "calls repeated": repeats}


async def _read(url: str, query: str) -> Sequence[str]:
    connection = await asyncpg.connect(url)
    try:
        return [str(row[0]) for row in await connection.fetch(query)]
    finally:
        await connection.close()


def _difference(found: Counter[str], expected: Counter[str]) -> str:
    missing, further = expected - found, found - expected
    return f"{len(missing)} are missing, such as {sorted(missing)[:2]}; {sorted(further)[:2]} are too many"
