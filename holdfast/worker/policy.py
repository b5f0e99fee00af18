"""Policies for failed jobs: retries, and deferral of jobs that this worker cannot run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeGuard

import msgspec

from holdfast.app import Holdfast
from holdfast.core.encryption import decrypt_text, describe_encrypted
from holdfast.core.errors import DecryptionFailed, HoldfastError, Invalid
from holdfast.core.events import PayloadUnfit, RetryUnreadable, TaskUnknown
from holdfast.core.lifecycle import DEFERRALS, Failed, Outcome, Released, correct_arguments, deferral_error, deferral_of
from holdfast.core.models import Job, Reason
from holdfast.core.retry import Retry
from holdfast.core.validation import did_you_mean
from holdfast.settings.settings import Settings
from holdfast.stores.encrypted_store import payload_context
from holdfast.tasks import Task
from holdfast.tasks.command_policy import COMMAND

_MAX_REPORTED = 1000  # task names reported as unknown, or for their payload
_MIN_DEFERRAL, _MAX_DEFERRAL = timedelta(seconds=2), timedelta(minutes=1)  # between two tries of a deferred job


def backoff_of(job: Job, app: Holdfast, settings: Settings) -> Retry:
    """Returns the retry policy of a job: its own, its task's, or the settings'."""
    own = job.options_or_default.retry
    if own is not None:
        try:
            return Retry.from_builtins(own)
        except Invalid as error:  # of a newer version, or corrupt: the job is not to stay for it
            app.events.emit(RetryUnreadable(job_id=job.id, task=job.task, error=str(error)))
    task = app.registry.get(job.task)
    return (task.retry if task is not None else None) or settings.retry


def timeout_of(job: Job, task: Task[..., Any] | None, settings: Settings) -> float | None:
    """Returns the timeout of an attempt in seconds: the job's own, its task's, or the settings'. None: no timeout."""
    if job.options is not None and job.options.timeout is not None:
        return job.options.timeout
    if task is not None and task.timeout is not None:
        return task.timeout
    span = settings.command_timeout if task is None and job.task == COMMAND else settings.timeout
    return None if span is None else span.total_seconds()


class Deferrals:
    """Jobs that a worker cannot run: it lacks their task, or their payload does not fit. Logs each task once.

    In a rolling deployment another worker may have their code. So they are released, without an attempt, until
    ``defer_for`` has passed. The job's error stores when the deferral began; a replay or an attempt restarts it.
    """

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._rng = random.Random()
        self._suggestions: dict[str, str] = {}  # "did you mean" texts by unknown task name
        self._unknown_tasks: set[str] = set()  # tasks logged as unknown
        self._refused_payload_tasks: set[str] = set()  # tasks logged for their payload

    def unknown_task_failure(self, job: Job, known: Sequence[str], settings: Settings) -> Failed:
        """Returns the failure of a job whose task is not registered in this worker."""
        listed = (", ".join(known) or "none")[:500]
        if job.task not in self._suggestions and len(self._suggestions) < _MAX_REPORTED:
            self._suggestions[job.task] = did_you_mean(job.task, known)
        failed = Failed(
            error=f"no task {job.task!r} is registered in this worker (registered: {listed})"
            + self._suggestions.get(job.task, ""),
            reason=Reason.NO_HANDLER,
            retryable=settings.unknown_task == "retry",
        )
        if failed.retryable:
            self._warn(job, failed, None)
        return failed

    def decryption_failure(self, job: Job) -> Failed:
        """Returns the failure of a job whose payload could not be decrypted when it was claimed."""
        try:
            decrypt_text(self._app.codec, job.payload, payload_context(job), "the payload")
        except DecryptionFailed as error:
            text = str(error)
        else:
            text = f"the payload, {describe_encrypted(job.payload)}, could not be decrypted when it was claimed"
        return Failed(error=text, reason=Reason.ENCRYPTED, retryable=False)

    @staticmethod
    def is_deferrable(outcome: Outcome, job: Job) -> TypeGuard[Failed]:
        """Returns True if the job failed here, but another worker may be able to run it: settings may allow that."""
        if type(outcome) is not Failed or outcome.retryable or outcome.reason not in DEFERRALS:
            return False
        if outcome.reason is Reason.ENCRYPTED:
            return True
        return job.task != COMMAND and (outcome.reason is Reason.NO_HANDLER or _is_object(job.payload))

    async def defer_or_fail(self, jobs: Sequence[Job], failures: Sequence[Failed], settings: Settings) -> list[Outcome]:
        """Returns the outcomes of these jobs: released, or failed once ``defer_for`` has passed."""
        rows: Sequence[Job | None] = [None] * len(jobs)
        if any(_may_defer(failed, settings) for failed in failures):
            try:
                rows = await (await self._app.open_store()).query.summaries([job.id for job in jobs])
            except HoldfastError:  # the row keeps its error, and in it the start of the deferral
                return [
                    Released(None, _MIN_DEFERRAL, failed.reason) if _may_defer(failed, settings) else failed
                    for failed in failures
                ]
        return [self._outcome_of(*each, settings) for each in zip(jobs, rows, failures, strict=True)]

    def _outcome_of(self, job: Job, row: Job | None, failed: Failed, settings: Settings) -> Outcome:
        if not _may_defer(failed, settings) or row is None or row.started_at is None:
            self._warn(job, failed, None)  # without a row: deleted, or changed by another program
            return failed
        earlier = deferral_of(row)
        since = row.started_at if earlier is None else earlier.since
        waited = row.started_at - since
        left = settings.defer_for - waited
        if left <= timedelta(0):
            self._warn(job, failed, None)
            return failed
        self._warn(job, failed, since + settings.defer_for)
        delay = min(max(_MIN_DEFERRAL, waited / 2), _MAX_DEFERRAL) * self._rng.uniform(0.5, 1)
        return Released(deferral_error(since, failed.error), min(delay, left), failed.reason)

    def _warn(self, job: Job, failed: Failed, until: datetime | None) -> None:
        """Emits a warning for the first job of each task. ``until``: end of the deferral; None if not deferred."""
        unknown = failed.reason is Reason.NO_HANDLER
        warned = self._unknown_tasks if unknown else self._refused_payload_tasks
        if job.task in warned or len(warned) >= _MAX_REPORTED:
            return
        warned.add(job.task)
        if unknown:
            close = self._suggestions.get(job.task, "")
            remedy = f"register it and restart, or give its application a queue of its own{close}"
        elif failed.reason is Reason.ENCRYPTED:
            remedy = "give the codec of this worker's application that key; see Encrypted payloads in the documentation"
        else:
            correct = correct_arguments(job.id, deferred=until is not None)
            remedy = f"start workers with the code that submits it; {correct}"
        event = TaskUnknown if unknown else PayloadUnfit
        self._app.events.emit(
            event(
                job_id=job.id, task=job.task, queue=job.queue, error=failed.error, deferred_until=until, remedy=remedy
            )
        )


def _may_defer(failed: Failed, settings: Settings) -> bool:
    return bool(settings.defer_for) and (failed.reason is not Reason.NO_HANDLER or settings.unknown_task != "dead")


def _is_object(payload: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(payload), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
