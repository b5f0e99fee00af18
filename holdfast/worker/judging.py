"""What settings and application say of a failed job: its retry policy, and what a task is that nobody knows."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.app import Holdfast
from holdfast.config import Settings
from holdfast.errors import Invalid
from holdfast.events import RetryUnreadable, TaskUnknown
from holdfast.job import Job, Reason
from holdfast.lifecycle import Failed
from holdfast.retry import Retry
from holdfast.values import nearest

_TOLD = 1000  # names of tasks that are told not to be there


def backoff_of(job: Job, app: Holdfast, settings: Settings) -> Retry:
    """The retry policy of a job: its own, its task's, or the settings'."""
    own = job.carried.retry
    if own is not None:
        try:
            return Retry.from_builtins(own)
        except Invalid as error:  # of a newer version, or spoiled: the job is not to stay for it
            app.events.emit(RetryUnreadable(job_id=job.id, job_type=job.task, error=str(error)))
    task = app.registry.get(job.task)
    return (task.retry if task is not None else None) or settings.retry


class Unknown:
    """The tasks that were met and that a worker does not have; each is told once."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._meant: dict[str, str] = {}  # by the name that was met: what may have been meant

    def failed(self, job: Job, known: Sequence[str], settings: Settings) -> Failed:
        """The failure of a job whose task is none of those the worker knows."""
        listed = (", ".join(known) or "none")[:500]
        if job.task not in self._meant and len(self._meant) < _TOLD:
            self._meant[job.task] = close = nearest(job.task, known)
            remedy = f"register it and restart, or give its application a queue of its own{close}"
            self._app.events.emit(TaskUnknown(job_id=job.id, job_type=job.task, queue=job.queue, remedy=remedy))
        return Failed(
            error=f"no task {job.task!r} is registered in this worker (registered: {listed})"
            + self._meant.get(job.task, ""),
            reason=Reason.NO_HANDLER,
            retryable=settings.unknown_task == "retry",
        )
