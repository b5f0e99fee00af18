"""Waiting for a job to end, and saying on stderr what keeps it from ending."""

from __future__ import annotations

import time
from typing import Any

from holdfast import Holdfast, JobHandle, JobState
from holdfast.cli.output import print_note
from holdfast.core.deferral import deferral_of, describe_outlook
from holdfast.core.errors import ResultTimeout
from holdfast.core.models import Job
from holdfast.views.explain import serves_queue
from holdfast.views.formatting import clip_text, format_moment

_QUIET = 2.0  # seconds between looks at what keeps the job; a job that ends sooner is waited for in silence


def await_result(app: Holdfast, handle: JobHandle[Any], limit: float | None) -> None:
    """Return when the job has succeeded; JobFailed, JobCancelled, or ResultTimeout after ``limit`` seconds.

    Each remark is made once, when it begins to hold.
    """
    until = None if limit is None else time.monotonic() + limit
    made = None
    while True:
        left = _QUIET if until is None else max(0.0, until - time.monotonic())
        try:
            handle.sync.result(min(left, _QUIET))
        except ResultTimeout:
            job = app.sync.get(handle.id)
            if left <= _QUIET and until is not None:
                outlook = describe_outlook(job)
                raise ResultTimeout(job.id, f"job {job.id} is {job.state} after {limit:g} s; {outlook}") from None
            remark = _remark(app, job)
            if remark is not None and remark != made:
                print_note(f"holdfast: {remark}")
            made = remark
        else:
            return


def _remark(app: Holdfast, job: Job) -> str | None:
    """What keeps a job that has not ended; None where it is only a matter of its turn."""
    if job.state is JobState.RUNNING:
        return None
    if not any(each.alive and serves_queue(each, job.queue) for each in app.sync.workers()):
        return f"no living worker serves queue {job.queue}; start one with `holdfast worker start`"
    if deferral := deferral_of(job):
        return (
            f"deferred: worker {job.worker} cannot run it: {clip_text(deferral.cause, 500)}; see: holdfast why {job.id}"
        )
    if job.error is None or not job.attempts:
        return None
    error = (job.error.splitlines() or [""])[0]
    return f"attempt {job.attempts} failed: {error}; next at {format_moment(job.run_at_us)}"
