"""Holdfast: a durable job queue. You give it work; it never lets go of it.

from holdfast import Holdfast

app = Holdfast("sqlite:///holdfast.db")

@app.task("email.send")
async def send_email(to: str, subject: str) -> str: ...

job = await send_email.enqueue("a@b.c", subject="hi")
print(await job.result(timeout=30))
"""

from typing import TYPE_CHECKING

from holdfast.app import CallNext, Holdfast, JobHandle, Middleware
from holdfast.app.in_process import InProcessWorker
from holdfast.app.workflows import chain_jobs
from holdfast.core.dependencies import Dependency
from holdfast.core.errors import (
    ConfigError,
    Conflict,
    DecryptionFailed,
    ForkedConnection,
    HoldfastError,
    Invalid,
    JobCancelled,
    JobFailed,
    JobOutcome,
    LeaseLost,
    NotFound,
    QueueFull,
    RateLimited,
    ResultTimeout,
    StoreMismatch,
    StoreReplaced,
    TooLarge,
    Unavailable,
    WaitTimeout,
)
from holdfast.core.lifecycle import Dead, RetryAfter, Snooze
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.resources import Resources
from holdfast.core.retry import Retry
from holdfast.core.unique import Unique
from holdfast.settings.settings import Settings
from holdfast.tasks import Context, current_job, provided
from holdfast.telemetry.trace_context import JobFields, add_job_fields

if TYPE_CHECKING:
    from holdfast.worker.worker import Worker

__all__ = [
    "CallNext",
    "ConfigError",
    "Conflict",
    "Context",
    "Dead",
    "DecryptionFailed",
    "Dependency",
    "ForkedConnection",
    "Holdfast",
    "HoldfastError",
    "InProcessWorker",
    "Invalid",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobFields",
    "JobFilter",
    "JobHandle",
    "JobOutcome",
    "JobState",
    "LeaseLost",
    "Middleware",
    "NotFound",
    "QueueFull",
    "RateLimited",
    "Resources",
    "ResultTimeout",
    "Retry",
    "RetryAfter",
    "Settings",
    "Snooze",
    "StoreMismatch",
    "StoreReplaced",
    "TooLarge",
    "Unavailable",
    "Unique",
    "WaitTimeout",
    "add_job_fields",
    "chain_jobs",
    "current_job",
    "provided",
]

if not TYPE_CHECKING:  # to a type checker, other names are errors as ever

    def __getattr__(name: str) -> object:
        """Explains a name that Celery has: ``from holdfast import chain`` shows only an ImportError's own text."""
        from holdfast.app.registration import PEER_NAMES

        if name in ("AsyncResult", "Celery", "shared_task", "chain", "group", "chord", "crontab"):
            raise ImportError(f"cannot import name {name!r} from 'holdfast'; {PEER_NAMES[name]}")
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def _new_worker(app: Holdfast, settings: Settings, drain: bool) -> "Worker":
    from holdfast.worker.worker import Worker  # programs that only submit do not need it

    return Worker(app, settings=settings, drain=drain)


Holdfast._new_worker = _new_worker
