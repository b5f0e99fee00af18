"""The fault injector: makes handlers, steps and store calls of this worker go wrong as the plan of faults says.

Only a worker whose settings allow faults has one; in any other there is nothing to switch on. It reads the plan every
second, and each fault that happens is an event, a log line and a metric.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import FaultInjected, FaultsChanged
from holdfast.core.faults import STORE_KINDS, Fault, FaultKind, FaultPlan, InjectedError
from holdfast.core.models import Job, to_datetime
from holdfast.stores.base import Store
from holdfast.stores.forwarding import ForwardingStore
from holdfast.tasks import Context
from holdfast.worker.context import WorkerState

T = TypeVar("T")

_READ_INTERVAL = 1.0  # seconds
_LOG_SECONDS = 0.1
"""Real seconds in which the log's own thread writes that this process is to be killed."""
_SPARED_VERBS = frozenset({"open", "close", "wait"})
"""Verbs that are not calls of a server, or only wait."""
_WAKER = """
import os, signal, sys, time
frozen, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == frozen and time.monotonic() < until:
    time.sleep(min(0.1, max(0, until - time.monotonic())))
if os.getppid() == frozen: # it lives
    os.kill(frozen, signal.SIGCONT)
"""


class FaultInjector:
    """Injects the faults of the current plan into this process."""

    def __init__(self, shared: WorkerState) -> None:
        self._shared = shared
        self._plan: FaultPlan | None = None
        self._ends_at = 0.0  # by the monotonic clock
        self._random = random.Random()

    # ── the plan ──────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Follows the plan until it is cancelled."""
        while True:
            await self.follow_plan()
            await self._shared.clock.sleep(_READ_INTERVAL)

    async def follow_plan(self) -> None:
        """Reads the plan once. While the store is away, the plan that is known goes on until its end."""
        shared = self._shared
        try:
            plan = await shared.app.faults.read()
            if plan is not None and plan != self._plan:
                left_us = plan.until_us - await (await shared.app.open_store()).health.server_time_us()
                self._ends_at = shared.clock.monotonic() + left_us / 1e6
        except HoldfastError:
            plan = self._plan if shared.clock.monotonic() < self._ends_at else None
        if plan != self._plan:
            self._plan = plan
            if plan is not None:
                self._random = random.Random(f"{plan.seed} {os.getpid()}")
            shared.active_faults = 0 if plan is None else len(plan.faults)
            until = None if plan is None else to_datetime(plan.until_us)
            shared.emit(FaultsChanged(active=shared.active_faults, until=until))

    def _drawn(self, job: Job, step: str | None = None) -> list[Fault]:
        return [] if self._plan is None else self._plan.draw_faults(job, step)

    # ── handlers and steps ────────────────────────────────────────────────────────────────────────────────────
    async def run_handler(self, context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        """Middleware around all others."""
        faults = self._drawn(context.job)
        await self._inject(faults, "before", context.job)
        result = await call_next(context)
        await self._inject(faults, "after", context.job)
        return result

    def step_function(self, job: Job, name: str, function: Callable[..., Any], *, blocking: bool) -> Callable[..., Any]:
        """Returns the function of a step, with the faults of this execution around it."""
        faults = self._drawn(job, name)
        if not faults:
            return function
        return functools.partial(self._run_blocking if blocking else self._run_step, faults, job, function)

    async def _run_step(
        self, faults: list[Fault], job: Job, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        await self._inject(faults, "before", job)
        result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        await self._inject(faults, "after", job)
        return result

    def _run_blocking(
        self, faults: list[Fault], job: Job, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        for fault in _faults_at("before", faults):
            if fault.kind is FaultKind.LATENCY:
                self._report_fault(fault, job)
                self._delay_blocking(fault.seconds or 0)
            else:
                self._trigger(fault, job)
        result = function(*args, **kwargs)
        for fault in _faults_at("after", faults):
            self._trigger(fault, job)
        return result

    async def _inject(self, faults: list[Fault], when: str, job: Job) -> None:
        for fault in _faults_at(when, faults):
            if fault.kind is FaultKind.LATENCY:
                self._report_fault(fault, job)
                await self._delay(fault.seconds or 0)
            else:
                self._trigger(fault, job)

    async def _delay(self, seconds: float) -> None:
        """Waits so long, or until the faults are off."""
        plan, clock = self._plan, self._shared.clock
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0 and self._plan is plan:
            await clock.sleep(min(left, _READ_INTERVAL))

    def _delay_blocking(self, seconds: float) -> None:
        plan, until = self._plan, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._plan is plan:
            time.sleep(min(left, _READ_INTERVAL))

    def _trigger(self, fault: Fault, job: Job) -> None:
        """Triggers a fault other than a latency."""
        self._report_fault(fault, job)
        if fault.kind is FaultKind.CRASH:
            time.sleep(_LOG_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # the first process of a container does not get it
        elif fault.kind is FaultKind.FREEZE:
            freeze_process(fault.seconds or 0)
        else:
            place = f"task {job.task}" if fault.step is None else f"step {fault.step} of task {job.task}"
            raise InjectedError(fault, place)

    def _report_fault(self, fault: Fault, job: Job | None) -> None:
        job_id, task = (None, None) if job is None else (job.id, job.task)
        self._shared.emit(FaultInjected(kind=fault.kind.value, job_id=job_id, task=task, step=fault.step))

    # ── the store ─────────────────────────────────────────────────────────────────────────────────────────────
    def wrap_store(self, store: Store) -> Store:
        """Returns the store with the faults of its calls."""
        return ForwardingStore(store, self._call_store)

    def new_store(self) -> Store:
        """Returns an unopened store for another thread, with the faults of its calls."""
        return self.wrap_store(self._shared.app.new_store())

    async def _call_store(self, verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        faults = [] if verb in _SPARED_VERBS else self._drawn_of_store()
        for fault in faults:
            if fault.kind is FaultKind.STORE_LATENCY:
                self._report_fault(fault, None)
                await self._delay(fault.seconds or 0)
            elif fault.kind is FaultKind.STORE_ERROR:
                self._report_fault(fault, None)
                raise Unavailable(f"a fault was injected: {verb} did not reach the store")
        answer = await call()
        for fault in faults:
            if fault.kind is FaultKind.LOST_ACK and verb == "settle":
                self._report_fault(fault, None)
                raise Unavailable("a fault was injected: the answer to settle was lost")
        return answer

    def _drawn_of_store(self) -> list[Fault]:
        if self._plan is None:
            return []
        faults = self._plan.faults
        return [fault for fault in faults if fault.kind in STORE_KINDS and self._random.random() < fault.probability]


def _faults_at(when: str, faults: Sequence[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault.when == when]


def freeze_process(seconds: float) -> None:
    """Stops this process (SIGSTOP); another one lets it go on (SIGCONT) after so many seconds."""
    waker = subprocess.Popen([sys.executable, "-c", _WAKER, str(os.getpid()), str(seconds)], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.kill()  # another process may have ended the freeze
    waker.wait()
