"""Workers as their store knows them: heartbeats, commands, and the state of their leases."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec


class LeaseStatus(StrEnum):
    """Status of a lease after a heartbeat."""

    HELD = "held"
    CANCEL = "cancel"
    LOST = "lost"


class WorkerCommand(StrEnum):
    """Commands that an operator sends to a worker."""

    NONE = "none"
    DRAIN = "drain"  # run until the queues are empty, then stop
    STOP = "stop"  # let running jobs finish within the grace period, then stop


class WorkerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """State of a worker process, sent with each heartbeat."""

    worker: str
    host: str
    pid: int
    queues: str
    concurrency: int
    running: int = 0
    succeeded: int = 0
    failed: int = 0


class HeartbeatReply(msgspec.Struct, frozen=True):
    """``statuses``: those of the leases, in the order of the request."""

    statuses: list[LeaseStatus]
    command: WorkerCommand = WorkerCommand.NONE


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker process."""

    heartbeat: WorkerHeartbeat
    started_at_us: int
    seen_at_us: int
    alive: bool  # its last heartbeat is younger than a lease
    command: WorkerCommand


def serves_queue(worker: WorkerInfo, queue: str) -> bool:
    """Returns True if this worker takes jobs of the queue. A remote worker with a restricted key reports patterns."""
    names = [name.partition(":")[0].strip() for name in worker.heartbeat.queues.split(",")]
    return worker.command is WorkerCommand.NONE and any(fnmatchcase(queue, name) for name in names)
