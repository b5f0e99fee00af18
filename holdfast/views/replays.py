"""Replays in a job's history. No store records them; the numbers of the attempts show them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from holdfast.core.models import TERMINAL, Attempt, Job, JobState


def replays_after(job: Job, attempts: Sequence[Attempt]) -> list[bool]:
    """For each attempt that did not succeed, whether the job was replayed before its next attempt."""
    if not attempts:
        return []
    return [*(_is_replayed(each, later) for each, later in pairwise(attempts)), _is_replayed_since(job, attempts[-1])]


def _is_replayed(attempt: Attempt, later: Attempt) -> bool:
    """A replay leaves a terminal state, and counts attempts from one again."""
    return attempt.state in TERMINAL or later.attempt <= attempt.attempt


def _is_replayed_since(job: Job, last: Attempt) -> bool:
    if last.state in TERMINAL:
        return job.state is not last.state
    counted = job.attempts - (job.state in (JobState.RUNNING, JobState.SUCCEEDED))
    return counted < last.attempt
