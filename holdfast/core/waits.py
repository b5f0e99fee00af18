"""Waits of running jobs: for a signal, or for their children."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from holdfast.core.dependencies import DependencyInfo
from holdfast.core.models import JobState
from holdfast.core.steps import NewStep

MAX_SIGNALS = 10_000
"""Signals of one topic that no job has received yet."""

MAX_SIGNAL_ID = 512
"""Characters of the id of a signal."""

SIGNAL_RETENTION = timedelta(days=30)
"""Time for which a signal is kept: until then its id is known, and a job may receive it."""


TIMED_OUT = '{"timed_out":true}'
"""Result of the step of a signal that did not come in time."""


SIGNAL_STEP = "wait_for "
"""Beginning of the names of the steps of signals; their topics follow."""

_BEFORE_VALUE = '{"signal":'


def signal_result(value: str) -> str:
    """Result of the step of a signal; ``value``: JSON text."""
    return f"{_BEFORE_VALUE}{value}}}"


def signal_value(result: str) -> str | None:
    """Returns the value in the result of the step of a signal, as JSON text; None if there is none."""
    return result[len(_BEFORE_VALUE) : -1] if result.startswith(_BEFORE_VALUE) else None


def describe_full_topic(topic: str) -> str:
    """Text for a topic that has too many signals."""
    return f"topic {topic!r} has {MAX_SIGNALS:,} signals that no job has received; start what receives them first"


def step_value(result: str) -> str:
    """Returns the value in the result of the step of a signal, and the result of any other step as it is."""
    return signal_value(result) or result


class SignalWait(msgspec.Struct, frozen=True, gc=False):
    """Request of a running job to receive a signal. It becomes the step's result, whose own is ignored."""

    step: NewStep
    topic: str
    timeout: timedelta


class SignalReceipt(msgspec.Struct, frozen=True, gc=False):
    """Answer to a `SignalWait`: the lease is lost, the step has its ``result``, or the job waits for ``time_left``."""

    has_lease: bool = True
    result: str | None = None
    """``{"signal": VALUE}`` or ``{"timed_out":true}``, as stored with the step."""
    time_left: timedelta | None = None
    """Time until the deadline: the worker settles the job as waiting."""


class Signal(msgspec.Struct, frozen=True, gc=False):
    """A signal to send. ``value``: JSON text. ``id``: a second one with this id is not delivered."""

    id: str
    topic: str
    value: str


class SentSignal(msgspec.Struct, frozen=True, gc=False):
    """Answer to a `Signal`. ``job_id``: its receiver; None: none has waited for it yet, and it is kept.

    ``is_new``: False if a signal with its id had been sent before.
    """

    is_new: bool
    job_id: str | None


class KeptSignal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A signal that no job has received."""

    id: str
    topic: str
    value: str
    sent_at_us: int


class ReceiverInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Wait of a suspended job: for a signal of this topic, for a step, until an instant."""

    topic: str
    step: str
    since_us: int
    until_us: int


class JobWaits(msgspec.Struct, frozen=True):
    """Dependencies and signal of a job, past and present, and the jobs that wait for it: at most ``MAX_SHOWN`` of each.

    In ``dependents`` each ``job_id`` is that of the job that waits.
    """

    receiver: ReceiverInfo | None
    dependencies: list[DependencyInfo]
    dependents: list[DependencyInfo]


MAX_SHOWN = 1000
"""Dependencies of a job in one answer."""


class ChildStatus(msgspec.Struct, frozen=True, gc=False):
    """A child: its id, or that of the job that holds its key, and its state. None: it was deleted."""

    job_id: str
    state: JobState | None
