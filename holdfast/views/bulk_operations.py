"""Operations on many jobs, which the CLI and the HTTP API run in batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.batches import BATCH_TASK
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.validation import parse_rate


class BulkOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on many jobs: its name, the states it accepts, and the words for its report."""

    name: str  # method of the application
    done: str
    legal: frozenset[JobState]
    advice: str  # for a job in another state
    options: dict[str, Any] = {}
    rate: str | None = None  # of a paced replay

    def can_change(self, job: Job) -> bool:
        """Returns True if it changes this job, unless another one has the job's unique key."""
        return job.state in self.legal and not (self.name == "replay" and job.task == BATCH_TASK)

    def describe_refusal(self, job_id: str, state: JobState) -> str:
        """Text for why a job in this state is refused, and the remedy."""
        if self.name == "replay" and state in self.legal:
            return f"another job has its unique key, or it is a batch; to see which: holdfast why {job_id}"
        return f"it is {state}; {self.advice}"


CANCEL = BulkOperation(name="cancel", done="cancelled", legal=CANCELLABLE, advice="it has ended")
DELETE = BulkOperation(name="delete", done="deleted", legal=DELETABLE, advice="it is running: cancel it first")


class PacedCalls:
    """Options of successive calls: a paced replay continues where the last call ended, with its next job ``after``."""

    def __init__(self, change: BulkOperation, after: timedelta = timedelta(0)) -> None:
        self._change = change
        self._every = None if change.rate is None else parse_rate(change.rate)
        self.after = after

    def batch_options(self) -> dict[str, Any]:
        """Returns the options of the next call."""
        paced = {"rate": self._change.rate, "after": self.after} if self._every or self.after else {}
        return {**self._change.options, **paced}

    def pace_batch(self, number: int) -> None:
        """Adds the share of so many changed jobs to the delay of the next call."""
        if self._every is not None:
            self.after += number * self._every


def replay_operation(
    *, force: bool = False, states: Collection[JobState] = REPLAYABLE, rate: str | None = None, **options: Any
) -> BulkOperation:
    """Returns a replay of jobs in these states; ``force``: also of succeeded ones."""
    return BulkOperation(
        name="replay",
        done="queued again",
        legal=frozenset(states) | ({JobState.SUCCEEDED} if force else set()),
        advice="replay takes dead, failed and cancelled jobs, and with --force succeeded ones",
        options={"force": force, **options},
        rate=rate,
    )


def by_state(where: JobFilter, legal: Collection[JobState]) -> list[JobFilter]:
    """Returns the filter once per state that it selects and the operation accepts; running jobs come last."""
    asked = [state for state in JobState if state in legal and (not where.states or state in where.states)]
    asked.sort(key=lambda state: state is JobState.RUNNING)
    return [msgspec.structs.replace(where, states=(state,)) for state in asked]


def batches_left_alone(change: BulkOperation, filters: Sequence[JobFilter]) -> list[JobFilter]:
    """Returns the filters of those that match and that a replay does not change: batches."""
    found = [where for where in filters if not where.tasks or BATCH_TASK in where.tasks]
    return [msgspec.structs.replace(where, tasks=(BATCH_TASK,)) for where in found if change.name == "replay"]
