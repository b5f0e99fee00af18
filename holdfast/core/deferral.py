"""Deferral of a job that its worker cannot run: its text in the job's error, written and read back."""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from holdfast.core.lifecycle import UNFIT
from holdfast.core.models import Job

_ERROR = re.compile(r"deferred since (\S+Z): (?:Invalid: )?(.*)", re.DOTALL)


class Deferral(msgspec.Struct, frozen=True):
    """A deferral: when it began, and why the latest worker could not run the job."""

    since: datetime
    cause: str


def deferral_error(since: datetime, error: str) -> str:
    """The error text of a job that is deferred since that instant."""
    return f"deferred since {since.isoformat().replace('+00:00', 'Z')}: {error}"


def deferral_of(job: Job) -> Deferral | None:
    """The deferral of a job; None if its latest try was something else."""
    found = _ERROR.match(job.error or "") if job.reason in UNFIT else None
    try:
        return found and Deferral(datetime.fromisoformat(found[1]), found[2])
    except ValueError:
        return None


def describe_outlook(job: Job) -> str:
    """Words for the outlook of a job that has not ended."""
    if deferral_of(job) is None:
        return "it goes on"
    return f"it is deferred, because its worker cannot run it; see: holdfast why {job.id}"


def correct_arguments(job_id: str, *, deferred: bool) -> str:
    """The commands that run a job with corrected arguments. Replay refuses a job that is still deferred."""
    first = f"holdfast cancel {job_id}, then " if deferred else ""
    return f"to correct its arguments: {first}holdfast replay {job_id} --payload '{{...}}'"
