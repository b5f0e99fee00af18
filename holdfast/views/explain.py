"""Explains why a job is not running: from facts about it to reasons with remedies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.app import Holdfast
from holdfast.core.batches import BATCH_TASK, BatchProgress
from holdfast.core.dependencies import DependencyState
from holdfast.core.errors import Busy, TooBroad
from holdfast.core.lifecycle import REPLAYABLE, Deferral, correct_arguments, deferral_of, is_last_attempt
from holdfast.core.models import Job, JobFilter, JobState, QueueInfo, Reason, to_microseconds
from holdfast.core.validation import did_you_mean, format_duration
from holdfast.core.waits import JobWaits
from holdfast.core.workers import WorkerInfo, serves_queue
from holdfast.stores.base import EVERY_QUEUE, Store
from holdfast.stores.common.searches import iterate_jobs
from holdfast.tasks.command_policy import COMMAND
from holdfast.views.formatting import clip_text, count_noun, format_moment, format_span
from holdfast.views.limit_use import LimitUse, explain_use, read_limit_uses, shown_value

_START_WITH_KEY = "start workers whose application has a codec with that key"
_START_CAPABLE_WORKER = (
    "start a worker whose application has it, and let applications on one store have queues of their own: "
    "a worker gives back what it does not know, for as long as defer_for says, and then it is dead"
)
_COUNTED = 2000  # ready jobs of a queue that are read to determine a job's exact position
_AWAITED_SHOWN = 3  # jobs that a waiting job waits for
_CAUSE = 500  # characters of the error of a deferred job
_MINUTE = timedelta(minutes=1)
_LATE = timedelta(seconds=3)  # tolerated delay of a heartbeat


class Explanation(msgspec.Struct, frozen=True):
    """A reason for a job's state, and the remedy if it is a problem."""

    code: Annotated[str, Meta(description="A stable word for it.", examples=["no_worker"])]
    text: str
    remedy: Annotated[str, Meta(description="What to do about it; empty where nothing is wrong.")] = ""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for ``explain_job``. ``tasks``: of the application; None without an application or tasks."""

    now_us: int
    paused: bool = False
    workers: tuple[WorkerInfo, ...] = ()
    tasks: frozenset[str] | None = None
    gone: frozenset[str] = frozenset()  # workers of this host whose process has ended
    silence: timedelta = timedelta(days=1)  # longest time between heartbeats of a living worker
    ahead: int = 0  # ready jobs ahead of it in its queue; under limits, in its partition
    first: str | None = None  # id of the first of them, where it is known
    exact: bool | None = True  # False: at most ``ahead``; None: more jobs are ready than were counted
    defer_for: timedelta = timedelta(hours=1)
    transport_away: bool = False  # the transport of its queue is unavailable
    holder: Job | None = None  # job with its unique key, which prevents a replay
    limits: tuple[LimitUse, ...] = ()  # that apply to a ready job
    running: dict[str, int] = {}  # running jobs by queue
    waits: JobWaits = JobWaits(None, [], [])
    awaited: tuple[Job | None, ...] = ()  # the first of the jobs that it waits for, or that have failed it
    batch: BatchProgress | None = None
    redacted: bool = False  # the caller may not see other queues
    hidden: frozenset[str] = frozenset()  # ids of ``awaited`` and ``holder`` that the caller may not see

    @property
    def alive(self) -> list[WorkerInfo]:
        return [worker for worker in self.workers if worker.alive]


_LAST_ATTEMPT = "this is its last attempt"
_UNSTARTED = {JobState.QUEUED, JobState.SCHEDULED, JobState.FAILED}
"""States of jobs that queues and workers may hold back."""


async def job_facts(app: Holdfast, job: Job) -> JobFacts:
    """Reads the facts about a job."""
    from holdfast.worker.executors.process_group import is_gone

    store = await app.open_store()
    workers = await store.query.workers() if job.state in _UNSTARTED | {JobState.RUNNING} else []
    max_count = _COUNTED + 1 if job.state is JobState.QUEUED else 1
    found = await store.query.queues(recent=_MINUTE, max_count=max_count) if job.state in _UNSTARTED else []
    queues = [queue for queue in found if queue.name == job.queue]
    ahead, exact, first = await _ahead(store, job, queues) if job.state is JobState.QUEUED else (0, True, None)
    waits = await store.workflow.read_waits(job.id) if _has_waits(job) else JobWaits(None, [], [])
    shown = DependencyState.OPEN if job.state is JobState.WAITING else DependencyState.FAILED
    unmet = [each.job_id for each in waits.dependencies if each.state is shown]
    return JobFacts(
        now_us=await store.health.server_time_us(),
        paused=any(queue.paused for queue in queues),
        transport_away=app.settings.transport != "none" and any(queue.announced is None for queue in queues),
        workers=tuple(workers),
        gone=frozenset(each.heartbeat.worker for each in workers if is_gone(each.heartbeat.host, each.heartbeat.pid)),
        silence=app.settings.heartbeat + _LATE,
        defer_for=app.settings.defer_for,
        tasks=frozenset(app.registry.task_names()) or None if app.settings.app is not None else None,
        ahead=ahead,
        first=first,
        limits=await read_limit_uses(store, job) if job.state is JobState.QUEUED else (),
        exact=exact,
        waits=waits,
        batch=await store.workflow.read_batch(job.id) if job.task == BATCH_TASK else None,
        awaited=tuple(await store.query.summaries(unmet[:_AWAITED_SHOWN])),
        running={queue.name: queue.states.get(JobState.RUNNING, 0) for queue in found},
        holder=await app.unique_holder(job.id) if job.state in REPLAYABLE else None,
    )


async def _ahead(store: Store, job: Job, queues: Sequence[QueueInfo]) -> tuple[int, bool | None, str | None]:
    """Returns the number of ready jobs ahead of it in its queue, and the first; see ``JobFacts.exact``."""
    if any(JobState.QUEUED in queue.at_least for queue in queues):
        return 0, None, None
    others = max(0, sum(queue.states.get(JobState.QUEUED, 0) for queue in queues) - 1)
    if others < _COUNTED:
        with suppress(TooBroad, Busy):
            found = iterate_jobs(store, JobFilter(queue=job.queue, states=(JobState.QUEUED,)))
            same = [(-one.priority, one.run_at_us, one.id) async for one in found if one.partition == job.partition]
            ahead = [place for place in same if place < (-job.priority, job.run_at_us, job.id)]
            return len(ahead), True, min(ahead)[-1] if ahead else None
    return others, False, None


def explain_job(job: Job, known: JobFacts) -> Iterator[Explanation]:
    """Yields every reason, the most specific first; at least one."""
    match job.state:
        case JobState.SUCCEEDED | JobState.DEAD | JobState.CANCELLED if job.task == BATCH_TASK:
            yield _ended_batch(job, known)
        case JobState.RUNNING:
            yield _running(job, known)
        case JobState.SUCCEEDED:
            text = f"it has succeeded, at {format_moment(job.ended_at_us)}"
            yield Explanation("succeeded", text, f"to run it again: holdfast replay {job.id} --force")
        case JobState.CANCELLED if job.reason == Reason.EXPIRED:
            by = f"by {format_moment(job.expires_at_us)}, when it expired"
            yield Explanation("expired", f"no worker took it {by}", f"to run it after all: holdfast replay {job.id}")
            yield from _held_key(known)
        case JobState.CANCELLED if job.reason == Reason.DEPENDENCY:
            text = f"it was cancelled, at {format_moment(job.ended_at_us)}: {job.error}"
            yield Explanation("dependency", text, _replay_failed(job, known))
            yield from _held_key(known)
        case JobState.CANCELLED:
            text = f"it was cancelled, at {format_moment(job.ended_at_us)}"
            yield Explanation("cancelled", text, f"to run it after all: holdfast replay {job.id}")
            yield from _held_key(known)
        case JobState.DEAD:
            yield _dead(job)
            yield from _held_key(known)
        case JobState.WAITING:
            yield from _waiting(known)
            yield from _expiry(job, known)
        case _:
            obstacles = [*_not_due(job, known), *_obstacles(job, known)]
            doubts = list(_doubtful_task(job, known))
            yield from [*obstacles, *doubts] if obstacles else [*doubts, *_in_line(job, known)]
            yield from _expiry(job, known)


def _waiting(known: JobFacts) -> Iterator[Explanation]:
    receiver = known.waits.receiver
    if receiver is not None:
        since, until = format_moment(receiver.since_us), format_moment(receiver.until_us)
        text = f"it waits for a signal of topic {receiver.topic}, since {since} and until {until}"
        yield Explanation(
            "signal", text, f"to send one, with its value: holdfast signal send {shlex.quote(receiver.topic)} JSON"
        )
    if known.batch is not None:
        found = known.batch
        text = f"it is a batch: {found.ended:,} of its {found.members:,} jobs have ended, {found.failed:,} have failed"
        yield Explanation("batch", text)
    unended = [each for each in known.waits.dependencies if each.state is DependencyState.OPEN]
    for each, job in zip(unended, known.awaited, strict=False):
        if job is not None:
            text, remedy = f"it waits for job {job.id} ({job.task}), which is {job.state}", f"holdfast why {job.id}"
            if job.id in known.hidden:
                text, remedy = "it waits for another job", ""
            yield Explanation("child" if each.is_child else "dependency", text, remedy)
    if len(unended) > len(known.awaited) and known.batch is None:
        yield Explanation("more", f"it waits for {len(unended) - len(known.awaited):,} more jobs")
    if receiver is None and not unended and known.batch is None:
        yield Explanation("waiting", "what it waited for has just come")


def _expiry(job: Job, known: JobFacts) -> Iterator[Explanation]:
    if job.expires_at_us is None or job.started_at_us is not None:
        return
    left = timedelta(microseconds=job.expires_at_us - known.now_us)
    if left > timedelta(0):
        text = f"it expires in {format_span(left)}, at {format_moment(job.expires_at_us)}"
        remedy = f"to give it more time: holdfast edit {job.id} --expires 1h"
    else:
        text = f"it has expired, at {format_moment(job.expires_at_us)}: the next claim or sweep ends it"
        remedy = "start a worker if none is alive"
    yield Explanation("expires", text, remedy)


def _held_key(known: JobFacts) -> Iterator[Explanation]:
    holder = known.holder
    if holder is not None:
        which, see = (
            f"job {holder.id} has the same unique key, and is {holder.state}",
            f"; see: holdfast why {holder.id}",
        )
        if holder.id in known.hidden:
            which, see = "another job has the same unique key", ""
        text = f"it cannot be replayed now: {which}"
        yield Explanation("unique", text, f"replay it when that one gives it up{see}")


def _running(job: Job, known: JobFacts) -> Explanation:
    if job.lease_until_us is not None and job.lease_until_us <= known.now_us:
        text = (
            f"its lease ran out at {format_moment(job.lease_until_us)}: worker {job.worker} died, froze or was cut off"
        )
        recovery = f"ends it as dead (crashed): {_LAST_ATTEMPT}" if is_last_attempt(job) else "recovers it"
        remedy = f"any worker that does maintenance {recovery}; start one if none is alive"
        return Explanation("lease_expired", text, remedy)
    since = "" if job.started_at_us is None else f" since {format_moment(job.started_at_us)}"
    where = f"it is running on worker {job.worker}{since}, attempt {job.attempts}"
    if job.cancelling:
        text = f"{where}, and was asked to stop"
        return Explanation("cancelling", text, "a handler in a thread stops when it looks; one in a process is killed")
    silences = [
        doubt for each in known.workers if each.heartbeat.worker == job.worker and (doubt := _silence_of(each, known))
    ]
    if silences and job.lease_until_us is not None:
        return _on_silent_worker(job, known, f"{where}; but {silences[0]}", format_moment(job.lease_until_us))
    return Explanation("running", where, f"to stop it: holdfast cancel {job.id}")


def _on_silent_worker(job: Job, known: JobFacts, text: str, until: str) -> Explanation:
    others = [
        each for each in _serving(job, known) if each.heartbeat.worker != job.worker and not _silence_of(each, known)
    ]
    if is_last_attempt(job):
        text = f"{text}: if that worker died, the job becomes dead (crashed) after {until}: {_LAST_ATTEMPT}"
    else:
        text = f"{text}: if that worker died, the job runs again after {until}"
    if others and is_last_attempt(job):
        return Explanation("worker_silent", text, f"once it is dead, mend the cause, then: holdfast replay {job.id}")
    if others:
        serve = "other worker serves" if len(others) == 1 else "other workers serve"
        number = f"{len(others)} {serve} queue {job.queue}"
        return Explanation("worker_silent", text, f"nothing to do: {number}")
    return Explanation("worker_silent", text, f"start another: holdfast worker start --queues {job.queue}")


def _silence_of(worker: WorkerInfo, known: JobFacts) -> str:
    """Text for the silence of a worker that may have died; empty if its heartbeats are regular."""
    silent = timedelta(microseconds=known.now_us - worker.seen_at_us)
    heard = f"worker {worker.heartbeat.worker} was last heard from {format_span(silent)} ago"
    if worker.heartbeat.worker in known.gone:
        return f"{heard}, and this host has no process {worker.heartbeat.pid}"
    return heard if silent > known.silence else ""


def _has_waits(job: Job) -> bool:
    is_failed = job.state is JobState.CANCELLED and job.reason == Reason.DEPENDENCY
    return job.state is JobState.WAITING or is_failed or job.task == BATCH_TASK


def _replay_failed(job: Job, known: JobFacts) -> str:
    """The remedy for a job that was cancelled by the end of another one, or of a batch."""
    batch = next((each for each in known.awaited if each is not None and each.task == BATCH_TASK), None)
    if batch is not None and batch.id not in known.hidden:
        return f"see which jobs of the batch have failed, and replay them: holdfast why {batch.id}"
    return f"replay that job: this one waits for it again; or run it without: holdfast replay {job.id}"


def _ended_batch(job: Job, known: JobFacts) -> Explanation:
    text = f"it is a batch, and {job.state} since {format_moment(job.ended_at_us)}"
    if job.state is not JobState.DEAD:
        return Explanation("batch", text)
    failed = [each.id for each in known.awaited if each is not None and each.id not in known.hidden]
    if None in known.awaited:  # its count of failures cannot fall to 0 any more
        gone = "failed jobs of it no longer exist, so that no replay repairs it"
        remedy = f"submit it again; to delete this one: holdfast delete {job.id}"
        return Explanation("batch", f"{text}: {job.error}; {gone}", remedy)
    remedy = f"to replay jobs of it that have failed: holdfast replay {' '.join(failed)}" if failed else ""
    return Explanation("batch", f"{text}: {job.error}", remedy)


def _dead(job: Job) -> Explanation:
    replayed = f"holdfast replay {job.id}"
    error = f": {clip_text(job.error)}" if job.error else ""
    dead = f"it has been dead since {format_moment(job.ended_at_us)}, "
    match job.reason:
        case Reason.MAX_ATTEMPTS:
            text, remedy = (
                f"no attempt is left of {count_noun(job.attempts, 'attempt')}; the last error{error}",
                f"mend the cause, then: {replayed}",
            )
        case Reason.NO_HANDLER:
            text = f"worker {job.worker} has no task {job.task}"
            remedy = f"{_START_CAPABLE_WORKER}, then: {replayed}"
        case Reason.PAYLOAD:
            text = f"its payload does not fit the task{error}"
            remedy = f"correct the arguments: {replayed} --payload '{{...}}'"
        case Reason.ENCRYPTED:
            text = f"worker {job.worker} could not decrypt it{error}"
            remedy = f"{_START_WITH_KEY}, then: {replayed}"
        case Reason.CRASHED:
            text = f"its process died, or its lease was lost, {job.attempts} times{error}"
            remedy = f"look for memory, signals and blocking code in the task, then: {replayed}"
        case Reason.RESOURCE:
            text = f"it used more than it may{error}"
            remedy = f"raise the limit of its task, its command or the settings, or mend the task; then: {replayed}"
        case Reason.SANDBOX:
            text = f"worker {job.worker} could not give it its sandbox{error}"
            remedy = f"`holdfast doctor` on that host says what is missing; then: {replayed}"
        case _:
            text, remedy = (
                f"{job.reason or 'it failed'}{error}",
                f"holdfast show {job.id}; mend the cause, then: {replayed}",
            )
    return Explanation(f"dead_{job.reason or 'error'}", dead + text, remedy)


def _not_due(job: Job, known: JobFacts) -> Iterator[Explanation]:
    wait = timedelta(microseconds=job.run_at_us - known.now_us)
    if job.state is JobState.QUEUED or wait <= timedelta(0):
        return
    if job.state is JobState.FAILED:
        text = f"attempt {job.attempts} failed: {clip_text(job.error or 'no error text')}"
        following = f"the next is in {format_span(wait)}, at {format_moment(job.run_at_us)}"
        yield Explanation("retry_later", f"{text}; {following}", f"to run it now: holdfast replay {job.id}")
    elif deferral := deferral_of(job):
        yield _deferred(job, deferral, known)
    else:
        yield Explanation("scheduled", f"it is scheduled for {format_moment(job.run_at_us)}, in {format_span(wait)}")


def _deferred(job: Job, deferral: Deferral, known: JobFacts) -> Explanation:
    began = to_microseconds(deferral.since)
    dead = max(job.run_at_us, began + known.defer_for // timedelta(microseconds=1))
    text = (
        f"deferred since {format_moment(began)}: worker {job.worker} cannot run it: "
        f"{clip_text(deferral.cause, _CAUSE)}; "
        f"next try at {format_moment(job.run_at_us)}; "
        f"dead ({job.reason}) at {format_moment(dead)} (defer_for {format_duration(known.defer_for)})"
    )
    remedy = "start workers with the code that submits it"
    if job.reason == Reason.PAYLOAD:
        remedy = f"{remedy}; {correct_arguments(job.id, deferred=True)}"
    elif job.reason == Reason.ENCRYPTED:
        remedy = _START_WITH_KEY
    return Explanation("deferred", text, remedy)


def _obstacles(job: Job, known: JobFacts) -> Iterator[Explanation]:
    if known.paused:
        yield Explanation("paused", f"queue {job.queue} is paused", f"holdfast queue resume {job.queue}")
    yield from _unknown_task(job, known)
    for use in known.limits:
        for text, remedy in explain_use(job, use, known.now_us, redacted=known.redacted):
            yield Explanation("limit", text, remedy)
    if not any(serves_queue(worker, job.queue) for worker in known.alive):
        others = ""
        if known.alive and not known.redacted:
            does = "serves other queues or is" if len(known.alive) == 1 else "serve other queues or are"
            others = f"; {count_noun(len(known.alive), 'living worker')} {does} stopping"
        text = f"no living worker serves queue {job.queue}{others}"
        yield Explanation("no_worker", text, f"holdfast worker start --queues {job.queue}")
    elif known.transport_away:
        text = (
            "the transport cannot be reached from here; workers that cannot reach it either ask the store now and then"
        )
        yield Explanation("transport_away", text, "holdfast doctor says what is wrong with it")


def _unknown_task(job: Job, known: JobFacts) -> Iterator[Explanation]:
    """Yields an explanation if an attempt has shown that a worker lacks the task; workers do not report their tasks."""
    if job.reason == Reason.NO_HANDLER and job.state is not JobState.SCHEDULED:
        text = f"worker {job.worker} took it, and has no task {job.task}"
        yield Explanation("no_handler", text, f"restart that worker if its code is old; else {_START_CAPABLE_WORKER}")


def _doubtful_task(job: Job, known: JobFacts) -> Iterator[Explanation]:
    """Yields an explanation if this call's application lacks the task and no attempt has shown that a worker does."""
    if known.tasks is None or job.task in known.tasks or job.task == COMMAND or job.reason == Reason.NO_HANDLER:
        return
    text = f"task {job.task} is not registered in this application{did_you_mean(job.task, known.tasks)}"
    wrong = f"if the name is wrong, holdfast cancel {job.id} and correct the name where it is submitted"
    if serving := _serving(job, known):
        hint = f"worker {serving[0].heartbeat.worker}, which serves its queue, may have it"
        text = f"{text} {hint}" if text.endswith("?") else f"{text}; {hint}"
        yield Explanation("handler_unknown", text, wrong)
    else:
        yield Explanation("no_handler", text, f"{wrong}; else {_START_CAPABLE_WORKER}")


def _in_line(job: Job, known: JobFacts) -> Iterator[Explanation]:
    if job.lost_leases >= 2:
        text = (
            f"it is quarantined: {job.lost_leases} leases in a row were lost under it, so it runs alone in its process"
        )
        yield Explanation(
            "quarantined", text, "it starts when a worker is idle; look in the workers' logs for what kills them"
        )
    elif job.lost_leases:
        text = "its last lease was lost, so it is taken singly: it may have killed its process"
        yield Explanation("suspect", text, "look in the workers' logs for what happened to the last attempt")
    serving = _serving(job, known)
    if serving and all(worker.heartbeat.running >= worker.heartbeat.concurrency for worker in serving):
        busy = (
            "" if known.redacted else f", with {count_noun(sum(worker.heartbeat.running for worker in serving), 'job')}"
        )
        yield Explanation("busy", f"every worker of its queue is busy{busy}", "start more, or raise --concurrency")
    bounds = list(_bounds(job, known, serving))
    yield from bounds
    if known.limits:
        yield _in_turn(job, known)
    elif known.exact is None:
        text = f"its place in the line is not known: over {_COUNTED:,} jobs of queue {job.queue} are ready"
        yield Explanation("place_unknown", text, "start more workers, or give urgent jobs a higher priority")
    elif known.ahead:
        number = ("" if known.exact else "up to ") + count_noun(known.ahead, "job")
        text = f"it waits behind {number} of queue {job.queue}"
        yield Explanation(
            "behind", text, "start more workers, or give urgent jobs a higher priority or a queue of their own"
        )
    silences = [_silence_of(worker, known) for worker in serving]
    if serving and all(silences):
        others = f" (and {count_noun(len(serving) - 1, 'other')} as silent)" if len(serving) > 1 else ""
        text = f"{silences[0]}{others}: if it died, no other worker takes the job"
        yield Explanation("worker_silent", text, f"start another: holdfast worker start --queues {job.queue}")
    elif not known.ahead and known.exact is not None and not (job.lost_leases or known.limits or bounds):
        yield Explanation("next", "nothing holds it back: a worker takes it any moment")


def _bounds(job: Job, known: JobFacts, serving: Sequence[WorkerInfo]) -> Iterator[Explanation]:
    """Explains that all its workers run as many jobs of its queue as their ``--queues`` allow."""
    most, counted = 0, set[str]()
    for worker in serving:
        parts = [part.partition(":") for part in worker.heartbeat.queues.split(",")]
        queues = {name.strip(): number for name, _, number in parts}
        bound = queues.get(job.queue, queues.get(EVERY_QUEUE, ""))
        if not bound.isdigit():
            return
        most += int(bound)
        counted |= {job.queue} if job.queue in queues else known.running.keys() - queues.keys()
    if serving and sum(known.running.get(queue, 0) for queue in counted) >= most:
        text = f"its workers run {count_noun(most, 'job')} of its queue at once, as many as their --queues allow"
        yield Explanation("queue_bound", text, f"raise the number of {job.queue} or * there, or start more workers")


def _in_turn(job: Job, known: JobFacts) -> Explanation:
    """Explains the position of a job under limits that have room."""
    keyed = [use for use in known.limits if use.value is not None]
    values = ", ".join(f"{use.limit.by} = {shown_value(job, use)}" for use in keyed)
    alike = f"of its key {values}" if keyed else "under its limits"
    text = f"limits have room for it; the keys of queue {job.queue} take turns"
    if known.exact is None or (known.ahead and not known.exact):
        text += f", and jobs {alike} may go first"
    elif known.ahead:
        text += f", and {count_noun(known.ahead, 'job')} {alike} go{'es' if known.ahead == 1 else ''} first"
    remedy = "start more workers, or give urgent jobs a higher priority: it counts within a key"
    if known.first is not None:
        remedy = f"what holds back the first of them holds back this one: holdfast why {known.first}; else {remedy}"
    if keyed:
        remedy += f"; more turns for its key: holdfast limit set {keyed[0].limit.name} --share VALUE=N"
    return Explanation("turn", text, remedy)


def _serving(job: Job, known: JobFacts) -> Sequence[WorkerInfo]:
    return [worker for worker in known.alive if serves_queue(worker, job.queue)]
