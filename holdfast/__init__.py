"""Holdfast: a durable job queue. You give it work; it never lets go of it.

from holdfast import Holdfast

app = Holdfast("sqlite:///holdfast.db")

@app.task("email.send")
async def send_email(to: str, subject: str) -> str: ...

job = await send_email.enqueue("a@b.c", subject="hi")
print(await job.result(timeout=30))
"""

from holdfast.app import CallNext, Holdfast, JobHandle, Middleware
from holdfast.app.workflows import chain_jobs
from holdfast.core.dependencies import Dependency
from holdfast.core.errors import (
    ConfigError,
    Conflict,
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
)
from holdfast.core.lifecycle import Dead, RetryAfter, Snooze
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.resources import Resources
from holdfast.core.retry import Retry
from holdfast.core.unique import Unique
from holdfast.settings.settings import Settings
from holdfast.tasks import Context, current_job, provided
from holdfast.telemetry.trace_context import JobFields, add_job_fields

__all__ = [
    "CallNext",
    "ConfigError",
    "Conflict",
    "Context",
    "Dead",
    "Dependency",
    "ForkedConnection",
    "Holdfast",
    "HoldfastError",
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
    "add_job_fields",
    "chain_jobs",
    "current_job",
    "provided",
]
