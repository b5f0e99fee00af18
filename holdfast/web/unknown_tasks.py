"""Submissions of tasks that the application of this API does not have: taken, and told once for each name."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.app import Holdfast
from holdfast.core.events import TaskUnknown
from holdfast.core.models import NewJob
from holdfast.core.validation import nearest
from holdfast.tasks.command_policy import COMMAND

_TOLD = 100  # names that are told: who submits may make up any number


class UnknownTaskLog:
    """One for each ``Api``. Another application, or a worker over HTTP, may have the task: nobody is refused."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._told: set[str] = set()

    def note(self, jobs: Iterable[NewJob]) -> None:
        """These jobs were submitted."""
        known = self._app.registry
        for job in jobs if len(known) else ():
            if job.task not in known and job.task not in self._told and job.task != COMMAND and len(self._told) < _TOLD:
                self._told.add(job.task)
                close = nearest(job.task, known.names())
                remedy = f"see that a worker has it: the application of this API does not{close}"
                error = f"no task {job.task!r} is registered in the application of this API"
                self._app.events.emit(
                    TaskUnknown(job_id=job.id, task=job.task, queue=job.queue, error=error, remedy=remedy)
                )
