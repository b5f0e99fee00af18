"""Policy for a failed job from settings and application: its retries, and other workers' chances."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TypeGuard

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.events import PayloadUnfit, RetryUnreadable, TaskUnknown
from holdfast.core.lifecycle import DEFERRALS, Failed, Outcome, Released, correct_arguments, deferral_error, deferral_of
from holdfast.core.models import Job, Reason
from holdfast.core.retry import Retry
from holdfast.core.validation import did_you_mean
from holdfast.settings.settings import Settings
from holdfast.tasks.command_policy import COMMAND

_REPORTED_MOST = 1000  # limit of task names reported as unknown or unfit
_SHORTEST, _LONGEST = timedelta(seconds=2), timedelta(minutes=1)  # between two tries of a deferred job


def backoff_of(job: Job, app: Holdfast, settings: Settings) -> Retry:
    """The retry policy of a job: its own, its task's, or the settings'."""
    own = job.options_or_default.retry
    if own is not None:
        try:
            return Retry.from_builtins(own)
        except Invalid as error:  # of a newer version, or spoiled: the job is not to stay for it
            app.events.emit(RetryUnreadable(job_id=job.id, task=job.task, error=str(error)))
    task = app.registry.get(job.task)
    return (task.retry if task is not None else None) or settings.retry


class Unfit:
    """Jobs that a worker cannot run: it lacks their task, or their payload does not fit. Logs each task once.

    In a rolling deployment another worker may have the code for them. So they are given back, without an attempt, until
    ``defer_for`` is over. The instant it began at is in the job's error; a replay or an attempt begins it anew.
    """

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._rng = random.Random()
        self._meant: dict[str, str] = {}  # by the name that was met: what may have been meant
        self._unknown_tasks: set[str] = set()  # tasks that were logged as unknown
        self._misfits: set[str] = set()  # tasks that were logged for their payload

    def unknown_task_failure(self, job: Job, known: Sequence[str], settings: Settings) -> Failed:
        """The failure of a job whose task the worker does not know."""
        listed = (", ".join(known) or "none")[:500]
        if job.task not in self._meant and len(self._meant) < _REPORTED_MOST:
            self._meant[job.task] = did_you_mean(job.task, known)
        failed = Failed(
            error=f"no task {job.task!r} is registered in this worker (registered: {listed})"
            + self._meant.get(job.task, ""),
            reason=Reason.NO_HANDLER,
            retryable=settings.unknown_task == "retry",
        )
        if failed.retryable:
            self._warn(job, failed, None)
        return failed

    @staticmethod
    def is_unfit(outcome: Outcome, job: Job) -> TypeGuard[Failed]:
        """Returns True if another worker may run this job though here it has failed."""
        if type(outcome) is not Failed or outcome.retryable or outcome.reason not in DEFERRALS or job.task == COMMAND:
            return False
        return outcome.reason is Reason.NO_HANDLER or _is_object(job.payload)

    async def settle_unfit(self, jobs: Sequence[Job], failures: Sequence[Failed], settings: Settings) -> list[Outcome]:
        """Returns the outcome of jobs that ``concerns`` is true of: given back, or failed once their time is over."""
        rows: Sequence[Job | None] = [None] * len(jobs)
        if any(_may_be_deferred(failed, settings) for failed in failures):
            try:
                rows = await (await self._app.open_store()).query.summaries([job.id for job in jobs])
            except HoldfastError:  # it keeps the error, and with it the instant it is deferred since
                return [
                    Released(None, _SHORTEST, failed.reason) if _may_be_deferred(failed, settings) else failed
                    for failed in failures
                ]
        return [self._settled(*each, settings) for each in zip(jobs, rows, failures, strict=True)]

    def _settled(self, job: Job, row: Job | None, failed: Failed, settings: Settings) -> Outcome:
        if not _may_be_deferred(failed, settings) or row is None or row.started_at is None:
            self._warn(job, failed, None)  # without a row it is gone, or another program has changed it
            return failed
        earlier = deferral_of(row)
        since = row.started_at if earlier is None else earlier.since
        waited = row.started_at - since
        left = settings.defer_for - waited
        if left <= timedelta(0):
            self._warn(job, failed, None)
            return failed
        self._warn(job, failed, since + settings.defer_for)
        delay = min(max(_SHORTEST, waited / 2), _LONGEST) * self._rng.uniform(0.5, 1)
        return Released(deferral_error(since, failed.error), min(delay, left), failed.reason)

    def _warn(self, job: Job, failed: Failed, until: datetime | None) -> None:
        """Logs the first job of each task. ``until``: the end of its deferral; None if it is not deferred."""
        unknown = failed.reason is Reason.NO_HANDLER
        warned = self._unknown_tasks if unknown else self._misfits
        if job.task in warned or len(warned) >= _REPORTED_MOST:
            return
        warned.add(job.task)
        if unknown:
            close = self._meant.get(job.task, "")
            remedy = f"register it and restart, or give its application a queue of its own{close}"
        else:
            correct = correct_arguments(job.id, deferred=until is not None)
            remedy = f"start workers with the code that submits it; {correct}"
        event = TaskUnknown if unknown else PayloadUnfit
        self._app.events.emit(
            event(
                job_id=job.id, task=job.task, queue=job.queue, error=failed.error, deferred_until=until, remedy=remedy
            )
        )


def _may_be_deferred(failed: Failed, settings: Settings) -> bool:
    return bool(settings.defer_for) and (failed.reason is Reason.PAYLOAD or settings.unknown_task != "dead")


def _is_object(payload: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(payload), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
