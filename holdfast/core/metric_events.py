"""Events for metrics alone: no log line is written of them. Of what occurs once per job, one event per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from holdfast.core.events import Event


class MetricEvent(Event, frozen=True, kw_only=True):
    """An event for metrics alone. Emitters check ``has_subscriber`` first."""

    level: ClassVar[str] = "debug"


class JobsSubmitted(MetricEvent, frozen=True, kw_only=True):
    """A submission was stored. By task: the number of new jobs, and of submissions that returned an existing job."""

    created: Mapping[str, int]
    deduplicated: Mapping[str, int]


class JobsClaimed(MetricEvent, frozen=True, kw_only=True):
    """A claim returned. ``retried``: jobs with an earlier attempt; ``queue_wait``: by queue, seconds of each job."""

    retried: int
    refused: int
    queue_wait: Mapping[str, Sequence[float]]


class MalformedReceived(MetricEvent, frozen=True, kw_only=True):
    """Messages without a job id that a transport delivered."""

    count: int


class StepsRecorded(MetricEvent, frozen=True, kw_only=True):
    """Steps of workflows were recorded together."""

    count: int


class SettlementsWritten(MetricEvent, frozen=True, kw_only=True):
    """``size`` settlements were written together. ``succeeded``: by task, the seconds of each job that succeeded."""

    size: int
    succeeded: Mapping[str, Sequence[float]]


class StoreAnswered(MetricEvent, frozen=True, kw_only=True):
    """A store call has ended. ``failed``: the store was unavailable; errors of the caller do not count."""

    verb: str
    seconds: float
    failed: bool


class LoopDelayMeasured(MetricEvent, frozen=True, kw_only=True):
    """The lag of the event loop was measured. ``seconds``: by how much a sleeper was late, or is so far."""

    seconds: float


class RequestAnswered(MetricEvent, frozen=True, kw_only=True):
    """An HTTP request was answered. ``path``: the route's template, with parameter names."""

    method: str
    path: str
    status: int
    seconds: float
