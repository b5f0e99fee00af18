"""Replays are found by the numbers of a job's attempts."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.models import Attempt, Job, JobState
from holdfast.views.documents import replays_after

FAILED, DEAD, QUEUED, RUNNING = JobState.FAILED, JobState.DEAD, JobState.QUEUED, JobState.RUNNING
SUCCEEDED, CANCELLED, SCHEDULED = JobState.SUCCEEDED, JobState.CANCELLED, JobState.SCHEDULED
JOB = Job("id", "work", "default", "{}", 1, 0, 5, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("attempts", "state", "count", "replayed"),
    [
        ([], QUEUED, 0, []),
        ([(1, FAILED)], FAILED, 1, [False]),
        ([(1, FAILED)], RUNNING, 2, [False]),
        ([(1, FAILED), (2, FAILED)], SUCCEEDED, 3, [False, False]),
        ([(1, FAILED), (2, DEAD)], DEAD, 2, [False, False]),
        ([(1, QUEUED), (2, FAILED)], CANCELLED, 2, [False, False]),  # a lost lease; cancelled while it waited
        ([(1, CANCELLED)], CANCELLED, 1, [False]),
        ([(1, DEAD)], SCHEDULED, 0, [True]),
        ([(1, DEAD)], SUCCEEDED, 1, [True]),
        ([(1, FAILED)], QUEUED, 0, [True]),
        ([(1, FAILED)], RUNNING, 1, [True]),
        ([(1, FAILED), (1, FAILED)], FAILED, 1, [True, False]),
        ([(1, FAILED), (2, DEAD), (1, DEAD)], DEAD, 1, [False, True, False]),
        ([(1, CANCELLED), (1, FAILED), (2, FAILED)], SUCCEEDED, 3, [True, False, False]),
    ],
)
def test_replay_shows_in_numbers_of_attempts(
    attempts: list[tuple[int, JobState]], state: JobState, count: int, replayed: list[bool]
) -> None:
    history = [
        Attempt(claims, number, None, None, 0, left, None, None, None)
        for claims, (number, left) in enumerate(attempts, 1)
    ]

    assert replays_after(msgspec.structs.replace(JOB, state=state, attempts=count), history) == replayed
