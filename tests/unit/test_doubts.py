"""What is known of a settlement whose answer was lost."""

from __future__ import annotations

import pytest

from holdfast.core.models import JobState, Reason, Settlement
from holdfast.stores.common.unconfirmed import RecordedOutcome, accepted_as

SUCCEEDED = Settlement(job_id="job", claims=3, state=JobState.SUCCEEDED)
FAILED = Settlement(job_id="job", claims=3, state=JobState.FAILED, reason=Reason.ERROR, error="boom")
RELEASED = Settlement(job_id="job", claims=3, state=JobState.QUEUED, reason=Reason.RELEASED, refund=True)
SNOOZED = Settlement(job_id="job", claims=3, state=JobState.SCHEDULED, reason=Reason.SNOOZED, refund=True)
ALL = (SUCCEEDED, FAILED, RELEASED, SNOOZED)


def fate(
    state: JobState | None, claims: int | None = 3, left: JobState | None = None, *, error: str = "boom"
) -> RecordedOutcome:
    """A job that stands so, and the record of the attempt in doubt, if there is one."""
    reason = None if left is None else "error" if error == "boom" else "crashed"
    return RecordedOutcome(state, claims, None, left, reason, left and error)


@pytest.mark.parametrize("settlement", ALL)
def test_one_that_still_runs_under_its_lease_was_not_settled(settlement: Settlement) -> None:
    assert accepted_as(settlement, fate(JobState.RUNNING)) is None


@pytest.mark.parametrize("settlement", ALL)
def test_of_a_job_that_is_gone_nothing_is_known(settlement: Settlement) -> None:
    assert accepted_as(settlement, fate(None, None)) is None


@pytest.mark.parametrize("settlement", ALL)
@pytest.mark.parametrize("claims", [3, 4, 9])
def test_lost_lease_is_not_accepted_as_settled(settlement: Settlement, claims: int) -> None:
    assert accepted_as(settlement, fate(JobState.QUEUED, claims, JobState.QUEUED, error="lease expired")) is None


@pytest.mark.parametrize("stands", [JobState.FAILED, JobState.QUEUED, JobState.RUNNING, JobState.SUCCEEDED])
def test_failure_is_confirmed_by_its_attempt_record(stands: JobState) -> None:
    claims = 3 if stands in (JobState.FAILED, JobState.QUEUED) else 4
    assert accepted_as(FAILED, fate(stands, claims, JobState.FAILED)) is JobState.FAILED
    assert accepted_as(FAILED, fate(stands, claims)) is None


def test_what_was_to_be_cancelled_ended_so() -> None:
    assert accepted_as(FAILED, fate(JobState.CANCELLED, 3, JobState.CANCELLED)) is JobState.CANCELLED
    assert accepted_as(RELEASED, fate(JobState.CANCELLED)) is JobState.CANCELLED


@pytest.mark.parametrize("settlement", [SUCCEEDED, RELEASED, SNOOZED])
def test_what_leaves_no_record_has_ended_if_the_lease_has(settlement: Settlement) -> None:
    assert accepted_as(settlement, fate(settlement.state)) is settlement.state
    assert accepted_as(settlement, fate(JobState.RUNNING, 4)) is settlement.state
    assert accepted_as(settlement, fate(JobState.QUEUED, 3)) is settlement.state, "replayed, or due by now"
    assert accepted_as(settlement, fate(JobState.RUNNING, 2)) is None, "an older copy of the database"
