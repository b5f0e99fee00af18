"""Family ``queueing`` of Redis. A script handles up to ``MAX_PER_SCRIPT`` jobs. More jobs take several scripts; so does
a claim of more due jobs, of jobs under limits, or after a lost answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.job_logs import LogBatch
from holdfast.core.models import (
    TERMINAL,
    Claim,
    ExpiredJob,
    Job,
    JobState,
    Lease,
    NewJob,
    Reason,
    Settled,
    Settlement,
    Submitted,
)
from holdfast.core.workers import HeartbeatReply, LeaseStatus, WorkerCommand, WorkerHeartbeat
from holdfast.stores.base import ClaimRequest
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.requests import HEARTBEAT_RETRY_SHARE, MIN_CLAIM_RATE, find_extra_time
from holdfast.stores.common.server_store import wait_for_topics
from holdfast.stores.common.unconfirmed import (
    RecordedOutcome,
    UnconfirmedClaims,
    UnconfirmedSettlements,
    accepted_as,
    perhaps_stored,
    stored_ids,
)
from holdfast.stores.connections.redis import Script, split_parts
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT, ClaimKind, RedisClaimBuilder, RedisIdClaimBuilder
from holdfast.stores.redis.encoding import (
    Specs,
    claimed_job,
    decode_text,
    encode_logs,
    encode_settlements,
    expired_jobs,
    refused_submission,
    span_us,
    split_records,
    state_of,
    whole_number,
)
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.limits import PartitionAssigner
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.server_info import EvictionWatch
from holdfast.stores.redis.submission import choose_script, encode_stages, encode_submission, find_related

_LIMITED = 2  # a script's answer for a success that gave back room of limits
_LEASE_STATUSES = (LeaseStatus.LOST, LeaseStatus.HELD, LeaseStatus.CANCEL)


class RedisQueueing:
    """Family ``queueing`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        query: RedisQuery,
        specs: Specs,
        eviction: EvictionWatch,
        limits: LimitCache,
        assigner: PartitionAssigner,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._query = query
        self._specs = specs
        self._eviction = eviction
        self._limits = limits
        self._assigner = assigner
        self._is_limited_first = False
        self._last_limited = ""
        self._last_named: dict[ClaimKind, str] = {"ready": "", "limited": ""}
        self._last_by_wildcard = ""  # the unlisted queue served last
        self._unconfirmed = UnconfirmedSettlements()
        self._unconfirmed_claims = UnconfirmedClaims()

    # ── submit ────────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Stores the jobs, each part of ``MAX_PER_SCRIPT`` at once; none if a job is invalid or the server evicts."""
        if not jobs:
            return []
        await self._eviction.refuse_evicting(self._pool)
        jobs = await self._limits.bind(jobs)
        parts = list(split_parts(jobs, MAX_PER_SCRIPT))
        script = choose_script(jobs, confirmed=self._pool.is_confirmed)
        if len(parts) > 1 and script == "submit":  # each is refused by itself
            await self._check_related(jobs)
        sent = _Sent()
        try:
            await self._run_submission(script, parts, sent)
            if script == "submit_one" and sent.replies == [[0]]:
                await self._run_submission("submit_fast", parts, sent)
        except HoldfastError as error:
            outcome = perhaps_stored(error) if sent.is_uncertain and isinstance(error, Unavailable) else error
            stored = stored_ids(self._known_answers(jobs, sent))
            outcome.stored = stored if any(stored) else error.stored
            raise outcome from error.__cause__
        finally:  # a part may be stored though another was refused
            self._notifications.wake_local_waiters({f"queue:{job.queue}" for job in jobs})
        return sent.answers

    async def _check_related(self, jobs: Sequence[NewJob]) -> None:
        """Raises what a part of a submission would be refused for, before the first is stored."""
        batches = [job.id for job in jobs if job.is_batch]
        encode = partial(encode_submission, aliases={}, in_one_piece=True, earlier_batches=batches, only_checks=True)
        for part in split_parts(jobs, MAX_PER_SCRIPT):
            encode(part)  # raises Invalid before any of them is sent
        checks = [*map(encode, split_parts(find_related(jobs), MAX_PER_SCRIPT))]
        for reply in filter(None, checks and await self._pool.run_each(self._scripts["submit"], checks)):
            raise refused_submission(reply)

    async def _run_submission(self, script: str, parts: Sequence[Sequence[NewJob]], sent: _Sent) -> None:
        sent.answers, aliases, left = [], dict[str, str](), [*parts]
        for calls in encode_stages(parts, script, aliases, in_one_piece=self._pool.address.in_one_piece):
            if sent.answers:
                sent.is_uncertain = False
            stage, left = left[: len(calls)], left[len(calls) :]
            sent.stage, sent.replies = stage, []
            sent.replies = await self._pool.run_each(
                self._scripts[script],
                calls,
                on_uncertain=sent.mark_uncertain,
                on_refused=sent.read_replies,
                extra_time=find_extra_time(sum(map(len, stage)), sum(len(job.payload) for job in chain(*stage))),
                must_confirm=True,
            )
            for reply in sent.replies:
                if isinstance(reply, bytes):
                    raise refused_submission(reply, self._known_answers([*chain(*parts)], sent))
            answers = self._stage_answers(sent)
            pairs = zip(chain(*stage), answers, strict=True)
            aliases |= {job.id: answer.job_id for job, answer in pairs if not answer.created}
            sent.answers += answers
            sent.stage = ()

    def _known_answers(self, jobs: Sequence[NewJob], sent: _Sent) -> list[Submitted]:
        """Outcome of each job of a submission that has failed; a part that was not sent is not stored."""
        known = sent.answers + self._stage_answers(sent)
        return known + [Submitted(job.id, created=False) for job in jobs[len(known) :]]

    def _stage_answers(self, sent: _Sent) -> list[Submitted]:
        """Outcome of each job of the latest stage whose reply is known; a part that was refused is not stored."""
        answers: list[Submitted] = []
        for part, reply in zip(sent.stage, sent.replies, strict=False):
            if not isinstance(reply, list):
                answers += [Submitted(job.id, created=False) for job in part]
                continue
            stored_at_us = None
            if len(reply) > len(part):
                entry, last = reply.pop(), len(part) - 1 - reply[::-1].index(1)
                stored_at_us = self._pool.note_stored(entry, part[last].id)
            answers += [
                Submitted(job.id, bool(each) or sent.is_uncertain, stored_at_us=stored_at_us if each else None)
                if isinstance(each, int)
                else Submitted(each.decode().removeprefix("+"), created=False, changed=each.startswith(b"+"))
                for job, each in zip(part, reply, strict=True)
            ]
        return answers

    # ── claim ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def claim(self, request: ClaimRequest) -> Claim:
        """Promotes due jobs, claims ready ones, and returns when the next job is due."""
        try:
            claim = await (self._claim_ready(request) if request.ids is None else self._claim_ids(request, request.ids))
            await self._release_unconfirmed(request, claim)
        except asyncio.CancelledError:
            self._unconfirmed_claims.add(request.worker)
            raise
        return claim

    async def _claim_ready(self, request: ClaimRequest) -> Claim:
        """Claims jobs under no limit and jobs under limits; which of the two comes first alternates."""
        builder = RedisClaimBuilder(request, self._last_named)
        limited_first = self._is_limited_first
        try:
            if limited_first:
                await self._claim_limited(request, builder, promote=True)
            promoted = builder.promoted
            await self._claim_unlimited(request, builder)
            for queue in builder.unassigned_queues:
                await self._assigner.assign_ready(request.worker, queue, isolated=request.isolated)
            is_changed = builder.promoted > promoted or builder.unassigned_queues
            if is_changed or (builder.has_limited_jobs and not limited_first):
                await self._claim_limited(request, builder, promote=False)
        except HoldfastError:
            if not builder.jobs:  # else their leases would be unknown until they expire
                raise
        if builder.jobs:
            self._is_limited_first = builder.has_limited_jobs and not builder.began_limited
        return builder.to_claim(receives_notifications=self._notifications.is_listening("ready"))

    async def _claim_limited(self, request: ClaimRequest, builder: RedisClaimBuilder, *, promote: bool) -> None:
        common = (request.worker, span_us(request.lease_for), self._pool.address.task)
        more = True
        while more and (arguments := builder.limited_call(self._last_limited, promote=promote)) is not None:
            reply = await self._pool.run(
                self._scripts["claim_limited"],
                *common,
                *arguments,
                on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
                extra_time=request.limit / MIN_CLAIM_RATE,
            )
            self._last_limited = decode_text(reply[5])
            builder.expired += self._report_expired(reply.pop())
            more = builder.take_limited(await self._decode_or_end(reply[0], request.worker), reply)

    async def _claim_unlimited(self, request: ClaimRequest, builder: RedisClaimBuilder) -> None:
        common = (request.worker, span_us(request.lease_for), self._pool.address.task)
        while not builder.is_done:
            calls = [(*common, *arguments) for arguments in builder.script_calls(self._last_by_wildcard)]
            try:
                replies = await self._pool.run_each(
                    self._scripts["claim"],
                    calls,
                    on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
                    extra_time=request.limit / MIN_CLAIM_RATE,
                )
            except HoldfastError:
                if len(calls) > 1:  # some of them may have claimed
                    self._unconfirmed_claims.add(request.worker)
                raise
            for reply in replies:
                self._last_by_wildcard = decode_text(reply[5])
                builder.expired += self._report_expired(reply.pop())
                builder.take(await self._decode_or_end(reply[0], request.worker), reply)

    def _report_expired(self, flat: Sequence[bytes]) -> tuple[ExpiredJob, ...]:
        """Returns the jobs that a script has expired, and wakes their waiters."""
        expired = expired_jobs(flat, self._specs)
        self._notifications.wake_local_waiters((), [each.job_id for each in expired])
        return expired

    async def _claim_ids(self, request: ClaimRequest, wanted: Sequence[str]) -> Claim:
        builder = RedisIdClaimBuilder(request)
        for ids in split_parts(list(dict.fromkeys(wanted)), MAX_PER_SCRIPT):
            try:
                rows, until, stopped_at_last_attempt, flat = await self._pool.run(
                    self._scripts["claim_ids"],
                    request.worker,
                    span_us(request.lease_for),
                    self._pool.address.task,
                    *builder.script_arguments(),
                    *ids,
                    on_uncertain=lambda: self._unconfirmed_claims.add(request.worker),
                    extra_time=request.limit / MIN_CLAIM_RATE,
                )
            except HoldfastError:
                if builder.jobs:  # else their leases would be unknown until they expire
                    break
                raise
            builder.expired += self._report_expired(flat)
            builder.take(
                await self._decode_or_end(rows, request.worker),
                int(until),
                stopped_at_last_attempt=bool(stopped_at_last_attempt),
            )
            if builder.stopped_at_last_attempt:
                break
        return builder.to_claim(len(wanted))

    async def _release_unconfirmed(self, request: ClaimRequest, claim: Claim) -> None:
        """Releases jobs of unanswered claims, which this worker has never started. Jobs of this claim stay."""
        if claim.lease_until_us is None or request.shared_worker_id:
            return
        lease, since = span_us(request.lease_for), self._unconfirmed_claims.unconfirmed_since(request.worker)
        claimed_now = {job.id for job in claim.jobs}
        examined, more = 0, since is not None
        try:
            while more:
                found, others, more = await self._pool.run(
                    self._scripts["unconfirmed_claims"], request.worker, since or 0, lease, examined
                )
                released = [
                    _released(decode_text(job_id), whole_number(claims), request.worker) for job_id, claims in found
                ]
                released = [each for each in released if each.job_id not in claimed_now]
                examined += others + len(found) - len(released)
                if released:
                    await self.settle(released)
        except HoldfastError:
            pass  # then their leases end
        self._unconfirmed_claims.mark_answered(request.worker, claim.lease_until_us - lease)

    async def _decode_or_end(self, rows: Sequence[Any], worker: str) -> list[Job]:
        """Returns the readable jobs. One that another program corrupted becomes dead, and blocks no queue."""
        jobs = []
        for row in rows:
            try:
                jobs.append(claimed_job(row, self._specs, worker))
            except (ValueError, AttributeError, RecursionError) as error:
                text = f"the stored job cannot be read: {error}"
                await self._pool.run(self._scripts["mark_unreadable"], row[0], row[6] if len(row) > 4 else 1, text)
        return jobs

    # ── settle ────────────────────────────────────────────────────────────────────────────────────────────────
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Apply what is still guarded, in order; refused settlements get the job's state."""
        if not settlements:
            return []
        calls = [encode_settlements(part) for part in split_parts(settlements, MAX_PER_SCRIPT)]
        try:
            replies = await self._pool.run_each(
                self._scripts["settle"],
                calls,
                on_uncertain=lambda: self._unconfirmed.add(settlements),
                extra_time=find_extra_time(len(settlements), sum(len(each.result or "") for each in settlements)),
                must_confirm=True,
            )
        except HoldfastError:
            self._unconfirmed.add(settlements)  # the answers of applied parts are lost
            raise
        answers, ended, others = [], [], False
        for each, answer in zip(settlements, chain.from_iterable(replies), strict=True):
            if isinstance(answer, int):
                answers.append(Settled(each.job_id, each.claims, True, JobState.SUCCEEDED))
                ended.append(each.job_id)
                others = others or answer == _LIMITED
            elif answer[0]:
                state = JobState(answer[1].decode())
                answers.append(Settled(each.job_id, each.claims, True, state, int(answer[2])))
                if state in TERMINAL:
                    ended.append(each.job_id)
                others = others or state not in TERMINAL or bool(answer[3])
            else:
                state_now = state_of(answer[1]) if len(answer) > 1 and answer[1] else None
                answers.append(await self._refused(each, state_now))
                if answers[-1].accepted and answers[-1].state in TERMINAL:
                    ended.append(each.job_id)
        self._unconfirmed.mark_answered(settlements)
        # Only the script knows the queues with new ready jobs: wakes the waiters of all queues.
        self._notifications.wake_local_waiters({"queue:*"} if others else (), ended)
        return answers

    async def _refused(self, each: Settlement, state: JobState | None) -> Settled:
        """Answers a refused settlement; an earlier call whose response was lost may have applied it."""
        accepted = accepted_as(each, await self._recorded_outcome(each)) if each in self._unconfirmed else None
        if accepted is not None:
            return Settled(each.job_id, each.claims, True, accepted)
        return Settled(each.job_id, each.claims, False, state)

    async def _recorded_outcome(self, each: Settlement) -> RecordedOutcome:
        (row,) = await self._pool.run(self._scripts["states"], each.job_id)
        if row is None:
            return RecordedOutcome(None, None, None, None, None, None)
        records = await self._query.attempts(each.job_id)
        record = next((record for record in records if record.claims == each.claims), None)
        now, claims = state_of(row[0]), whole_number(row[1])
        if record is None:
            return RecordedOutcome(now, claims, None, None, None, None)
        return RecordedOutcome(now, claims, None, record.state, record.reason, record.error)

    # ── heartbeat ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        given = heartbeat.to_row()
        added = [given.pop(name) if heartbeat.has_deltas else 0 for name in ("succeeded", "failed")]
        fields = [argument for pair in given.items() for argument in pair if pair[1] is not None]
        statuses: list[LeaseStatus] = []
        command = "none"
        parts = list(split_parts(leases, MAX_PER_SCRIPT)) or [[]]
        for number, part in enumerate(parts):
            alive_for = span_us(heartbeat.alive_for(lease_for)) if number == 0 else ""
            held = [argument for lease in part for argument in (lease.job_id, lease.claims)]
            (reply,) = await self._pool.run_each(
                self._scripts["heartbeat"],
                [(heartbeat.worker, span_us(lease_for), alive_for, *added, len(fields) // 2, *fields, *held)],
                retry_for=HEARTBEAT_RETRY_SHARE * lease_for.total_seconds(),
            )
            command = reply[0].decode()
            statuses += [_LEASE_STATUSES[each] for each in reply[1:]]
        return HeartbeatReply(statuses=statuses, command=WorkerCommand(command))

    # ── log lines ─────────────────────────────────────────────────────────────────────────────────────────────
    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        """Stores lines of valid leases, MAX_PER_SCRIPT a script. Returns for each record whether it was stored."""
        are_stored = [True] * len(records)
        for part in split_records(records, MAX_PER_SCRIPT):
            script = self._scripts["append_logs"]
            arguments = [argument for number, lines in part for argument in encode_logs(records[number].lease, lines)]
            for (number, _), stored in zip(part, await self._pool.run(script, *arguments), strict=True):
                are_stored[number] = are_stored[number] and bool(stored)
        return are_stored

    async def deregister(self, worker: str) -> None:
        await self._pool.run(self._scripts["deregister"], worker)

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        await wait_for_topics(self._notifications, self._query.any_finished, topics, timeout)


class _Sent:
    """Progress of a submission that is stored script by script."""

    def __init__(self) -> None:
        self.is_uncertain = False
        self.answers: list[Submitted] = []  # of all stages but the latest, which may be under way
        self.stage: Sequence[Sequence[NewJob]] = ()
        self.replies: list[Any] = []  # to each part of its latest try, errors among them; none where it was cut off

    def mark_uncertain(self) -> None:
        """Notes a try with an unknown result: an id that is already stored counts as stored by that try."""
        self.is_uncertain, self.replies = True, []

    def read_replies(self, replies: list[Any]) -> None:
        """Notes the replies to each part of the latest try; some may be errors."""
        self.replies = replies


def _released(job_id: str, claims: int, worker: str) -> Settlement:
    state, reason = JobState.QUEUED, Reason.RELEASED
    return Settlement(job_id=job_id, claims=claims, state=state, reason=reason, refund=True, worker=worker)
