"""The store contract. What a store promises, in words; `tests/conformance` says it in code, once for all stores.

Every store keeps these promises:

1. What ``submit`` answered survives ``kill -9`` of anything at any instant.
2. At most one live lease per job. A write under a lost or expired lease changes nothing and says so.
3. Every claim grows ``claims``. ``attempts`` grows with each claim and is given back only by a refunding settlement.
4. A job whose lease ran out is found by ``maintenance.find_expired_leases`` and can be settled by anyone, once.
5. An idempotency key creates at most one job while it lives; every caller gets that job, losers of a race too.
6. Within a queue: higher priority first, then earlier ``run_at``, then submission order.
7. ``claim`` never delivers a job before its ``run_at``, nor for the first time after its ``expires``.
8. A batch of ``submit`` is one transaction: all of it or nothing. (Redis: each 200 of it, in order; where a later part
   fails the call raises, and repeating it is harmless.) Every verb answers in the order of the request.
9. A store makes no decision about an attempt: it applies a settlement if its guard holds. Its own rules are those that
   need stored state in the same write: a settlement that is no ending (to failed, queued, scheduled, waiting) cancels
   a job whose cancellation was asked for; an end resolves the dependencies on its job; a submission applies the policy
   of its key; a claim applies limits, pauses and expiry, and ends jobs that it cannot read as ``dead``.
10. A store owns time. Callers hand over durations; instants come only from the store's own clock.
11. An id is a UUID as ``parse_id`` spells it. In any other spelling it names no job.

Stores raise the errors of ``holdfast.core.errors`` and nothing of their drivers.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from holdfast.core.batches import BatchProgress
from holdfast.core.error_groups import FailedJob
from holdfast.core.history import HistoryInterval, HistoryRow
from holdfast.core.job_changes import JobChanges
from holdfast.core.job_logs import LogBatch, LogPage
from holdfast.core.limits import Assigned, BucketUse, Limit, LimitChange
from holdfast.core.models import (
    Attempt,
    BulkResult,
    Claim,
    ExpiredJob,
    Finding,
    Job,
    JobEvents,
    JobFilter,
    Lease,
    NewJob,
    Page,
    QueueInfo,
    ReplayRate,
    Settled,
    Settlement,
    States,
    Step,
    Submitted,
    TxOutcome,
)
from holdfast.core.schedule import DueSchedules, Schedule, ScheduleChange
from holdfast.core.stats import JobStats, StateCounts
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.core.waits import ChildStatus, JobWaits, KeptSignal, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.core.workers import HeartbeatReply, WorkerCommand, WorkerHeartbeat, WorkerInfo

T = TypeVar("T")

Selection = Sequence[str] | JobFilter
"""Which jobs an operation is for: ids, or everything a filter matches."""

AT_ONCE = ReplayRate()
"""All of them now."""

EVERY_QUEUE = "*"
"""In ``ClaimRequest.capacity``: the queues that it does not name, served round robin; they share its slots."""


class ClaimRequest(msgspec.Struct, frozen=True):
    """A worker's request: up to ``limit`` ready jobs, of each queue at most its ``capacity`` (queue → free slots).

    ``max_must_start``: how many of them may be jobs that must start at once: a crash before would cost too much.
    Those are jobs whose last lease was lost, which a claim passes over beyond that number, and jobs on their last
    attempt: at the first one beyond it the claim of its queue ends, and says ``stopped_at_last_attempt``.
    ``isolated``: take exactly one job that lost two or more leases in a row, and nothing beside it.
    ``ids``: just these ids (a transport delivered them). ``promote``: make due jobs of these queues ready first.
    ``free_runners``: of jobs under limits a claim takes no more than those, so that none holds room of a limit while it
    waits for a runner.
    ``shared_worker_id``: other processes may claim under this id too, so the jobs of a claim whose answer was lost are
    not given back: they cannot be distinguished from jobs that the worker has begun.
    """

    worker: str
    capacity: Mapping[str, int]
    limit: int
    lease_for: timedelta
    max_must_start: int = 1 << 30
    isolated: bool = False
    ids: Sequence[str] | None = None
    promote: bool = True
    free_runners: int = 1 << 30
    shared_worker_id: bool = False


class Queueing(Protocol):
    """The path of every job: submitted, claimed, lease renewed by heartbeats, settled."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store the jobs in one transaction and wake their queues' workers after it.

        Invalid (``after``) if a job waits for one that is neither stored nor earlier in ``jobs``: nothing is stored
        (Redis: of its part); a job that is known already needs them no more. Where the earlier one was answered with
        another job, by its key, it waits for that one.
        """

    async def claim(self, request: ClaimRequest) -> Claim:
        """Make due jobs ready, take jobs under a lease, and say when the next one falls due."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Apply each settlement whose guard holds. Failed attempts are recorded; ends wake their waiters.

        A job that is settled as ``waiting`` is so until its ``delay`` is over (None: for ever) if it is a receiver of a
        signal, or has children that have not ended; otherwise it is due at once.
        A job locked by another transaction is not waited for, but answered as ``locked``.
        """

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        """Register the worker, extend its live leases, and return the status of each."""

    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        """Store log lines with their jobs, each record under its lease; returns for each whether it was stored.

        Refused: the lease is not the job's any more, or has expired. One under which the job succeeded still stands. A
        line that is there already, by lease and number, stays as it is: a call whose answer was lost may be repeated.
        """

    async def deregister(self, worker: str) -> None:
        """Forget a worker that has stopped."""

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        """Return when one of the topics may have a notification, at the latest after ``timeout`` seconds.

        Topics: ``queue:NAME`` or ``queue:*`` (something became ready), ``job:ID`` (it ended) or ``job:*`` (any),
        ``worker:ID`` (a command, or a cancellation of one of its jobs). May return early, never late."""


class Admin(Protocol):
    """Changes by operators: of jobs, queues and workers."""

    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        """Cancel what waits; ask what runs to stop (its state stays ``running`` until its worker settles it)."""

    async def replay(
        self,
        selection: Selection,
        *,
        force: bool = False,
        payload: str | None = None,
        from_step: int | None = None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
    ) -> BulkResult:
        """Queue again with all attempts, error and expiry cleared, history kept. ``payload`` replaces the stored one.
        Steps from the number ``from_step`` on are forgotten, signals that they received too.
        Those that are not to run at once, by ``pace``, become ``scheduled``."""

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        """Change a job that has not started, in the write that finds it so: a worker takes it with all of the changes,
        or they are refused. With a new time it becomes ``scheduled``, or ``queued`` where that has come."""

    async def delete(self, selection: Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        """Remove jobs that are not running, with their keys and history; where given, only those in ``states``."""

    async def pause(self, queue: str) -> None:
        """No later claim takes a job of this queue."""

    async def resume(self, queue: str) -> None:
        """Undo ``pause``."""

    async def send_command(self, command: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        """Sends these workers (None: every living one) a command; returns their ids."""


class Maintenance(Protocol):
    """Bounded work that any worker may do at any time."""

    async def promote_due(self, *, limit: int) -> int:
        """Make due jobs of every queue ready; how many."""

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        """End jobs that no worker has taken by their ``expires`` as ``cancelled``; returns them."""

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out. The remedy is ``settle``."""

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete jobs that ended longer ago than given, by state, but not those for which unended ones wait or waited,
        nor those cancelled by a failed dependency that is stored; outlived keys, old signals, long silent workers."""

    async def count_ended(self, *, limit: int) -> bool:
        """Adds ended jobs to the history, each end once: about ``limit`` of those that ended longer ago than
        ``history.COUNT_DELAY``, the earliest first. Returns whether there are more. Deletes rows that are too old."""

    async def reannounce(self) -> int:
        """Publishes ready jobs that the transport has lost; returns their number. 0 in a store without a transport."""


class Query(Protocol):
    """Reads of jobs, queues, workers and events."""

    async def get(self, job_id: str) -> Job | None: ...

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]: ...
    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        """These jobs in their order, each without its payload, result and key; None for one that is not there."""

    async def by_key(self, key: str) -> Job | None: ...

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        """The jobs of these keys, whole, in their order; None where there is none. Callers limit how many."""

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        """Newest first, at one price however deep. Where it has to read all jobs, a page ends after ``seconds``."""

    async def count(self, where: JobFilter, *, limit: int | None = None, seconds: float | None = None) -> int:
        """Counts the jobs that match, up to ``limit``. ``seconds`` limits the search; None: as long as any search."""

    async def count_states(self, where: JobFilter) -> StateCounts:
        """Counts the jobs that match by state. SQL stores: at one instant, reading only the jobs of a given tag."""

    async def attempts(self, job_id: str) -> list[Attempt]:
        """Attempts that did not succeed, oldest first."""

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        """The log lines of a job, oldest first, of all its attempts."""

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        """Every queue that has jobs or is paused, by name, with how many of its jobs ended a second within ``recent``.
        ``at_least`` of each names states of which it may have more. Of all queues together, the latest ``max_count``
        ended jobs of each state are counted; a queue that has only earlier ones is left out."""

    async def queue_depths(self, *, max_count: int) -> list[QueueInfo]:
        """The queues in which something waits, runs or is dead, and the paused ones, by name. Counts such jobs; at
        most ``max_count`` of a queue in a state, or of all queues together of running or dead ones."""

    async def workers(self) -> list[WorkerInfo]: ...

    async def stats(self, *, recent: timedelta, max_count: int) -> JobStats:
        """Counts jobs by queue, state, worker and attempts, and those that changed within ``recent``; at most
        ``max_count`` jobs of each of ``stats.STATE_GROUPS``."""

    async def read_history(self, since_us: int, interval: HistoryInterval) -> list[HistoryRow]:
        """Counts of jobs by the interval in which they ended, from the one of ``since_us`` on, in this order."""

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        """The last jobs that died, and those of the last failures (Redis: within an hour) that wait to be retried."""

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        """Returns ended jobs and failed attempts after a cursor or an instant (microseconds); None: from now on.
        Passes nothing by, however late its transaction is committed, but what was replayed, deleted or pruned before
        anybody asked, and what ended longer than ``max_age`` ago: nothing leads back further, even an invented cursor.
        May repeat events of about the last second. A cursor older than ``max_age`` is a gap; Invalid for other text."""


class Health(Protocol):
    """Checks, repair and copies of a store."""

    async def doctor(self) -> list[Finding]:
        """Returns the store's checks of itself: effective durability first."""

    async def durability(self) -> Finding:
        """The first of these alone: what is in effect now."""

    async def repair(self) -> list[Finding]:
        """Repairs what it can without losing a job, while the store is in use; returns a finding for each repair."""

    async def backup(self, path: str) -> None:
        """Write a consistent copy while everything goes on."""

    async def server_time_us(self) -> int:
        """The store's clock, in microseconds since 1970."""


class Schedules(Protocol):
    """Recurring jobs. What is due, and when next, ``core/schedule.py`` computes; the store keeps it."""

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        """Replace, add or remove a schedule and submit the jobs of its ticks, in one transaction, if it still has the
        expected revision. Returns its revision; None: another write came first, and nothing was changed.

        The revision of a new schedule begins at the store's clock, so that no earlier life of its name reached it.
        """

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        """The schedule of this name, or a page of all of them by name, beginning behind ``after``."""

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        """Schedules whose tick has come, the earliest first."""


class Limits(Protocol):
    """Limits, and the buckets they have. ``core/limits.py`` says which jobs pass through which buckets.

    A claim takes a job under limits only if each of its buckets has room for it (``core.limits.Admission``), and then
    takes its tokens in the same write. Room is what the running jobs leave: it is free again with the state of the job,
    whatever ended it. Partitions of a queue are served by their shares; one without room is passed over at no cost for
    its jobs. A claim by ids (``ids``) leaves such jobs where they are. ``submit`` gives jobs their partitions
    by the limits that this process has read within 5 s; jobs of a limited queue that came without one get theirs from
    the next claim of that queue.
    """

    async def write_limit(self, change: LimitChange) -> int | None:
        """Replace, add or remove a limit, if it still has the expected revision. Returns its revision; None: another
        write came first, and nothing was changed. The revision of a new limit begins at the store's clock."""

    async def read_limits(self) -> list[Limit]:
        """All limits, by name."""

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> Assigned:
        """Gives jobs of a queue or a task that have not ended the partitions that the limits now say: up to ``limit``
        jobs, those behind the id ``after``. A running job moves its room into its new buckets."""

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        """Use of these buckets, in their order."""

    async def count_unstarted(self, buckets: Sequence[str], *, max_count: int) -> list[int]:
        """Counts the jobs of each of these buckets that have not started, of limits with a depth (``is_counted``). At a
        bounded price: a bucket with ``max_count`` may have more."""

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        """Takes tokens of a limit with a rate; returns 0, or how long until they can be taken, and takes none."""

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        """Admits no job through these buckets before that time is over. A later end of an earlier pause stays.

        No time at all ends every pause; the next write of the limit tells workers that wait."""


class Workflow(Protocol):
    """Steps of jobs, and what jobs wait for: signals, children and other jobs.

    Steps stay with the job until it is deleted. A new job may have some from the beginning (``NewJob.first_steps``).

    A job with dependencies (``NewJob.after``) is ``waiting`` with the reason ``dependency`` from its submission until
    each is met, and then due at once (``scheduled`` at that instant). Every end of a job, whatever caused it, resolves
    the dependencies on it in the same transaction; a deletion before its end counts as a cancellation. A dependency
    that fails cancels the job that waits, with the reason ``dependency``; that is an end too.

    A replay opens the dependencies on the replayed job again, for jobs that no worker has taken yet: those that wait
    still, and those that one of them has cancelled, which wait again as if they were replayed too (unless they have a
    unique key). A replayed job waits again for those of its dependencies that are not met and whose jobs have not
    ended; the others count as met from then on.

    A batch (``NewJob.is_batch``) ends as ``core.batches`` says.
    """

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        """Store steps, each under its lease, in one transaction; returns for each whether it is stored.

        Refused: the lease is lost. A step that is there already stays: a call whose answer was lost may be repeated. A
        value (number 0) replaces an earlier one; at most one of each name in a call.
        """

    async def read_steps(self, job_id: str) -> list[Step]:
        """The values and steps of a job by number."""

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        """Take the oldest signal of a topic for a step of a running job, or make the job its receiver.

        In one transaction, under the lease of the step. The answer is the result of the step if it is recorded already;
        else a signal that no job has received, recorded as the result; else, if the deadline has come (at once for a
        timeout of 0), ``{"timed_out":true}``, recorded too. Otherwise the job becomes a receiver under this lease, in
        place of what it waited for before; the deadline of an earlier wait stays.
        """

    async def send_signal(self, signal: Signal) -> SentSignal:
        """Record a signal as the step of its receiver, or keep it until there is one.

        The receiver is the job that has waited longest for the topic, and runs or waits under the lease with which it
        became one. In state ``waiting`` it is due at once. The id is known for ``SIGNAL_RETENTION``. Conflict if
        ``MAX_SIGNALS`` of the topic are kept.
        """

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        """Signals that no job has received, of one topic or of all, the oldest first."""

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        """Submit children of a running job, and wait for their ends, in place of what it waited for before.

        None: the lease is lost. A child that is there already stays. One that this job has started before is not
        submitted: the job that stood for it still does, deleted or not. In one transaction (Redis: each 200 of them).
        """

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        """Returns the progress of a batch, without looking at its members; None for a job that is no batch."""

    async def read_waits(self, job_id: str) -> JobWaits:
        """Returns what a job waits for, and the jobs that wait for it, in the order of their ids."""


class Statement(msgspec.Struct, frozen=True):
    """A statement for the caller's own connection. Each ``?`` stands for the next parameter; on SQLite also ``?1``."""

    sql: str
    parameters: Sequence[object] = ()


Rows: TypeAlias = Sequence[Sequence[Any]]

StatementFlow: TypeAlias = Generator[Statement, Rows, T]
"""Yields statements for the caller's own connection, is sent all rows of each, and returns the verb's answer. It does
no I/O, so any driver and any thread can run it."""


class External(Protocol):
    """Jobs inside a transaction that the caller holds. SQL stores have it.

    A statement flow neither begins nor ends a transaction. Its writes exist once the caller commits, and never if they
    roll back. Wake-ups come with the commit.
    """

    dialect: str
    """SQL dialect of the database: ``sqlite`` or ``postgresql``."""

    async def verify(self) -> StatementFlow[None]:
        """Check that a connection is open on this very store; raises Invalid, naming the database, if it is not."""

    def submit_flow(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        """``submit``, but for the commit."""

    def complete_flow(self, lease: Lease, result: str | None, worker: str | None = None) -> StatementFlow[Settled]:
        """End a running job as ``succeeded`` under its lease. From then on, until the caller's transaction ends, no
        other worker can take or settle the job. Not accepted: nothing was changed. ``worker``: the holder of the
        lease; a failover may give its number to another one. None: not compared."""

    def record_step_flow(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        """Record a new step under its lease, which lasts until the caller's transaction ends. Not recorded if the
        transaction does not see the step ``previous``, or the job has one of this name."""

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        """Returns the outcome of a completion under this lease, as far as is known now. Waits for no transaction."""


class Store(Protocol):
    """The durable source of truth: its life, and its families of verbs, each for the running event loop."""

    url: str
    """As opened, without password."""

    @property
    def queueing(self) -> Queueing: ...

    @property
    def maintenance(self) -> Maintenance: ...

    @property
    def admin(self) -> Admin: ...

    @property
    def query(self) -> Query: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def workflow(self) -> Workflow: ...

    @property
    def health(self) -> Health: ...

    @property
    def external(self) -> External | None:
        """None for a store without external transactions. Needs an event loop only if their connection does."""

    async def open(self) -> None:
        """Connect and check: ours, the right schema (migrating an old or empty one), safe to use. Idempotent."""

    async def missing(self) -> str | None:
        """Message about what an unopened store lacks; None if it exists. Needs no opening, and makes nothing."""

    async def close(self) -> None:
        """Finish what is under way and disconnect. Idempotent."""

    async def migrate(self) -> list[str]:
        """Bring the schema up to date; the names of the migrations that were applied, by opening the store too."""

    def migration_sql(self, span: str) -> str:
        """The migrations after FROM up to TO (``FROM..TO``, from 0) as SQL, for a migration tool of one's own.

        With what they are noted in. Opens nothing; Invalid for what names no migrations."""

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one of this store's calls for a caller without an event loop, as fast as this store can."""
