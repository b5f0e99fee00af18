"""Answers that were lost on their way: a server store's memory of its requests, and of their outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.errors import Unavailable
from holdfast.core.models import JobState, Lease, Settlement

_REMEMBERED = 10_000  # leases; who asks again does so within seconds


class UnconfirmedSettlements:
    """Leases whose settlement was sent, and its answer lost or not passed on."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()

    def add(self, batch: Iterable[Settlement]) -> None:
        """The answer of these was lost."""
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
    """Workers whose claim was sent and its answer lost: it may have taken jobs unknown to this process."""

    def __init__(self) -> None:
        self._answered_at: dict[str, int] = {}  # by worker: the server's instant of its latest claim that was answered
        self._lost: set[str] = set()

    def add(self, worker: str) -> None:
        """The answer of a claim of this worker was lost."""
        self._lost.add(worker)

    def unconfirmed_since(self, worker: str) -> int | None:
        """Since when there may be jobs that this worker took and never heard of. None: there are none, or it is
        not known: an earlier process may have had its name, and started its jobs."""
        return self._answered_at.get(worker) if worker in self._lost else None

    def mark_answered(self, worker: str, at: int) -> None:
        """A claim, of the server's instant ``at``, is answered, and the caller knows of its jobs."""
        self._answered_at[worker] = at
        self._lost.discard(worker)


class RecordedOutcome(NamedTuple):
    """Outcome of a job, and of its attempt under one lease."""

    state: JobState | None  # of the job; None: it is gone
    claims: int | None
    run_at: int | None
    left: JobState | None  # where the attempt left it; None: there is no record, as of success
    reason: str | None  # of the attempt
    error: str | None

    def is_running(self, claims: int) -> bool:
        """Returns True if it still runs under this lease, or ran when the lease ended."""
        return self.claims == claims and self.state is JobState.RUNNING


def accepted_as(settlement: Settlement, evidence: RecordedOutcome) -> JobState | None:
    """State in which a settlement with a lost answer left its job, even if that changed since; None: not applied.

    Attempts leave a record, but for those that succeeded or were given back: of these nothing is known but that the
    lease has ended, and with another worker's record if it was lost. Sweeps settle a lost lease alike: if two of them
    race, both may be answered as accepted, so that its end is reported at least once.
    """
    if evidence.left is not None:
        ours = (settlement.reason, settlement.error) == (evidence.reason, evidence.error)
        return evidence.left if ours and not settlement.refund else None
    if evidence.claims is None or evidence.claims < settlement.claims or evidence.is_running(settlement.claims):
        return None
    if settlement.state is not JobState.SUCCEEDED and not settlement.refund:
        return None
    asked_to_stop = settlement.refund and evidence.claims == settlement.claims and evidence.state is JobState.CANCELLED
    return JobState.CANCELLED if asked_to_stop else settlement.state


def perhaps_stored(error: Unavailable) -> Unavailable:
    """The same error, for a submission that was sent and not answered."""
    outcome = "the job may be stored all the same: submit it again with the same key or id, and there is one"
    return Unavailable(f"{error}; {outcome}", outcome=outcome)


def perhaps_done(error: Unavailable) -> Unavailable:
    """The same error, for a change that was sent and not answered."""
    outcome = "it may have been done all the same: look before you ask again"
    return Unavailable(f"{error}; {outcome}", outcome=outcome)
