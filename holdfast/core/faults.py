"""Faults that are injected into workers on purpose, to see in staging what production will meet one day.

A ``Fault`` says what goes wrong, for which jobs and how often. A ``FaultPlan`` has the faults that are on, their seed
and the time at which they end. Whether a fault happens to an execution is drawn once, from the seed, the job and its
attempt: the same plan does the same to the same job in whichever worker runs it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.models import Job
from holdfast.core.steps import check_step_name
from holdfast.core.validation import check_name, check_options, check_span, check_task_name, parse_count

FAULTS_TASK = "holdfast.faults"
"""Task and queue of the job that keeps the plan: it never runs, and expires when the plan ends."""

NUMBER = "chaos_number"
"""Metadata of a job that draws by this number instead of its id, which differs from run to run."""

EVERY_STEP = "*"
"""Step of a fault that happens at each step of an execution."""

MAX_FAULTS = 50
MAX_SECONDS = 3600.0
_FIELDS = ("kind", "task", "queue", "step", "probability", "attempts", "seconds", "when")


class FaultKind(StrEnum):
    """Kinds of faults."""

    LATENCY = "latency"
    """The handler, or step, starts so many seconds later."""

    ERROR = "error"
    """It raises `InjectedError`, and is retried."""

    PERMANENT_ERROR = "permanent_error"
    """It raises `InjectedError`, and is not retried: the job is dead."""

    CRASH = "crash"
    """The worker process is killed (SIGKILL), and whatever else it runs with it."""

    FREEZE = "freeze"
    """The worker process stands still (SIGSTOP) for so many seconds."""

    LOST_ACK = "lost_ack"
    """Outcomes are stored, but the worker does not get the store's answer."""

    STORE_LATENCY = "store_latency"
    """A call of the store takes so many seconds longer."""

    STORE_ERROR = "store_error"
    """A call of the store fails as if the connection were cut, and changes nothing."""


STORE_KINDS = frozenset({FaultKind.LOST_ACK, FaultKind.STORE_LATENCY, FaultKind.STORE_ERROR})
"""Faults of calls of the store, which are not about one job."""

_TIMED = frozenset({FaultKind.LATENCY, FaultKind.FREEZE, FaultKind.STORE_LATENCY})
_AFTERWARDS = frozenset({FaultKind.ERROR, FaultKind.PERMANENT_ERROR, FaultKind.CRASH, FaultKind.FREEZE})


class InjectedError(HoldfastError):
    """The error of an injected fault."""

    def __init__(self, fault: Fault, place: str) -> None:
        super().__init__(f"a fault was injected: {fault.kind} {fault.when} {place}")
        self.retryable = fault.kind is not FaultKind.PERMANENT_ERROR


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault. Made by ``parse_fault``."""

    kind: FaultKind
    task: str | None = None
    """Only jobs of this task."""
    queue: str | None = None
    """Only jobs of this queue."""
    step: str | None = None
    """At this step of the job, or at each (``*``), instead of the whole handler."""
    probability: float = 1.0
    """Of an execution; of a call, for faults of the store."""
    attempts: int | None = None
    """Only the first so many attempts of a job."""
    seconds: float | None = None
    when: str = "before"
    """``before`` the handler or step, or ``after`` it, when its work is done and not yet recorded."""

    def applies_to(self, job: Job) -> bool:
        """Returns True if the fault may happen to this execution."""
        return (
            self.kind not in STORE_KINDS
            and self.task in (None, job.task)
            and self.queue in (None, job.queue)
            and (self.attempts is None or job.attempts <= self.attempts)
        )


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults that are on."""

    faults: tuple[Fault, ...]
    seed: int
    until_us: int
    """Microseconds since 1970 at which they end."""

    @property
    def kinds(self) -> list[str]:
        """Returns the kinds of its faults, sorted."""
        return sorted({fault.kind.value for fault in self.faults})

    def draw_faults(self, job: Job, step: str | None = None) -> list[Fault]:
        """Returns the faults that happen to this execution, or to a step of it: one draw each.

        A fault of every step is drawn for each of them, and each repetition ("charge#2"), so it may happen to any.
        """
        base = None if step is None else step.partition("#")[0]
        number = (job.options_or_default.metadata or {}).get(NUMBER, job.id)
        found = []
        for index, fault in enumerate(self.faults):
            if fault.applies_to(job) and fault.step in ((None,) if step is None else (EVERY_STEP, base)):
                place = step if fault.step == EVERY_STEP else ""
                drawn = random.Random(f"{self.seed} {index} {number} {job.attempts} {place}").random()
                if drawn < fault.probability:
                    found.append(fault)
        return found


def parse_fault(given: Mapping[str, Any]) -> Fault:
    """Makes a fault from the fields of a file, a request or a call. Raises Invalid."""
    check_options(given, _FIELDS, "fault")
    kinds = [kind.value for kind in FaultKind]
    if given.get("kind") not in kinds:
        raise Invalid("kind", given.get("kind"), f"give one of {', '.join(kinds)}")
    kind = FaultKind(given["kind"])
    values: dict[str, Any] = {"kind": kind}
    if given.get("task") is not None:
        values["task"] = check_task_name(given["task"])
    if given.get("step") is not None:
        values["step"] = check_step_name(given["step"])
    if given.get("queue") is not None:
        values["queue"] = check_name("queue", given["queue"])
    if given.get("attempts") is not None:
        values["attempts"] = parse_count(given["attempts"], "attempts", least=1, most=1_000_000)
    values["probability"] = _check_probability(given.get("probability", 1.0))
    values["when"] = _check_when(kind, given.get("when", "before"))
    values |= _check_seconds(kind, given.get("seconds"))
    if kind in STORE_KINDS:
        for field in ("task", "queue", "step", "attempts"):
            if given.get(field) is not None:
                raise Invalid(field, given[field], f"leave it out: {kind} is a fault of the store, for all jobs")
    return Fault(**values)


def _check_probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise Invalid("probability", value, "give a number above 0, up to 1")
    return float(value)


def _check_when(kind: FaultKind, value: object) -> str:
    if value not in ("before", "after"):
        raise Invalid("when", value, "give before or after")
    if value == "after" and kind not in _AFTERWARDS:
        raise Invalid("when", value, f"leave it out: {kind} has no after; {', '.join(sorted(_AFTERWARDS))} have")
    return str(value)


def _check_seconds(kind: FaultKind, value: object) -> dict[str, float]:
    if kind not in _TIMED:
        if value is not None:
            raise Invalid("seconds", value, f"leave it out: {kind} takes no time; {', '.join(sorted(_TIMED))} do")
        return {}
    if value is None:
        raise Invalid("seconds", value, f"say how long a {kind} takes")
    seconds = check_span(value, "seconds").total_seconds()
    if not 0 < seconds <= MAX_SECONDS:
        raise Invalid("seconds", value, f"give more than 0 seconds, up to {MAX_SECONDS:g}")
    return {"seconds": seconds}


def parse_faults(given: Iterable[Mapping[str, Any] | Fault]) -> tuple[Fault, ...]:
    """Makes faults of a plan. Raises Invalid, naming which."""
    found: list[Fault] = []
    for number, each in enumerate(given, 1):
        try:
            found.append(each if isinstance(each, Fault) else parse_fault(each))
        except Invalid as error:
            raise Invalid(f"fault {number}: {error.field}", error.value, error.remedy) from None
    if not 0 < len(found) <= MAX_FAULTS:
        raise Invalid("faults", f"{len(found)} faults", f"give 1 to {MAX_FAULTS}")
    return tuple(found)
