"""Examples that several operations show."""

from __future__ import annotations

from typing import Any

from holdfast.views.documents import ID

_AT = "2030-01-31T08:00:00.000000Z"

JOB: dict[str, Any] = {
    "id": ID,
    "task": "email.send",
    "queue": "default",
    "state": "queued",
    "reason": None,
    "payload": {"to": "a@b.c"},
    "result": None,
    "error": None,
    "priority": 0,
    "attempts": 0,
    "max_attempts": 5,
    "failures": 0,
    "claims": 0,
    "losses": 0,
    "cancelling": False,
    "key": "welcome-42",
    "tags": [],
    "metadata": None,
    "timeout": None,
    "retry": None,
    "worker": None,
    "created_at": _AT,
    "run_at": _AT,
    "started_at": None,
    "lease_until": None,
    "ended_at": None,
}
DEAD_JOB = JOB | {
    "state": "dead",
    "reason": "budget",
    "error": "ConnectionRefusedError: [Errno 111]",
    "attempts": 5,
    "failures": 5,
    "claims": 5,
    "worker": "w-7c1f",
    "started_at": _AT,
    "ended_at": _AT,
}
QUEUE: dict[str, Any] = {
    "name": "default",
    "paused": False,
    "oldest_ready_seconds": 1.25,
    "announced": None,
    "at_least": [],
    "ended_per_second": 0.7,
    "states": {
        "scheduled": 0,
        "waiting": 0,
        "queued": 12,
        "running": 3,
        "failed": 1,
        "succeeded": 210,
        "dead": 0,
        "cancelled": 0,
    },
}
WORKER: dict[str, Any] = {
    "id": "w-7c1f",
    "host": "app-1",
    "pid": 4711,
    "state": "working",
    "queues": "mail:10,default",
    "concurrency": 10,
    "running": 3,
    "succeeded": 210,
    "failed": 1,
    "started_at": _AT,
    "seen_at": _AT,
}
