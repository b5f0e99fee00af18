"""Jobs of the model, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.models import Job, JobState, Lease, NewJob, Reason, Step
from holdfast.core.waits import ReceiverInfo

OPEN = DependencyState.OPEN


@dataclass
class ModelDependency:
    """A job for whose end another one waits. ``wait``: 0, or the number of the wait that started it as a child."""

    job_id: str
    on: Condition
    state: DependencyState
    wait: int = 0

    def info(self, job_id: str, waiter: ModelJob) -> DependencyInfo:
        """The dependency as `JobWaits` shows it, with this id. A child of an earlier wait is met there."""
        state = self.state if self.wait in (0, waiter.wait) else DependencyState.MET
        return DependencyInfo(job_id, self.on, state, self.wait > 0)


@dataclass
class ModelReceiver:
    """A wait for a signal. ``claims``: of the lease under which it waits; 0: the job waits for something else."""

    topic: str
    step: str
    number: int
    claims: int
    since: int
    until: int

    @property
    def info(self) -> ReceiverInfo:
        return ReceiverInfo(self.topic, self.step, self.since, self.until)


@dataclass
class ModelJob:
    """A job of the model."""

    new: NewJob
    seq: int
    state: JobState
    run_at: int
    claims: int = 0
    attempts: int = 0
    lost_leases: int = 0
    cancelling: bool = False
    error: str | None = None
    worker: str | None = None
    lease_until: int = 0
    ended_at: int = 0
    expires_at: int | None = None
    started: bool = False
    counted: set[int] = field(default_factory=set)  # claims of attempts that counted and did not succeed
    given_back: set[int] = field(default_factory=set)  # claims of attempts that were refunded
    dependencies: dict[str, ModelDependency] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)  # jobs that hold the keys of its children, by their ids
    wait: int = 0  # number of its latest wait for a signal or for children
    receiver: ModelReceiver | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    by_dependency: bool = False  # a dependency makes it wait, or has cancelled it
    errors: frozenset[str] = frozenset()  # texts that the store may show after that cancellation

    @property
    def order(self) -> tuple[int, int, int]:
        """Higher priority, earlier eligible time, submission order."""
        return (-self.new.priority, self.run_at, self.seq)

    @property
    def lease(self) -> Lease:
        return Lease(self.new.id, self.claims)

    @property
    def has_open_waits(self) -> bool:
        """True if what the job waits for has not come: a signal, or jobs of its latest wait."""
        return self.is_receiver or any(
            each.state is OPEN and each.wait in (0, self.wait) for each in self.dependencies.values()
        )

    @property
    def is_receiver(self) -> bool:
        return self.receiver is not None and self.receiver.claims == self.claims

    @property
    def seen(self) -> tuple[object, ...]:
        """Fields that the store must show of the job."""
        edited = (self.new.queue, self.new.priority, self.new.payload, self.expires_at)
        ran = (self.state, self.claims, self.attempts, self.lost_leases, self.run_at, self.cancelling, self.error)
        return (*ran, self.new.key, *edited, self.by_dependency)

    def as_job(self) -> Job:
        """The job as ``decide`` wants it."""
        new = self.new
        return Job(
            id=new.id,
            task=new.task,
            queue=new.queue,
            payload=new.payload,
            claims=self.claims,
            attempts=self.attempts,
            max_attempts=new.max_attempts,
            priority=new.priority,
            lost_leases=self.lost_leases,
            run_at_us=self.run_at,
            created_at_us=0,
            worker=self.worker,
            cancelling=self.cancelling,
        )


def seen(job: Job) -> tuple[object, ...]:
    """Fields that the store shows of a job, as ``ModelJob.seen``."""
    ran = (job.state, job.claims, job.attempts, job.lost_leases, job.run_at_us, job.cancelling, job.error)
    edited = (job.queue, job.priority, job.payload, job.expires_at_us)
    by_dependency = job.reason == Reason.DEPENDENCY and job.state in (JobState.WAITING, JobState.CANCELLED)
    return (*ran, job.key, *edited, by_dependency)
