"""Holdfast: a durable job queue. You give it work; it never lets go of it.

from holdfast import Holdfast

app = Holdfast("sqlite:///holdfast.db")

@app.task("email.send")
async def send_email(to: str, subject: str) -> str: ...

job = await send_email.enqueue("a@b.c", subject="hi")
print(await job.result(timeout=30))
"""

from holdfast.app import Holdfast, JobHandle
from holdfast.config import Settings
from holdfast.errors import (
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
    ResultTimeout,
    StoreMismatch,
    StoreReplaced,
    TooLarge,
    Unavailable,
)
from holdfast.job import Job, JobFilter, JobState
from holdfast.observe.fields import JobFields, add_job_fields
from holdfast.retry import Retry
from holdfast.signals import Dead, RetryAfter, Snooze
from holdfast.task import Context, current_job, provided

__all__ = [
    "ConfigError",
    "Conflict",
    "Context",
    "Dead",
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
    "NotFound",
    "ResultTimeout",
    "Retry",
    "RetryAfter",
    "Settings",
    "Snooze",
    "StoreMismatch",
    "StoreReplaced",
    "TooLarge",
    "Unavailable",
    "add_job_fields",
    "current_job",
    "provided",
]
