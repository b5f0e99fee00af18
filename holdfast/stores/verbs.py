"""What the verb families of every store are handed: a claim's wish, the jobs that an operation is for, and errors of
jobs that another program spoiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from holdfast.job import JobState
from holdfast.lifecycle import REPLAYABLE

FORGOTTEN_AFTER = timedelta(days=1)
"""How long a worker that fell silent is still listed."""

BEAT_PATIENCE = 0.25
"""Of a lease: how long a beat waits for a server that is away, so that there is time for another."""

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What reading JSON that another program spoiled may raise: it is not what we write, or nested too deep."""


class Wish(msgspec.Struct, frozen=True):
    """What a claim asks for; see ``Store.claim``."""

    worker: str
    wants: Mapping[str, int]
    limit: int
    lease_for: timedelta
    suspects: int
    alone: bool
    only: Sequence[str] | None
    promote: bool


class Chosen(NamedTuple):
    """Jobs an operation is to try."""

    ids: list[str]
    more: bool  # whether more would match
    guard: Mapping[str, Any] | None  # what a filter chose them by, which must still hold; None: they were named


def named(ids: Sequence[str], limit: int) -> Chosen:
    """Jobs chosen by id."""
    once = list(dict.fromkeys(ids))
    return Chosen(once[:limit], len(once) > limit, None)


def replayable(*, force: bool) -> frozenset[JobState]:
    """The states a replay may leave."""
    return REPLAYABLE | {JobState.SUCCEEDED} if force else REPLAYABLE
