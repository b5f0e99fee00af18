"""What an operator does to jobs, and on which states."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from holdfast.job import JobFilter, JobState
from holdfast.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to jobs: how to do it, on which states, and how to say so."""

    name: str  # of the operation of the application
    done: str
    legal: frozenset[JobState]
    advice: str  # for those whose state does not allow it
    options: dict[str, Any] = {}


CANCEL = Deed(name="cancel", done="cancelled", legal=CANCELLABLE, advice="it has ended")
DELETE = Deed(name="delete", done="deleted", legal=DELETABLE, advice="it is running: cancel it first")


def replaying(*, force: bool = False, states: Collection[JobState] = REPLAYABLE, **options: Any) -> Deed:
    """Queueing again what is in one of these states; ``force``: also what has succeeded."""
    return Deed(
        name="replay",
        done="queued again",
        legal=frozenset(states) | ({JobState.SUCCEEDED} if force else set()),
        advice="replay takes dead, failed and cancelled jobs, and with --force succeeded ones",
        options={"force": force, **options},
    )


def by_state(where: JobFilter, legal: Collection[JobState]) -> list[JobFilter]:
    """The filter once for each state it asks for that the operation takes; what runs comes last."""
    asked = [state for state in JobState if state in legal and (not where.states or state in where.states)]
    asked.sort(key=lambda state: state is JobState.RUNNING)
    return [msgspec.structs.replace(where, states=(state,)) for state in asked]
