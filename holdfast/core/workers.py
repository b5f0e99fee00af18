"""Workers as their store knows them: heartbeats, commands, and the state of their leases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import msgspec


class LeaseStatus(StrEnum):
    """Status of a lease after a heartbeat."""

    HELD = "held"
    CANCEL = "cancel"
    LOCKED = "locked"  # not renewed: another transaction has locked the job; retry, it is still held
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
    version: str | None = None
    """Version of the application; None: it does not say."""
    memory: int | None = None
    """Resident bytes of the process; None: it does not say."""
    has_deltas: bool = False
    """True: ``succeeded`` and ``failed`` are added to what is stored, again where an answer was lost. Not kept."""
    interval: timedelta | None = None
    """Time to its next heartbeat; None: it does not say. Not kept."""

    def alive_for(self, lease_for: timedelta) -> timedelta:
        """Returns how long it counts as alive without another heartbeat: for three of them, at most for its lease."""
        return lease_for if self.interval is None else min(lease_for, self.interval * 3)

    def to_row(self) -> dict[str, Any]:
        """Returns the fields that a store keeps."""
        fields = msgspec.structs.asdict(self)
        del fields["interval"], fields["has_deltas"]
        return fields


class HeartbeatReply(msgspec.Struct, frozen=True):
    """``statuses``: those of the leases, in the order of the request."""

    statuses: list[LeaseStatus]
    command: WorkerCommand = WorkerCommand.NONE


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker process."""

    heartbeat: WorkerHeartbeat
    started_at_us: int
    seen_at_us: int
    alive: bool  # its last heartbeat is younger than its lease, and than three heartbeats
    command: WorkerCommand


def worker_of(row: Sequence[Any]) -> WorkerInfo:
    """Returns a worker from the row of an SQL store."""
    worker, host, pid, queues, concurrency, running, succeeded, failed, version, memory, *rest = row
    started_at_us, seen_at_us, alive, command = rest
    heartbeat = WorkerHeartbeat(
        worker=worker,
        host=host,
        pid=pid,
        queues=queues,
        concurrency=concurrency,
        running=running,
        succeeded=succeeded,
        failed=failed,
        version=version,
        memory=memory,
    )
    return WorkerInfo(
        heartbeat=heartbeat,
        started_at_us=started_at_us,
        seen_at_us=seen_at_us,
        alive=bool(alive),
        command=WorkerCommand(command),
    )


def serves_queue(worker: WorkerInfo, queue: str) -> bool:
    """Returns True if this worker takes jobs of the queue. A remote worker with a restricted key reports patterns."""
    names = [name.partition(":")[0].strip() for name in worker.heartbeat.queues.split(",")]
    return worker.command is WorkerCommand.NONE and any(fnmatchcase(queue, name) for name in names)
