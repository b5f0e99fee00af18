"""Metrics-only events, published once per batch. Metrics subscribe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from holdfast.core.events import Event


class Measure(Event, frozen=True, kw_only=True):
    """An observation of a whole batch. Emitters ask ``has_subscriber`` first."""

    level: ClassVar[str] = "debug"


class JobsSubmitted(Measure, frozen=True, kw_only=True):
    """A submission was answered. By task: how many jobs are new, and how many stood already."""

    created: Mapping[str, int]
    absorbed: Mapping[str, int]


class JobsClaimed(Measure, frozen=True, kw_only=True):
    """A claim was answered. ``retried``: jobs of which an attempt was counted before; ``late``: by queue, how many
    seconds each of its jobs could have been claimed earlier."""

    retried: int
    refused: int
    late: Mapping[str, Sequence[float]]


class MalformedReceived(Measure, frozen=True, kw_only=True):
    """Messages without a job id that a transport delivered."""

    count: int


class BatchSettled(Measure, frozen=True, kw_only=True):
    """A batch of settlements was answered. ``succeeded``: by task, the seconds of each job that ended well."""

    size: int
    succeeded: Mapping[str, Sequence[float]]


class StoreAnswered(Measure, frozen=True, kw_only=True):
    """A call of the store has ended; ``failed``: with an error that is not the caller's."""

    verb: str
    seconds: float
    failed: bool


class LoopHeard(Measure, frozen=True, kw_only=True):
    """The event loop was asked to answer: how long that took, or has taken so far."""

    seconds: float


class RequestAnswered(Measure, frozen=True, kw_only=True):
    """A request over HTTP was answered. ``path`` is its operation's, with the names of its places."""

    method: str
    path: str
    status: int
    seconds: float
