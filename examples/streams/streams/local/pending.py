"""Pending entries of a service's stream: XPENDING, beside what PostgreSQL knows of their jobs."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from holdfast import Holdfast, Invalid, NotFound, Settings
from streams.local.note import read_service_settings

GROUP = "holdfast"
MAX_ENTRIES = 100


def show_pending(service: str) -> None:
    """Prints the entries that a worker has taken and not acknowledged, the oldest first."""
    note = read_service_settings(service)
    settings = Settings.load(
        path=note["HOLDFAST_CONFIG"], url=note["HOLDFAST_URL"], transport_url=note["HOLDFAST_TRANSPORT_URL"]
    )
    table = asyncio.run(pending_table(Holdfast(settings=settings)))
    Console(width=160).print(table)


async def pending_table(app: Holdfast) -> Table:
    """Returns a row for each pending entry. An entry whose consumer is silent for a lease goes to another worker."""
    key = app.settings.transport_key
    table = Table(title=f"XPENDING {key} {GROUP}", title_justify="left")
    for column in ("entry", "job", "consumer", "idle s", "deliveries", "state", "attempts", "worker", "lease until"):
        table.add_column(column, overflow="fold")
    async with app, Redis.from_url(app.settings.transport_url, decode_responses=True) as redis:
        if not await redis.exists(key):
            return table
        for entry in await redis.xpending_range(key, GROUP, "-", "+", MAX_ENTRIES):
            found = await redis.xrange(key, entry["message_id"], entry["message_id"])
            job_id = found[0][1].get("id", "") if found else ""
            idle, times = f"{entry['time_since_delivered'] / 1000:.1f}", str(entry["times_delivered"])
            table.add_row(entry["message_id"], job_id, entry["consumer"], idle, times, *await describe_job(app, job_id))
    return table


async def describe_job(app: Holdfast, job_id: str) -> list[str]:
    """Returns state, attempts, worker and lease of a job; dashes for an id without a job."""
    try:
        job = await app.get(job_id)
    except (NotFound, Invalid):
        return ["-"] * 4
    lease = f"{job.lease_until:%H:%M:%S}" if job.lease_until else "-"
    return [str(job.state), str(job.attempts), job.worker or "-", lease]
