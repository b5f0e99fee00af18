"""A store whose ready jobs' ids a transport carries. The store stays the truth: a transport that is away delays
only wake-ups, and the sweep publishes lost ids again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from typing import Unpack

import msgspec

from holdfast.core.clock import run_first
from holdfast.core.errors import HoldfastError
from holdfast.core.events import Event
from holdfast.core.fault_points import fault_point
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import (
    BulkResult,
    Claim,
    Finding,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    QueueInfo,
    Settled,
    Settlement,
    States,
    Submitted,
    TxOutcome,
)
from holdfast.core.schedule import ScheduleChange
from holdfast.core.waits import ChildStatus
from holdfast.core.workers import HeartbeatReply, LeaseStatus, WorkerHeartbeat
from holdfast.stores.base import (
    Admin,
    ClaimRequest,
    External,
    Health,
    Maintenance,
    Query,
    Queueing,
    Schedules,
    Selection,
    Workflow,
)
from holdfast.stores.forwarding import (
    ForwardingAdmin,
    ForwardingExternal,
    ForwardingHealth,
    ForwardingMaintenance,
    ForwardingQuery,
    ForwardingQueueing,
    ForwardingSchedules,
    ForwardingStore,
    ForwardingWorkflow,
    ReplayOptions,
)
from holdfast.stores.transportable import TransportableStore, TransportQueries
from holdfast.transports.alternating_claiming import AlternatingClaiming, TransportAlternation
from holdfast.transports.contract import Delivery, Transport
from holdfast.transports.reconciler import Reconciler
from holdfast.transports.session import Away, DeliveryLedger, TransportSession, run_checks


class TransportStore(ForwardingStore):
    """A store whose verbs that make jobs ready, claim or end them go by the transport too."""

    _inner: TransportableStore

    def __init__(
        self,
        store: TransportableStore,
        make: Callable[[], Transport],
        in_flight: DeliveryLedger,
        emit: Callable[[Event], None],
    ) -> None:
        super().__init__(store)
        self._make = make
        self._in_flight = in_flight
        self._emit = emit
        self._opened: dict[asyncio.AbstractEventLoop, _OpenTransport] = {}

    async def open(self) -> None:
        """Open the store. The transport is reached when it is needed: it may be away."""
        await self._inner.open()
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            for ended in [each for each in self._opened if each.is_closed()]:
                del self._opened[ended]
            session = TransportSession(self._make(), self._emit)
            self._opened[loop] = _OpenTransport(self._inner.transport_queries, session, self._in_flight)

    async def close(self) -> None:
        """Gives buffered deliveries back, and closes the transport and the store."""
        opened = self._opened.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.session.close()
        await self._inner.close()

    @property
    def _transport(self) -> _OpenTransport:
        """The transport in the running event loop."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None:
            raise HoldfastError("this store is not open; await open() first, or use the application as a context")
        return opened

    @property
    def queueing(self) -> Queueing:
        return TransportQueueing(self._inner.queueing, self._transport)

    @property
    def maintenance(self) -> Maintenance:
        return TransportMaintenance(self._inner.maintenance, self._transport)

    @property
    def admin(self) -> Admin:
        return TransportAdmin(self._inner.admin, self._transport)

    @property
    def query(self) -> Query:
        return TransportQuery(self._inner.query, self._transport.session)

    @property
    def schedules(self) -> Schedules:
        return TransportSchedules(self._inner.schedules, self._transport)

    @property
    def workflow(self) -> Workflow:
        return TransportWorkflow(self._inner.workflow, self._transport)

    @property
    def health(self) -> Health:
        return TransportHealth(self._inner.health, self._inner.query, self._transport.session)

    @property
    def external(self) -> External | None:
        external = self._inner.external
        return None if external is None else TransportExternal(external, lambda: self._transport)


class TransportQueueing(ForwardingQueueing):
    """Queueing of the store; ready jobs are announced, and claimed jobs were delivered."""

    def __init__(self, inner: Queueing, transport: _OpenTransport) -> None:
        super().__init__(inner)
        self._queries = transport.queries
        self._transport = transport
        self._session = transport.session
        self._in_flight = transport.in_flight

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Stores the jobs and publishes ready ones. A failure of the transport does not fail the submission."""
        answers = await self._inner.submit(jobs)
        new = [
            job if answer.created else msgspec.structs.replace(job, id=answer.job_id)
            for job, answer in zip(jobs, answers, strict=True)
            if answer.created or answer.changed
        ]
        unpublished = await self._transport.publish_new(new, {answer.job_id for answer in answers if answer.changed})
        if not unpublished:
            return answers
        return [msgspec.structs.replace(answer, wake_up_delayed=answer.job_id in unpublished) for answer in answers]

    async def claim(self, request: ClaimRequest) -> Claim:
        """Claims delivered jobs; while the transport is away, and for a quarantined job, claims from the store."""
        session = self._session
        if request.ids is None and not request.isolated:
            await session.stop_listening()
            session.capacity = request.capacity
            with suppress(Away):
                alternation = self._transport.alternation
                return await AlternatingClaiming(self._queries, session, self._in_flight, alternation).run(request)
        return await self._inner.claim(request)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Settle; then acknowledge, announce jobs that are ready again, and publish dead letters."""
        answers = await self._inner.settle(settlements)
        settled = [Lease(each.job_id, each.claims) for each in answers if not each.locked]
        await self._session.try_call(self._session.transport.ack(self._in_flight.remove_leases(settled)))
        changed = [answer.job_id for answer in answers if answer.accepted and answer.state in _TO_PUBLISH]
        if changed:
            with suppress(HoldfastError):  # it is settled: a sweep does the rest
                await self._transport.publish_changes(changed)
        return answers

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        """Renews leases; prolongs the deliveries of held ones and acknowledges those of lost ones."""
        reply = await self._inner.heartbeat(heartbeat, leases, lease_for=lease_for)
        lost = [lease for lease, status in zip(leases, reply.statuses, strict=True) if status is LeaseStatus.LOST]
        finished, touched = self._in_flight.remove_leases(lost), self._in_flight.unacked(heartbeat.worker, leases)
        if finished or touched:
            self._transport.touch(touched, finished)
        return reply

    async def deregister(self, worker: str) -> None:
        """Deregisters a stopped worker; its deliveries go to other workers."""
        await self._session.return_deliveries()
        self._in_flight.forget_worker(worker)
        await self._inner.deregister(worker)

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        """Waits for deliveries of the queues or a change of the next due job; other topics wait in the store."""
        queues = [topic.removeprefix("queue:") for topic in topics if topic.startswith("queue:")]
        session = self._session
        if not queues:
            await self._inner.wait(topics, timeout=timeout)
        elif session.away:
            await run_first(self._inner.wait(topics, timeout=timeout), session.back.wait())
        elif session.has_unseen_delivery:
            session.has_unseen_delivery = False
        else:
            others = [topic for topic in topics if not topic.startswith("queue:")]
            waits = [self._inner.wait([*others, *(f"due:{queue}" for queue in queues)], timeout=timeout)]
            wanted = session.queues_with_room(queues)
            await run_first(*waits, *([session.listen(wanted, timeout)] if wanted else []))
            await session.stop_listening()
            session.has_unseen_delivery = False


class TransportSchedules(ForwardingSchedules):
    """Schedules of the store; the jobs of their ticks are announced."""

    def __init__(self, inner: Schedules, transport: _OpenTransport) -> None:
        super().__init__(inner)
        self._transport = transport

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        """Write, and announce the jobs. An id that was there before is announced once more, which does no harm."""
        revision = await self._inner.write_schedule(change)
        if revision is not None:
            await self._transport.publish_new(change.jobs)
        return revision


class TransportWorkflow(ForwardingWorkflow):
    """Workflows of the store; children are announced."""

    def __init__(self, inner: Workflow, transport: _OpenTransport) -> None:
        super().__init__(inner)
        self._transport = transport

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        """Starts them, and announces those that no worker has taken. Once more does no harm."""
        statuses = await self._inner.start_children(lease, children, worker)
        unstarted = [each.job_id for each in statuses or () if each.state in (JobState.QUEUED, JobState.SCHEDULED)]
        if unstarted:
            with suppress(HoldfastError):  # they are stored: a sweep does the rest
                await self._transport.publish_changes(unstarted)
        return statuses


class TransportMaintenance(ForwardingMaintenance):
    """Maintenance of the store; jobs that fall due are announced."""

    def __init__(self, inner: Maintenance, transport: _OpenTransport) -> None:
        super().__init__(inner)
        self._queries = transport.queries
        self._transport = transport

    async def promote_due(self, *, limit: int) -> int:
        """Make due jobs of every queue ready, and announce them."""
        ready = await self._queries.make_ready(None, limit=limit)
        await self._transport.publish_ready(ready)
        return sum(map(len, ready.values()))

    async def reannounce(self) -> int:
        """Announce lost ids again."""
        return await self._transport.reconciler.sweep()


class TransportAdmin(ForwardingAdmin):
    """Changes by operators; ready jobs are announced, dead letters are kept in step."""

    def __init__(self, inner: Admin, transport: _OpenTransport) -> None:
        super().__init__(inner)
        self._queries = transport.queries
        self._transport = transport

    async def replay(self, selection: Selection, **options: Unpack[ReplayOptions]) -> BulkResult:
        """Queue again, announce, and take dead letters off their list."""
        operated = await self._inner.replay(selection, **options)
        if operated.changed:
            with suppress(HoldfastError):  # done: a sweep does the rest
                queues = await self._transport.publish_changes([job_id for job_id, _ in operated.changed])
                await self._transport.reconciler.sync_dead_letters(queues)
        return operated

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        """Edit, and announce a ready job in the queue that it is in now; its id is refused where it was before."""
        operated = await self._inner.edit(job_id, changes)
        if operated.changed and (changes.queue is not None or changes.has_time):
            with suppress(HoldfastError):  # it is stored: a sweep does the rest
                await self._transport.publish_changes([job_id])
        return operated

    async def delete(self, selection: Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        """Remove the jobs, and dead ones from their list: at once where the selection says which queues they are of."""
        queues: set[str] = set()
        if isinstance(selection, JobFilter):
            queues.update([] if selection.queue is None else [selection.queue])
        else:
            located = await self._queries.locate_jobs(selection)
            queues.update(queue for queue, state in located.values() if state is JobState.DEAD)
        operated = await self._inner.delete(selection, limit=limit, states=states)
        if any(state is JobState.DEAD for _, state in operated.changed):
            with suppress(HoldfastError):
                await (
                    self._transport.reconciler.sync_dead_letters(queues)
                    if queues
                    else self._transport.reconciler.sync_next_lists()
                )
        return operated

    async def resume(self, queue: str) -> None:
        """Open the queue, announce the ids it lost meanwhile, and have its workers look at it again."""
        await self._inner.resume(queue)
        with suppress(HoldfastError):
            await self._queries.wake_waiters([f"due:{queue}"])
            await self._transport.reconciler.reannounce_queue(queue)


class TransportQuery(ForwardingQuery):
    """Reads of the store; its queues show how many of their ids wait in the transport."""

    def __init__(self, inner: Query, session: TransportSession) -> None:
        super().__init__(inner)
        self._session = session

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        """Returns the queues of the store, each with the number of its ids in the transport."""
        queues = await self._inner.queues(recent=recent, max_count=max_count)
        backlog: Mapping[str, int] = {}
        with suppress(Away):
            backlog = await self._session.call_transport(
                self._session.transport.queue_backlogs([queue.name for queue in queues])
            )
        return [msgspec.structs.replace(queue, announced=backlog.get(queue.name)) for queue in queues]


class TransportHealth(ForwardingHealth):
    """Checks of the store and of the transport."""

    def __init__(self, inner: Health, query: Query, session: TransportSession) -> None:
        super().__init__(inner)
        self._query = query
        self._session = session

    async def doctor(self) -> list[Finding]:
        """Returns the findings of the store and of the transport."""
        queues = await self._query.queues(recent=_RECENT, max_count=_MAX_QUEUES)
        return [*await self._inner.doctor(), *await run_checks(self._session.transport, queues)]


class TransportExternal(ForwardingExternal):
    """Jobs inside the callers' transactions; a delivery is acknowledged when its completion is known."""

    def __init__(self, inner: External, transport: Callable[[], _OpenTransport]) -> None:
        super().__init__(inner)
        self._transport = transport

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        """Outcome of a job that its handler has ended; a delivery that is finished is acknowledged."""
        completion = await self._inner.tx_outcome(lease)
        if completion in (TxOutcome.COMMITTED, TxOutcome.LEASE_LOST):
            transport = self._transport()
            finished = transport.in_flight.remove_leases([lease])
            await transport.session.try_call(transport.session.transport.ack(finished))
        return completion


_RECENT, _MAX_QUEUES = timedelta(minutes=1), 100_000  # limits of the queues that `holdfast doctor` reads
_TO_PUBLISH = frozenset({JobState.QUEUED, JobState.DEAD, JobState.FAILED, JobState.SCHEDULED})
"""States after which a settled job is announced, listed as dead, or wakes a worker that waits for due jobs."""


class _OpenTransport:
    """The transport in one event loop."""

    def __init__(self, queries: TransportQueries, session: TransportSession, in_flight: DeliveryLedger) -> None:
        self.queries = queries
        self.session = session
        self.in_flight = in_flight
        self.alternation = TransportAlternation()
        self.reconciler = Reconciler(queries, session)
        self._touching: asyncio.Task[None] | None = None

    async def publish_ready(self, ready: Mapping[str, Sequence[str]]) -> bool:
        """Publishes ready jobs, by queue; returns True if the transport has them all."""
        return not ready or await self.session.try_call(self._publish(ready))

    async def publish_new(self, jobs: Sequence[NewJob], changed: Set[str] = frozenset()) -> set[str]:
        """Publishes new and changed jobs that are ready, wakes workers that sleep until a due one. Returns the ids it
        could not publish."""
        ready = await self._ready_of(jobs, changed)
        published = await self.publish_ready(_by_queue([(job.queue, job.id) for job in ready]))
        return set() if published else {job.id for job in ready}

    async def _ready_of(self, jobs: Sequence[NewJob], changed: Set[str]) -> Sequence[NewJob]:
        """Selects the ready jobs, as only the store knows the time, and to which queues edits have moved the
        ``changed`` jobs. Wakes workers that sleep until the next due job."""
        timed = {job.id for job in jobs if job.delay is not None or job.run_at_us is not None or job.waits} | changed
        if not timed:
            return jobs
        ready: dict[str, str] = {}
        with suppress(HoldfastError):  # they are stored: a sweep finds those that are ready
            located = await self.queries.locate_jobs(list(timed))
            ready = {job_id: queue for job_id, (queue, state) in located.items() if state is JobState.QUEUED}
            await self.queries.wake_waiters(
                [f"due:{queue}" for job_id, (queue, _) in located.items() if job_id not in ready]
            )
        found = [job for job in jobs if job.id not in timed or job.id in ready]
        return [msgspec.structs.replace(job, queue=ready.get(job.id, job.queue)) for job in found]

    async def _publish(self, ready: Mapping[str, Sequence[str]]) -> None:
        fault_point("announce.before")
        await self.session.transport.publish(ready)

    async def publish_changes(self, job_ids: Sequence[str]) -> set[str]:
        """Publishes ready jobs and dead letters, wakes workers that sleep until a due job. Returns their queues."""
        by_state: dict[JobState, list[tuple[str, str]]] = {}
        located = await self.queries.locate_jobs(job_ids)
        for job_id, (queue, state) in located.items():
            by_state.setdefault(state, []).append((queue, job_id))
        await self.publish_ready(_by_queue(by_state.get(JobState.QUEUED, [])))
        if JobState.DEAD in by_state:
            await self.session.try_call(self.session.transport.dead_letter(_by_queue(by_state[JobState.DEAD])))
        due = by_state.get(JobState.FAILED, []) + by_state.get(JobState.SCHEDULED, [])
        if due:
            await self.queries.wake_waiters([f"due:{queue}" for queue in {queue for queue, _ in due}])
        return {queue for queue, _ in located.values()}

    def touch(self, live: Sequence[Delivery], finished: Sequence[Delivery]) -> None:
        """Prolongs and acknowledges deliveries in the background: a heartbeat does not wait for that."""
        if self._touching is None or self._touching.done():
            self._touching = asyncio.create_task(self._touch(live, finished), name="holdfast-transport-touch")

    async def _touch(self, live: Sequence[Delivery], finished: Sequence[Delivery]) -> None:
        transport = self.session.transport
        with suppress(HoldfastError):  # claims and settlements report a transport that is away
            await transport.extend(live)
            await transport.ack(finished)


def _by_queue(located: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Ids by queue."""
    found: dict[str, list[str]] = {}
    for queue, job_id in located:
        found.setdefault(queue, []).append(job_id)
    return found
