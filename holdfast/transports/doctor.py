"""How a transport is, each finding with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import HoldfastError
from holdfast.core.models import Finding, JobState, QueueInfo
from holdfast.transports.contract import Transport

_REMEDY = "until it is back, workers poll the store; check transport_url and that server"


async def run_checks(transport: Transport, queues: Sequence[QueueInfo]) -> list[Finding]:
    """Whether it can be used, and how many ids it holds beside how many jobs are ready."""
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
