"""Family ``workflow`` of Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core import waits
from holdfast.core.batches import BatchProgress
from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.errors import Conflict
from holdfast.core.models import MICROSECOND, Lease, NewJob, Step
from holdfast.core.steps import NewStep
from holdfast.core.waits import (
    ChildStatus,
    JobWaits,
    KeptSignal,
    ReceiverInfo,
    SentSignal,
    Signal,
    SignalReceipt,
    SignalWait,
)
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.requests import find_extra_time
from holdfast.stores.connections.redis import Script, split_parts
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT
from holdfast.stores.redis.encoding import decode_text, fields_of, refused_submission, span_us, state_of, whole_number
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.server_info import EvictionWatch
from holdfast.stores.redis.submission import encode_submission


class RedisWorkflow:
    """Family ``workflow`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        eviction: EvictionWatch,
        limits: LimitCache,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._eviction = eviction
        self._limits = limits

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        """Up to ``MAX_PER_SCRIPT`` steps are one transaction."""
        are_saved: list[bool] = []
        for part in split_parts(steps, MAX_PER_SCRIPT):
            arguments = [
                argument
                for step in part
                for argument in (
                    step.lease.job_id,
                    step.lease.claims,
                    step.worker or "",
                    step.name,
                    step.number,
                    int(step.is_ordered),
                    "" if step.result is None else "=" + step.result,
                )
            ]
            are_saved += map(bool, await self._pool.run(self._scripts["save_steps"], *arguments, must_confirm=True))
        return are_saved

    async def read_steps(self, job_id: str) -> list[Step]:
        stored = fields_of(await self._pool.run_command("HGETALL", f"{self._pool.address.prefix}steps:{job_id}"))
        return sorted((_step(name, text) for name, text in stored.items()), key=lambda step: (step.number, step.name))

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        step = wait.step
        status, *found = await self._pool.run(
            self._scripts["receive_signal"],
            step.lease.job_id,
            step.lease.claims,
            step.worker or "",
            step.name,
            step.number,
            int(step.is_ordered),
            wait.topic,
            span_us(wait.timeout),
            must_confirm=True,
        )
        if not status:
            return SignalReceipt(has_lease=False)
        if status == _WAITS:
            return SignalReceipt(time_left=int(found[0]) * MICROSECOND)
        return SignalReceipt(result=decode_text(found[0]) if found and found[0] is not None else None)

    async def send_signal(self, signal: Signal) -> SentSignal:
        """A signal that a try with a lost answer has sent is new."""
        uncertain: list[bool] = []
        status, *found = await self._pool.run(
            self._scripts["send_signal"],
            signal.id,
            signal.topic,
            signal.value,
            waits.MAX_SIGNALS,
            on_uncertain=lambda: uncertain.append(True),
            must_confirm=True,
        )
        if status < 0:
            raise Conflict(waits.describe_full_topic(signal.topic))
        receiver = decode_text(found[0]) if found and found[0] is not None else None
        return SentSignal(is_new=bool(status or uncertain), job_id=receiver)

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        chosen = ("all", "") if topic is None else ("one", topic)
        return [
            KeptSignal(decode_text(signal_id), decode_text(its_topic), decode_text(value), int(float(sent_at)))
            for signal_id, its_topic, value, sent_at in await self._pool.run(
                self._scripts["read_signals"], *chosen, limit
            )
        ]

    # ── children and dependencies ─────────────────────────────────────────────────────────────────────────────
    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        await self._eviction.refuse_evicting(self._pool)
        children = await self._limits.bind(children)
        parts = list(split_parts(children, MAX_PER_SCRIPT)) or [[]]
        common, in_one_piece = (lease.job_id, lease.claims, worker), self._pool.address.in_one_piece
        try:
            replies = await self._pool.run_each(
                self._scripts["start_children"],
                [
                    (*common, int(number == 0), *encode_submission(part, {}, in_one_piece=in_one_piece))
                    for number, part in enumerate(parts)
                ],
                extra_time=find_extra_time(len(children), sum(len(child.payload) for child in children)),
                must_confirm=True,
            )
        finally:
            self._notifications.wake_local_waiters({f"queue:{child.queue}" for child in children})
        refused = [reply for reply in replies if isinstance(reply, bytes)]
        for part, reply in zip(parts, replies, strict=True):
            self._note_stored(part, reply)
        if refused:
            raise refused_submission(refused[0])
        if any(reply is None for reply in replies):
            return None
        return [_child(row) for started, _ in replies for row in started]

    def _note_stored(self, part: Sequence[NewJob], reply: Any) -> None:
        """Notes the number of submission of the last child that was created."""
        stored = reply[1] if isinstance(reply, list) else []
        if len(stored) > len(part):
            *answers, entry = stored
            self._pool.note_stored(entry, part[len(answers) - 1 - answers[::-1].index(1)].id)

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        found = await self._pool.run(self._scripts["read_batch"], job_id)
        if found is None:
            return None
        members, open_members, failed = found
        return BatchProgress(members, members - open_members, failed)

    async def read_waits(self, job_id: str) -> JobWaits:
        receiver, own, others, wait = await self._pool.run(self._scripts["read_waits"], job_id, waits.MAX_SHOWN)
        dependencies = sorted(_dependencies(own[::2], own[1::2], [wait] * len(own)), key=lambda each: each.job_id)
        dependents = _dependencies(others[::3], others[1::3], others[2::3])
        return JobWaits(_receiver(receiver), dependencies[: waits.MAX_SHOWN], dependents)


_WAITS = 2  # status in the answer of ``receive_signal``: the job has become a receiver


def _child(row: Sequence[bytes]) -> ChildStatus:
    job_id, state = row
    return ChildStatus(decode_text(job_id), state_of(state))


def _receiver(found: Sequence[bytes]) -> ReceiverInfo | None:
    if not found:
        return None
    topic, step, since, until, _ = found
    return ReceiverInfo(decode_text(topic), decode_text(step), whole_number(since), whole_number(until))


def _dependencies(ids: Sequence[bytes], texts: Sequence[bytes], latest: Sequence[bytes]) -> list[DependencyInfo]:
    """Valid dependencies of ``CONDITION STATE WAIT`` each; children of waits before the ``latest`` one are met."""
    found = []
    for job_id, text, last in zip(ids, texts, latest, strict=False):
        words = decode_text(text).split(" ")
        if len(words) == 3 and words[0] in _CONDITIONS and words[1] in _EDGE_STATES:
            condition, word, wait = words
            state = DependencyState(word) if wait in ("0", decode_text(last)) else DependencyState.MET
            found.append(DependencyInfo(decode_text(job_id), Condition(condition), state, wait != "0"))
    return found


_CONDITIONS, _EDGE_STATES = frozenset(Condition), frozenset(DependencyState)


def _step(name: bytes, text: bytes) -> Step:
    head, _, result = text.partition(b"\n")
    number, is_ordered, claims, ended_at_us = map(int, head.split(b" "))
    return Step(
        decode_text(name), number, bool(is_ordered), claims, ended_at_us, decode_text(result[1:]) if result else None
    )
