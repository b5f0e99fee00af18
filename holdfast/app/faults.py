"""Fault injection as applications switch it on: ``app.faults``.

The plan is the payload of a scheduled job that never runs: it expires when the faults end. So every store keeps it,
lists show it, and `cancel` ends it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from holdfast.app.sync import Blocker, BlockingMethod, BlockingView
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.faults import FAULTS_TASK, Fault, FaultPlan, parse_faults
from holdfast.core.ids import new_id
from holdfast.core.models import MICROSECOND, JobState, NewJob, Options, UniqueKey
from holdfast.core.portal import requires_loop
from holdfast.core.unique import KEY_PREFIX
from holdfast.core.validation import check_span, format_duration, parse_count
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store

MAX_SPAN = timedelta(days=1)
"""Faults end by themselves after at most so long."""


_UNIQUE = UniqueKey(key=KEY_PREFIX + FAULTS_TASK, during="active", window_us=None, on_conflict="keep")


class _StoredPlan(msgspec.Struct, frozen=True):
    """The payload of the plan's job."""

    faults: tuple[Fault, ...]
    seed: int


class FaultOwner(Blocker, Protocol):
    """The application into whose workers faults are injected."""

    settings: Settings

    async def open_store(self) -> Store: ...


def check_allowed(settings: Settings) -> None:
    """Raises Conflict unless the settings allow faults."""
    if not settings.allow_faults:
        raise Conflict(
            "these settings do not allow faults: set allow_faults = true in a system that may break, such as staging, "
            "for its workers and for what switches faults on"
        )


class FaultManager:
    """``app.faults``: switches faults on and off, for workers whose settings allow them."""

    def __init__(self, app: FaultOwner) -> None:
        self._app = app

    @property
    def sync(self) -> BlockingFaults:
        """The same methods for blocking callers: ``app.faults.sync.stop()``."""
        return BlockingFaults(self._app, self)

    @requires_loop
    async def start(
        self,
        faults: Iterable[Fault | Mapping[str, Any]],
        *,
        span: float | timedelta | str,
        seed: int | None = None,
        replace: bool = True,
    ) -> FaultPlan:
        """Switch faults on, in place of those that are on, for ``span``: at most a day. Workers obey within seconds.

        faults: mappings with the fields of ``Fault``: ``{"kind": "error", "task": "mail.send", "probability": 0.3}``.
        seed: of the draws; a new one if there is none. replace: False, to refuse while others are on. Raises
        `Conflict` unless the settings allow faults.
        """
        plan = _StoredPlan(parse_faults(faults), _check_seed(seed))
        length = check_span(span, "span")
        if not timedelta(0) < length <= MAX_SPAN:
            raise Invalid("span", format_duration(length), "give more than 0 seconds, up to 1d")
        check_allowed(self._app.settings)
        if replace:
            await self._stop()
        store = await self._app.open_store()
        [answer] = await store.queueing.submit([_plan_job(msgspec.json.encode(plan).decode(), length)])
        if not answer.created:
            raise Conflict("faults are on already, from elsewhere: look at them, and try again")
        until_us = await store.health.server_time_us() + length // MICROSECOND
        return await self._read() or FaultPlan(plan.faults, plan.seed, until_us)

    @requires_loop
    async def read(self) -> FaultPlan | None:
        """The faults that are on; None: there are none."""
        return await self._read()

    async def _read(self) -> FaultPlan | None:
        store = await self._app.open_store()
        job = await store.query.by_key(_UNIQUE.key)
        if job is None or job.state is not JobState.SCHEDULED:
            return None
        until_us = min(job.expires_at_us or 0, job.created_at_us + MAX_SPAN // MICROSECOND)
        if until_us <= await store.health.server_time_us():
            return None  # no worker has noticed yet
        try:
            stored = msgspec.json.decode(job.payload, type=_StoredPlan)
        except msgspec.DecodeError as error:  # of another version
            raise Conflict(f"the faults that are on cannot be read: {error}; switch them off") from None
        return FaultPlan(stored.faults, stored.seed, until_us)

    @requires_loop
    async def stop(self) -> bool:
        """Switch faults off; returns whether there were any."""
        return await self._stop()

    async def _stop(self) -> bool:
        store = await self._app.open_store()
        job = await store.query.by_key(_UNIQUE.key)
        return job is not None and bool((await store.admin.cancel([job.id])).changed)


def _plan_job(payload: str, span: timedelta) -> NewJob:
    """Returns the job that keeps a plan. It is due when it has expired, so no worker takes it.

    One of them at a time has the unique key.
    """
    options = Options(unique=_UNIQUE)
    return NewJob(
        id=new_id(), task=FAULTS_TASK, queue=FAULTS_TASK, payload=payload, delay=span, expires_in=span, options=options
    )


def _check_seed(seed: object) -> int:
    if seed is None:
        return random.SystemRandom().randrange(10**9)
    return parse_count(seed, "seed", least=0, most=2**31)


class BlockingFaults(BlockingView):
    """``app.faults.sync``: the async methods for blocking callers."""

    __slots__ = ()

    start = BlockingMethod(FaultManager.start)
    read = BlockingMethod(FaultManager.read)
    stop = BlockingMethod(FaultManager.stop)
