"""Expiry and edits: the values that they take, and the refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Conflict, Holdfast, Invalid, JobState
from holdfast.core.job_changes import EDITABLE, check_edit
from holdfast.core.models import NewJob

APP = Holdfast("sqlite:///unused.db")


@APP.task("work", expires="10m")
async def work(n: int = 1) -> None: ...


def drafted(**options: Any) -> NewJob:
    return APP.draft_job("other", {}, **options)


@pytest.mark.parametrize("given", [600, 600.0, "10m", timedelta(minutes=10)])
def test_span_accepts_every_format(given: Any) -> None:
    assert drafted(expires=given).expires_in == timedelta(minutes=10)


@pytest.mark.parametrize(
    "given", ["2035-01-31T08:00:00Z", "2035-01-31T09:00:00+01:00", datetime(2035, 1, 31, 8, tzinfo=UTC)]
)
def test_instant_can_be_text_or_datetime(given: Any) -> None:
    job = drafted(expires=given)
    assert (job.expires_in, job.expires_at_us) == (None, 2053843200000000)


def test_default_of_a_task_counts_unless_the_submission_says_otherwise() -> None:
    assert work.new_job().expires_in == timedelta(minutes=10)
    assert APP.draft_job("work", {}).expires_in == timedelta(minutes=10)
    assert work.options(expires=5).new_job().expires_in == timedelta(seconds=5)
    assert not work.options(expires="never").new_job().expires
    assert not drafted().expires


@pytest.mark.parametrize(
    "options",
    [
        {"expires": 0},
        {"expires": -1},
        {"expires": "10"},
        {"expires": "soon"},
        {"expires": True},
        {"expires": float("nan")},
        {"expires": [5]},
        {"expires": "2035-01-31T08:00:00"},
        {"expires": datetime(2035, 1, 31)},  # noqa: DTZ001 - it is refused
        {"expires": "1999-01-31T08:00:00Z"},
        {"expires": "1m", "delay": "1m"},
        {"expires": "2035-01-31T08:00:00Z", "run_at": "2035-01-31T08:00:00Z"},
    ],
)
def test_wrong_expiry_names_field_value_and_remedy(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"^expires: .*; (give|write) ") as refused:
        drafted(**options)
    assert refused.value.field == "expires"


def test_task_and_schedule_take_a_span_alone() -> None:
    with pytest.raises(Invalid, match=r"expires.*give a span"):
        APP.task("later", expires="2035-01-31T08:00:00Z")
    with pytest.raises(Invalid, match=r"expires.*give a span"):
        APP.schedule("later", drafted(expires="2035-01-31T08:00:00Z"), every=60)


def test_task_that_is_delayed_beyond_its_default_is_refused() -> None:
    with pytest.raises(Invalid, match=r"expires.*the job starts in 3600 s, and would expire in "):
        work.options(delay="1h").new_job()


@pytest.mark.parametrize("state", JobState)
def test_refused_edit_names_state_and_remedy(state: JobState) -> None:
    if state in EDITABLE:
        check_edit("J", state)
        return
    with pytest.raises(Conflict, match=f"job J cannot be edited: it (is|has) {state}.*; "):
        check_edit("J", state)
