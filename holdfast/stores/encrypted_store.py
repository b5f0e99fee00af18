"""A store whose callers see plain texts, and which hands encrypted ones to the store inside: the one place where the
texts of an application with a codec are encrypted and decrypted.

Encrypted: payloads (also of children and schedules), results, steps, values that handlers keep, signals. In the clear:
names, ids, keys, tags, metadata, times, progress, errors, tracebacks, log lines. What cannot be decrypted is returned
as it is stored: a list of jobs does not fail for one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Unpack

from msgspec.structs import replace

from holdfast.core.batches import BATCH_TASK
from holdfast.core.encryption import (
    Codec,
    decrypt_text,
    encrypt_text,
    is_encrypted,
    job_context,
    result_context,
    schedule_context,
    signal_context,
    step_context,
    unique_context,
    uses_unique_key,
)
from holdfast.core.errors import DecryptionFailed, HoldfastError
from holdfast.core.faults import FAULTS_TASK
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import (
    BulkResult,
    Claim,
    Job,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    Page,
    Reason,
    Settled,
    Settlement,
    Step,
    Submitted,
)
from holdfast.core.schedule import ALERTS_SCHEDULE, DueSchedules, Schedule, ScheduleChange
from holdfast.core.steps import CHILDREN, PROGRESS, NewStep, StepReceipt
from holdfast.core.waits import (
    SIGNAL_STEP,
    ChildStatus,
    KeptSignal,
    SentSignal,
    Signal,
    SignalReceipt,
    SignalWait,
    signal_result,
    signal_value,
)
from holdfast.stores.base import ClaimRequest, External, Selection, StatementFlow, Store
from holdfast.stores.forwarding import (
    ForwardingAdmin,
    ForwardingExternal,
    ForwardingQuery,
    ForwardingQueueing,
    ForwardingSchedules,
    ForwardingStore,
    ForwardingWorkflow,
    ReplayOptions,
)

READABLE_TASKS = frozenset({BATCH_TASK, FAULTS_TASK, ALERTS_SCHEDULE})
"""Holdfast's own: they carry no arguments of an application, and programs without the key read them."""
_READABLE_VALUES = frozenset({CHILDREN, PROGRESS})


class TextCipher:
    """Encrypts and decrypts the texts of jobs. ``readable``: arguments that stay in the clear beside a payload."""

    def __init__(self, codec: Codec, readable: Collection[str]) -> None:
        self._codec = codec
        self._readable = readable

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def encrypt_job(self, job: NewJob) -> NewJob:
        """Returns a job to submit, with payload and steps encrypted."""
        if job.task in READABLE_TASKS:
            return job
        unique = job.unique
        if unique is not None and unique.on_conflict == "replace":  # the store may give the payload to another job
            context, is_shared = unique_context(unique.key, job.task), True
        else:
            context, is_shared = job_context(job.id, job.task), False
        payload = encrypt_text(self._codec, job.payload, context, readable=self._readable, unique=is_shared)
        if job.first_steps:
            job = replace(job, first_steps=tuple(self._encrypt_step(job.id, step) for step in job.first_steps))
        return replace(job, payload=payload)

    def encrypt_jobs(self, jobs: Sequence[NewJob]) -> list[NewJob]:
        """Returns jobs to submit, encrypted."""
        return [self.encrypt_job(job) for job in jobs]

    def encrypt_payload(self, job_id: str, task: str, payload: str) -> str:
        """Encrypts other arguments of a stored job."""
        return encrypt_text(self._codec, payload, job_context(job_id, task), readable=self._readable)

    def decrypt_job(self, job: Job) -> Job:
        """Returns a stored job with payload and result decrypted."""
        payload, result = job.payload, job.result
        if is_encrypted(payload):
            payload = self._decrypt(payload, payload_context(job))
        if result is not None and is_encrypted(result):
            result = self._decrypt(result, result_context(job.id))
        if payload is job.payload and result is job.result:
            return job
        return replace(job, payload=payload, result=result)

    def _decrypt(self, text: str, context: bytes) -> str:
        try:
            return decrypt_text(self._codec, text, context, "")
        except DecryptionFailed:
            return text

    # ── results and steps ─────────────────────────────────────────────────────────────────────────────────────
    def encrypt_result(self, job_id: str, result: str | None) -> str | None:
        """Encrypts the result of a job."""
        return None if result is None else encrypt_text(self._codec, result, result_context(job_id))

    def encrypt_settlement(self, settlement: Settlement) -> Settlement:
        """Encrypts the result of a job; if the codec fails, the job is dead: its work is done."""
        if settlement.result is None:
            return settlement
        try:
            return replace(settlement, result=self.encrypt_result(settlement.job_id, settlement.result))
        except HoldfastError as error:
            return replace(settlement, state=JobState.DEAD, reason=Reason.RESULT, result=None, error=str(error))

    def encrypt_new_step(self, step: NewStep) -> NewStep:
        """Encrypts the result of a step to be stored."""
        return replace(step, result=self._encrypt_of_step(step.lease.job_id, step.name, step.result))

    def _encrypt_step(self, job_id: str, step: Step) -> Step:
        return replace(step, result=self._encrypt_of_step(job_id, step.name, step.result))

    def _encrypt_of_step(self, job_id: str, name: str, result: str | None) -> str | None:
        if result is None or name in _READABLE_VALUES:
            return result
        return encrypt_text(self._codec, result, step_context(job_id, name))

    def decrypt_step_result(self, job_id: str, name: str, result: str | None) -> str | None:
        """Decrypts the result of a step; that of a signal may have been put there by the store."""
        if result is None:
            return None
        if name.startswith(SIGNAL_STEP) and (value := signal_value(result)) is not None and is_encrypted(value):
            topic = name.removeprefix(SIGNAL_STEP).partition("#")[0]
            return signal_result(self._decrypt(value, signal_context(topic)))
        return self._decrypt(result, step_context(job_id, name))

    # ── signals and schedules ─────────────────────────────────────────────────────────────────────────────────
    def encrypt_signal(self, signal: Signal) -> Signal:
        """Encrypts the value of a signal."""
        return replace(signal, value=encrypt_text(self._codec, signal.value, signal_context(signal.topic)))

    def decrypt_signal(self, signal: KeptSignal) -> KeptSignal:
        """Decrypts the value of a signal that no job has received."""
        return replace(signal, value=self._decrypt(signal.value, signal_context(signal.topic)))

    def encrypt_schedule(self, schedule: Schedule) -> Schedule:
        """Encrypts the payload of a schedule."""
        job = schedule.job
        if job.task in READABLE_TASKS:
            return schedule
        context = schedule_context(schedule.name, job.task)
        payload = encrypt_text(self._codec, job.payload, context, readable=self._readable)
        return replace(schedule, job=replace(job, payload=payload))

    def decrypt_schedule(self, schedule: Schedule) -> Schedule:
        """Decrypts the payload of a schedule."""
        job = schedule.job
        payload = self._decrypt(job.payload, schedule_context(schedule.name, job.task))
        return replace(schedule, job=replace(job, payload=payload))


def payload_context(job: Job) -> bytes:
    """Context of the encrypted payload of a stored job."""
    unique = job.options_or_default.unique
    if unique is not None and uses_unique_key(job.payload):
        return unique_context(unique.key, job.task)
    return job_context(job.id, job.task)


class EncryptedStore(ForwardingStore):
    """Forwards to a store that sees encrypted texts only."""

    def __init__(self, inner: Store, codec: Codec, readable: Collection[str] = ()) -> None:
        super().__init__(inner)
        self._cipher = TextCipher(codec, readable)

    @property
    def queueing(self) -> EncryptedQueueing:
        return EncryptedQueueing(self._inner, self._cipher)

    @property
    def admin(self) -> EncryptedAdmin:
        return EncryptedAdmin(self._inner, self._cipher)

    @property
    def query(self) -> EncryptedQuery:
        return EncryptedQuery(self._inner, self._cipher)

    @property
    def schedules(self) -> EncryptedSchedules:
        return EncryptedSchedules(self._inner, self._cipher)

    @property
    def workflow(self) -> EncryptedWorkflow:
        return EncryptedWorkflow(self._inner, self._cipher)

    @property
    def external(self) -> EncryptedExternal | None:
        external = self._inner.external
        return None if external is None else EncryptedExternal(external, self._cipher)


class EncryptedQueueing(ForwardingQueueing):
    """Encrypts payloads and results, decrypts the payloads of claimed jobs."""

    def __init__(self, store: Store, cipher: TextCipher) -> None:
        super().__init__(store.queueing)
        self._cipher = cipher

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        return await self._inner.submit(self._cipher.encrypt_jobs(jobs))

    async def claim(self, request: ClaimRequest) -> Claim:
        claim = await self._inner.claim(request)
        return replace(claim, jobs=[self._cipher.decrypt_job(job) for job in claim.jobs]) if claim.jobs else claim

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        return await self._inner.settle([self._cipher.encrypt_settlement(each) for each in settlements])


class EncryptedAdmin(ForwardingAdmin):
    """Encrypts the payloads of edited and replayed jobs."""

    def __init__(self, store: Store, cipher: TextCipher) -> None:
        super().__init__(store.admin)
        self._query = store.query
        self._cipher = cipher

    async def replay(self, selection: Selection, **options: Unpack[ReplayOptions]) -> BulkResult:
        if (payload := options.get("payload")) is not None:
            if isinstance(selection, JobFilter) or len(selection) != 1:
                raise HoldfastError("an encrypted payload goes to one job, by its id")
            options["payload"] = await self._encrypt(selection[0], payload)
        return await self._inner.replay(selection, **options)

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        if changes.payload is not None:
            changes = replace(changes, payload=await self._encrypt(job_id, changes.payload))
        return await self._inner.edit(job_id, changes)

    async def _encrypt(self, job_id: str, payload: str) -> str:
        (job,) = await self._query.summaries([job_id])
        return "{}" if job is None else self._cipher.encrypt_payload(job.id, job.task, payload)  # none to change


class EncryptedQuery(ForwardingQuery):
    """Decrypts the jobs that are read."""

    def __init__(self, store: Store, cipher: TextCipher) -> None:
        super().__init__(store.query)
        self._cipher = cipher

    async def get(self, job_id: str) -> Job | None:
        return self._decrypt(await self._inner.get(job_id))

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        return [self._decrypt(job) for job in await self._inner.get_many(job_ids)]

    async def by_key(self, key: str) -> Job | None:
        return self._decrypt(await self._inner.by_key(key))

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        return [self._decrypt(job) for job in await self._inner.by_keys(keys)]

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        page = await self._inner.find(where, limit=limit, cursor=cursor, seconds=seconds)
        return replace(page, jobs=[self._cipher.decrypt_job(job) for job in page.jobs])

    def _decrypt(self, job: Job | None) -> Job | None:
        return None if job is None else self._cipher.decrypt_job(job)


class EncryptedSchedules(ForwardingSchedules):
    """Encrypts the payloads of schedules and of their jobs."""

    def __init__(self, store: Store, cipher: TextCipher) -> None:
        super().__init__(store.schedules)
        self._cipher = cipher

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        schedule, jobs = self._cipher.encrypt_schedule(change.schedule), self._cipher.encrypt_jobs(change.jobs)
        return await self._inner.write_schedule(replace(change, schedule=schedule, jobs=jobs))

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        found = await self._inner.read_schedules(name, after=after, limit=limit)
        return [self._cipher.decrypt_schedule(each) for each in found]

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        due = await self._inner.due_schedules(limit=limit)
        return replace(due, schedules=[self._cipher.decrypt_schedule(each) for each in due.schedules])


class EncryptedWorkflow(ForwardingWorkflow):
    """Encrypts steps, signals and children, and decrypts what is read of them."""

    def __init__(self, store: Store, cipher: TextCipher) -> None:
        super().__init__(store.workflow)
        self._cipher = cipher

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        return await self._inner.save_steps([self._cipher.encrypt_new_step(step) for step in steps])

    async def read_steps(self, job_id: str) -> list[Step]:
        decrypt = self._cipher.decrypt_step_result
        return [
            replace(step, result=decrypt(job_id, step.name, step.result))
            for step in await self._inner.read_steps(job_id)
        ]

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        receipt, step = await self._inner.receive_signal(wait), wait.step
        return replace(receipt, result=self._cipher.decrypt_step_result(step.lease.job_id, step.name, receipt.result))

    async def send_signal(self, signal: Signal) -> SentSignal:
        return await self._inner.send_signal(self._cipher.encrypt_signal(signal))

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        return [self._cipher.decrypt_signal(each) for each in await self._inner.read_signals(topic, limit=limit)]

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        return await self._inner.start_children(lease, self._cipher.encrypt_jobs(children), worker)


class EncryptedExternal(ForwardingExternal):
    """Encrypts what is written inside transactions of callers."""

    def __init__(self, external: External, cipher: TextCipher) -> None:
        super().__init__(external)
        self._cipher = cipher

    def submit_flow(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        return self._inner.submit_flow(self._cipher.encrypt_jobs(jobs))

    def complete_flow(self, lease: Lease, result: str | None, worker: str | None = None) -> StatementFlow[Settled]:
        return self._inner.complete_flow(lease, self._cipher.encrypt_result(lease.job_id, result), worker)

    def record_step_flow(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        return self._inner.record_step_flow(self._cipher.encrypt_new_step(step), previous)
