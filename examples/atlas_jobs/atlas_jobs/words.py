"""Atlas' words for Holdfast's states."""

from __future__ import annotations

from holdfast import JobState

_STATUSES = {
    JobState.RUNNING: "RUNNING",
    JobState.SUCCEEDED: "SUCCEEDED",
    JobState.DEAD: "DEAD_LETTERED",
    JobState.CANCELLED: "CANCELLED",
}


def status(state: JobState) -> str:
    """What waits, and what is to be tried again, is QUEUED."""
    return _STATUSES.get(state, "QUEUED")
