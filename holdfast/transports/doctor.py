"""Findings about a transport, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import HoldfastError
from holdfast.core.models import Finding, JobState, QueueInfo
from holdfast.transports.contract import Transport

_REMEDY = "until it is back, workers poll the store; check transport_url and that server"


async def run_checks(transport: Transport, queues: Sequence[QueueInfo]) -> list[Finding]:
    """Checks that the transport is usable, and compares its ids with the ready jobs."""
    names = [queue.name for queue in queues]
    try:
        await transport.probe()
        backlog = await transport.queue_backlogs(names)
    except HoldfastError as error:
        return [Finding("transport", "error", str(error), _REMEDY)]
    ready = sum(queue.states.get("queued", 0) for queue in queues)
    more = "at least " if any(JobState.QUEUED in queue.at_least for queue in queues) else ""
    text = f"{transport.place} holds {sum(backlog.values()):,} ids for {more}{ready:,} ready jobs"
    return [Finding("transport", "ok", text)]
