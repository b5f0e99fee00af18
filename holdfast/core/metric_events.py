"""Events for metrics alone, one for a whole batch: no log line is written of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from holdfast.core.events import Event


class BatchMetric(Event, frozen=True, kw_only=True):
    """A metrics-only event about a whole batch. Emitters check ``has_subscriber`` first."""

    level: ClassVar[str] = "debug"


class JobsSubmitted(BatchMetric, frozen=True, kw_only=True):
    """A submission was stored. By task: the number of new jobs, and of submissions that returned an existing job."""

    created: Mapping[str, int]
    deduplicated: Mapping[str, int]


class JobsClaimed(BatchMetric, frozen=True, kw_only=True):
    """A claim returned. ``retried``: jobs with an earlier attempt; ``late``: by queue, seconds each job waited."""

    retried: int
    refused: int
    late: Mapping[str, Sequence[float]]


class MalformedReceived(BatchMetric, frozen=True, kw_only=True):
    """Messages without a job id that a transport delivered."""

    count: int


class StepsRecorded(BatchMetric, frozen=True, kw_only=True):
    """Steps of workflows were recorded together."""

    count: int


class BatchSettled(BatchMetric, frozen=True, kw_only=True):
    """A batch of settlements was written. ``succeeded``: by task, the seconds of each job that succeeded."""

    size: int
    succeeded: Mapping[str, Sequence[float]]


class StoreAnswered(BatchMetric, frozen=True, kw_only=True):
    """A store call has ended. ``failed``: the store was unavailable; errors of the caller do not count."""

    verb: str
    seconds: float
    failed: bool


class LoopDelayMeasured(BatchMetric, frozen=True, kw_only=True):
    """The lag of the event loop was measured. ``seconds``: by how much a sleeper was late, or is so far."""

    seconds: float


class RequestAnswered(BatchMetric, frozen=True, kw_only=True):
    """An HTTP request was answered. ``path``: the route's template, with parameter names."""

    method: str
    path: str
    status: int
    seconds: float
