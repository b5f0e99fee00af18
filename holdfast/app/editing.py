"""Changes of one job: edited while it waits, cancelled, replayed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.app.handle import JobHandle, refused_state
from holdfast.app.registration import TaskRegistration
from holdfast.core.batches import BATCH_TASK
from holdfast.core.encryption import key_id_of, require_decrypted
from holdfast.core.errors import Conflict, DecryptionFailed, Invalid
from holdfast.core.faults import FAULTS_TASK
from holdfast.core.ids import check_id, new_id
from holdfast.core.job_changes import EDITABLE, NEVER, JobChanges, check_changes, check_edit, check_expiry, parse_expiry
from holdfast.core.lifecycle import check_replay, describe_holder
from holdfast.core.models import (
    TERMINAL,
    BulkResult,
    Job,
    JobFilter,
    JobState,
    NewJob,
    ReplayRate,
    Step,
    to_microseconds,
)
from holdfast.core.portal import requires_loop
from holdfast.core.steps import CHILDREN
from holdfast.core.unique import holds_unique
from holdfast.core.validation import check_name, check_priority, check_span, check_tags, did_you_mean, parse_instant
from holdfast.stores.base import AT_ONCE, Selection, Store
from holdfast.tasks import Registry, encode_payload
from holdfast.tasks.command_policy import COMMAND, CommandPolicy
from holdfast.tasks.saved_values import find_encrypted, started_children

_WAITS = "leave out delay and run_at, or cancel it"


class JobEditing(TaskRegistration):
    """The part of an application that changes one job."""

    registry: Registry

    @abstractmethod
    async def open_store(self) -> Store:
        """The store, open."""

    @abstractmethod
    def command_policy(self) -> CommandPolicy:
        """Returns the policy for command jobs."""

    @abstractmethod
    async def _get(self, job_id: str) -> Job: ...

    @abstractmethod
    async def _ids(self, selection: str | Selection) -> Selection: ...

    # ── edit ──────────────────────────────────────────────────────────────────────────────────────────────────
    @requires_loop
    async def edit(
        self,
        job_id: str,
        *,
        payload: Mapping[str, Any] | None = None,
        priority: int | None = None,
        delay: float | timedelta | str | None = None,
        run_at: datetime | str | None = None,
        queue: str | None = None,
        tags: Sequence[str] | None = None,
        expires: float | timedelta | datetime | str | None = None,
    ) -> Job:
        """Change a job that waits; None leaves a value as it is. Returns the job as it is now.

        payload: all arguments by name, checked as for a submission. tags: all of them. delay, run_at: a new time.
        expires: a span from now or an instant, or "never".

        Raises `Conflict` if the job runs or has ended, and nothing was changed.
        """
        job = await self._get(job_id)
        if job.task == BATCH_TASK:
            raise Conflict(f"job {job.id} is a batch, which no worker runs: edit its jobs")
        if job.task == FAULTS_TASK:
            raise Conflict(f"job {job.id} keeps the faults that are on: switch others on instead, or these off")
        check_edit(job.id, job.state)
        changes = JobChanges(
            payload=None if payload is None else self._checked_payload(job, payload),
            priority=None if priority is None else check_priority(priority),
            delay=None if delay is None else check_span(delay, "delay"),
            run_at_us=None if run_at is None else to_microseconds(parse_instant(run_at)),
            queue=None if queue is None else check_name("queue", queue),
            options=None if tags is None else msgspec.structs.replace(job.options_or_default, tags=check_tags(tags)),
            **_expiry(expires),
        )
        if changes == JobChanges():
            raise Invalid("edit", "nothing", "give payload, priority, delay, run_at, queue, tags or expires")
        if delay is not None and run_at is not None:
            raise Invalid("run_at", run_at, "give delay or run_at, not both")
        check_changes(job, changes)
        if job.state is JobState.WAITING and changes.has_time:
            raise Conflict(f"job {job.id} runs when what it waits for has come, and has no time of its own; {_WAITS}")
        store = await self.open_store()
        if job.started_at_us is None and (changes.has_time or changes.has_expiry):
            check_expiry(changes, await store.health.server_time_us(), job)
        operated = await store.admin.edit(job.id, changes)
        if not operated.changed:
            state = refused_state(operated)
            check_edit(job.id, state)
            assert state in EDITABLE  # noqa: S101 - else it was refused
            raise Conflict(f"job {job.id} was not edited: a worker had it meanwhile; look at it, and try again")
        return await self._get(job.id)

    def _checked_payload(self, job: Job, payload: Mapping[str, Any]) -> str:
        if not isinstance(payload, Mapping):
            raise Invalid("payload", payload, "give an object: the arguments by name")
        if self.codec is None or key_id_of(job.payload) is not None:  # damaged arguments may be replaced
            require_decrypted(job.payload, f"the payload of job {job.id}")
        text = encode_payload(payload, self.settings.payload_limit)
        registered = self.registry.get(job.task)
        if registered is not None:
            registered.bind(text)  # Invalid if it does not fit
        elif job.task == COMMAND:
            self.command_policy().parse_command(text)
        return text

    # ── cancel and replay ─────────────────────────────────────────────────────────────────────────────────────
    async def cancel_one(self, job_id: str) -> JobState:
        """Cancel one job; its state then. NotFound, or Conflict if it has ended."""
        operated = await (await self.open_store()).admin.cancel(await self._ids(job_id))
        if operated.changed:
            return operated.changed[0][1]
        state = refused_state(operated)
        raise Conflict(f"job {job_id} cannot be cancelled: it has ended, {state}")

    async def replay_one(
        self,
        job_id: str,
        *,
        force: bool = False,
        payload: Mapping[str, Any] | None = None,
        from_step: str | None = None,
    ) -> None:
        """Replay one job. NotFound, or Conflict where its state or its unique key does not allow it."""
        operated = await self._replay(job_id, force=force, payload=payload, from_step=from_step)
        if operated.changed:
            return
        if (await self._get(job_id)).task == BATCH_TASK:
            raise Conflict(f"job {job_id} cannot be replayed: it is a batch; replay its jobs, and it waits again")
        check_replay(job_id, refused_state(operated), force=force)
        holder = await self.unique_holder(job_id)
        advice = "it has just changed; look at it, and try again" if holder is None else describe_holder(holder)
        raise Conflict(f"job {job_id} cannot be replayed: {advice}")

    @requires_loop
    async def fork_job(
        self,
        job_id: str,
        *,
        from_step: str | None = None,
        payload: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> JobHandle[Any]:
        """Submits a copy of a job that has ended, which takes the steps from ``from_step`` on; without it, all.

        It keeps the earlier steps, signals among them, and what the handler has saved (state, progress, cursors). It
        has the options of the first job, but no key, unique key or batch. ``payload``: other arguments. ``id``: the
        same id again is harmless.

        NotFound; Conflict: the job has not ended; Invalid: the step is not recorded.
        """
        job = await self._get(job_id)
        if payload is None:
            require_decrypted(job.payload, f"the payload of job {job.id}")
        if job.state not in TERMINAL or job.task == BATCH_TASK:
            advice = "it is a batch" if job.task == BATCH_TASK else f"it is {job.state}; wait for its end, or cancel it"
            raise Conflict(f"job {job.id} cannot be forked: {advice}")
        retained: tuple[Step, ...] = ()
        if from_step is not None:
            record = await (await self.open_store()).workflow.read_steps(job.id)
            number = find_step(job.id, record, from_step)
            retained = tuple(step for step in record if step.number < number and step.name != CHILDREN)
            if failed := find_encrypted({step.name: step.result for step in retained}):
                raise DecryptionFailed(f"job {job.id} cannot be forked: {failed.error}")
        options = job.options_or_default
        fork = NewJob(
            id=new_id() if id is None else check_id(id),
            has_client_id=id is not None,
            task=job.task,
            payload=job.payload if payload is None else self._checked_payload(job, payload),
            queue=job.queue,
            priority=job.priority,
            max_attempts=job.max_attempts,
            options=replace(options, unique=None, batch=None, forks=job.id, traceparent=None, tracestate=None),
            first_steps=retained,
        )
        return await self.submit(fork)

    async def _step_number(self, chosen: Selection, name: str) -> int:
        if isinstance(chosen, JobFilter) or len(chosen) != 1:
            raise Invalid("from_step", name, "it is a step of one job: name its id")
        return find_step(chosen[0], await (await self.open_store()).workflow.read_steps(chosen[0]), name)

    @abstractmethod
    async def _replay(
        self,
        selection: str | Selection,
        *,
        force: bool,
        payload: Mapping[str, Any] | None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
        from_step: str | None = None,
    ) -> BulkResult: ...

    async def unique_holder(self, job_id: str) -> Job | None:
        """The job that keeps this one from being replayed, since it has its unique key; None where there is none."""
        job = await self._get(job_id)
        unique = job.options_or_default.unique
        holder = None if unique is None else await (await self.open_store()).query.by_key(unique.key)
        return None if holder is None or holder.id == job.id or not holds_unique(holder, job) else holder


def find_step(job_id: str, record: Sequence[Step], name: str) -> int:
    """Returns the number of a step, or of a child that was started, in the record of a job. Raises Invalid."""
    steps = started_children(record) | {step.name: step.number for step in record if step.number}
    if name not in steps:
        known = f"recorded are {', '.join(list(steps)[:20])}" if steps else "none is recorded"
        advice = f"{known}{did_you_mean(name, steps)}; a step that has failed runs again without from_step"
        raise Invalid("from_step", name, f"give a step of job {job_id}; {advice}")
    return steps[name]


def _expiry(value: float | timedelta | datetime | str | None) -> dict[str, Any]:
    """The fields of ``JobChanges`` for an expiry."""
    if value is None:
        return {}
    if value == NEVER:
        return {"expires_at_us": None}
    expiry = parse_expiry(value)
    if isinstance(expiry, datetime):
        return {"expires_at_us": to_microseconds(expiry)}
    return {"expires_in": expiry}
