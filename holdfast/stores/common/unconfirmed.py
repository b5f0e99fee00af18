"""Requests to a server store whose response was lost, and the outcome that the store has recorded for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.errors import Unavailable
from holdfast.core.models import JobState, Lease, NewJob, Settlement, Submitted

_REMEMBERED = 10_000  # leases; a settlement is retried within seconds
_PERHAPS_STORED = "the job may be stored all the same: submit it again with the same key or id, and there is one"


class UnconfirmedSettlements:
    """Leases whose settlement was sent, and whose response was lost or not returned to the caller."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()

    def add(self, batch: Iterable[Settlement]) -> None:
        """Adds settlements whose response was lost."""
        if len(self._leases) > _REMEMBERED:
            self._leases.clear()
        self._leases.update(Lease(each.job_id, each.claims) for each in batch)

    def mark_answered(self, batch: Iterable[Settlement]) -> None:
        """Marks these settlements as answered."""
        if self._leases:
            self._leases.difference_update(Lease(each.job_id, each.claims) for each in batch)

    def __contains__(self, settlement: Settlement) -> bool:
        return Lease(settlement.job_id, settlement.claims) in self._leases


class UnconfirmedClaims:
    """Workers with a claim whose response was lost: it may have taken jobs unknown to this process."""

    def __init__(self) -> None:
        self._answered_at: dict[str, int] = {}  # by worker: the server's instant of its latest claim that was answered
        self._lost: set[str] = set()

    def add(self, worker: str) -> None:
        """Adds a worker with a claim whose response was lost."""
        self._lost.add(worker)

    def unconfirmed_since(self, worker: str) -> int | None:
        """Returns the instant from which on the worker may have claimed jobs without knowing. None: it has not, or the
        instant is unknown: an earlier process may have used its name and started its jobs."""
        return self._answered_at.get(worker) if worker in self._lost else None

    def mark_answered(self, worker: str, at: int) -> None:
        """Marks a claim as answered. ``at``: the server's time of the claim."""
        self._answered_at[worker] = at
        self._lost.discard(worker)


class RecordedOutcome(NamedTuple):
    """Outcome of a job, and of its attempt under one lease."""

    state: JobState | None  # of the job; None: it is gone
    claims: int | None
    run_at: int | None
    attempt_state: JobState | None  # in which the attempt left the job; None: not recorded, as for a success
    reason: str | None  # of the attempt
    error: str | None

    def is_running(self, claims: int) -> bool:
        """Returns True if it still runs under this lease, or ran when the lease ended."""
        return self.claims == claims and self.state is JobState.RUNNING


def accepted_as(settlement: Settlement, recorded: RecordedOutcome) -> JobState | None:
    """State in which a settlement with a lost answer left its job, even if that changed since; None: not applied.

    A failed attempt has a record. One that succeeded or was released has none: only the end of its lease is known.
    All sweepers settle a lost lease with the same values: if two race, both may be answered as accepted, and the end
    of the job is reported at least once.
    """
    if recorded.attempt_state is not None:
        is_same = (settlement.reason, settlement.error) == (recorded.reason, recorded.error)
        return recorded.attempt_state if is_same else None
    if recorded.claims is None or recorded.claims < settlement.claims or recorded.is_running(settlement.claims):
        return None
    if settlement.state is not JobState.SUCCEEDED and not settlement.refund:
        return None
    asked_to_stop = settlement.refund and recorded.claims == settlement.claims and recorded.state is JobState.CANCELLED
    return JobState.CANCELLED if asked_to_stop else settlement.state


def stored_ids(answers: Iterable[Submitted]) -> list[str | None]:
    """Returns the ids of the created jobs in order, None for the others."""
    return [answer.job_id if answer.created else None for answer in answers]


def perhaps_stored(error: Unavailable) -> Unavailable:
    """The same error, for a submission that was sent and not answered."""
    return Unavailable(f"{error}; {_PERHAPS_STORED}", outcome=_PERHAPS_STORED)


def name_unconfirmed(error: Unavailable, job: NewJob) -> Unavailable:
    """The same error, with the key or id of the job if it may be stored: the caller may not have chosen the id."""
    if error.outcome != _PERHAPS_STORED:
        return error
    name = f"its id is {job.id}" if job.key is None else f"its key is {job.key}"
    return Unavailable(f"{error}; {name}", outcome=f"{error.outcome}; {name}")


def perhaps_done(error: Unavailable) -> Unavailable:
    """The same error, for a change that was sent and not answered."""
    outcome = "it may have been done all the same: look before you ask again"
    return Unavailable(f"{error}; {outcome}", outcome=outcome)
