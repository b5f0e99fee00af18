"""Ids, instants and what a job says of itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Invalid
from holdfast.core.ids import as_ulid, new_id, parse_id
from holdfast.core.models import NO_OPTIONS, Job, JobFilter, JobState, Lease, Options, to_datetime, to_microseconds

ROOT = Path(__file__).resolve().parents[2]


def test_ids_are_version_7_uuids_of_the_current_time() -> None:
    """In a process of its own: where another test moved the clock, ids stay ahead of it."""
    before = time.time_ns() // 1_000_000
    program = "from holdfast.core.ids import new_id; print(new_id())"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    made = uuid.UUID(ended.stdout.strip())
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert before <= made.int >> 80 <= time.time_ns() // 1_000_000


def test_ids_stay_ordered_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [new_id() for _ in range(10_000)]
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)
    ids += [new_id() for _ in range(10_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_threads_make_unique_ids_each_in_order() -> None:
    made: list[list[str]] = [[] for _ in range(8)]
    barrier = threading.Barrier(8)

    def make(mine: list[str]) -> None:
        barrier.wait()
        mine.extend(new_id() for _ in range(2000))

    threads = [threading.Thread(target=make, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len(set().union(*made)) == 16_000


def test_forked_child_makes_other_ids_than_its_parent() -> None:
    """Only the random half differs: at the same instant both count from the same number on."""
    program = """
import os, random
from holdfast.core.ids import new_id
random.seed(7)
new_id()
child = os.fork()
if child:
    os.waitpid(child, 0)
print(" ".join(new_id() for _ in range(100)), flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    ours, theirs = ({made[19:] for made in line.split()} for line in ended.stdout.splitlines())
    assert len(theirs) == len(ours) == 100
    assert not theirs & ours


@given(st.uuids())
def test_an_id_is_read_in_every_spelling(number: uuid.UUID) -> None:
    canonical = str(number)
    spellings = [canonical.upper(), number.hex, f"{{{canonical}}}", number.urn, as_ulid(canonical)]
    assert {parse_id(text) for text in [*spellings, as_ulid(canonical).lower()]} == {canonical}


@given(st.lists(st.uuids(), min_size=2))
def test_ulids_sort_like_their_ids(numbers: list[uuid.UUID]) -> None:
    ids = sorted(map(str, numbers))
    ulids = [as_ulid(each) for each in ids]
    assert ulids == sorted(ulids)
    assert all(len(each) == 26 for each in ulids)


@pytest.mark.parametrize(
    "text",
    ["", "7", "x" * 36, "8" + "0" * 25, "0" * 25, "0" * 27, "0" * 25 + "U", "0" * 25 + "é", "ſ" * 26, "../x", "\0"],
    ids=ascii,
)
def test_what_is_no_id_is_none(text: str) -> None:
    assert parse_id(text) is None


# ── instants ──────────────────────────────────────────────────────────────────────────────────────────────────────
@given(st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC)))  # noqa: DTZ001 - Hypothesis adds it
def test_an_instant_is_kept_to_the_microsecond(when: datetime) -> None:
    assert to_datetime(to_microseconds(when)) == when
    assert to_microseconds(when.astimezone(timezone(timedelta(hours=5, minutes=45)))) == to_microseconds(when)


def test_instants_are_aware_and_in_utc() -> None:
    assert to_datetime(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert to_datetime(1_924_992_000_000_001).isoformat() == "2031-01-01T00:00:00.000001+00:00"


# ── a job ─────────────────────────────────────────────────────────────────────────────────────────────────────────
JOB = Job("id", "work", "default", "{}", 3, 2, 5, 0, 0, 1_000_000, 2_000_000)


@pytest.mark.parametrize(
    ("state", "attempts", "failures"),
    [
        (JobState.QUEUED, 0, 0),
        (JobState.RUNNING, 1, 0),
        (JobState.RUNNING, 3, 2),
        (JobState.RUNNING, 0, 0),
        (JobState.FAILED, 2, 2),
        (JobState.SUCCEEDED, 3, 2),
        (JobState.DEAD, 5, 5),
        (JobState.CANCELLED, 2, 2),
    ],
)
def test_failures_follow_from_attempts_and_state(state: JobState, attempts: int, failures: int) -> None:
    assert msgspec.structs.replace(JOB, state=state, attempts=attempts).failures == failures


def test_a_job_reads_its_instants_its_lease_and_its_options() -> None:
    assert (JOB.run_at, JOB.created_at) == (to_datetime(1_000_000), to_datetime(2_000_000))
    assert (JOB.started_at, JOB.ended_at, JOB.lease_until) == (None, None, None)
    ended = msgspec.structs.replace(JOB, started_at_us=1, ended_at_us=2, lease_until_us=3, options=Options(timeout=4))
    assert (ended.started_at, ended.ended_at, ended.lease_until) == (to_datetime(1), to_datetime(2), to_datetime(3))
    assert JOB.lease == Lease("id", 3)
    assert (JOB.options_or_default, ended.options_or_default) == (NO_OPTIONS, Options(timeout=4))


def test_a_job_shows_its_instants_as_people_write_them() -> None:
    job = Job("a", "work", "default", "{}", 0, 0, 5, 0, 0, 1_000_000, 1_500_000, state=JobState.QUEUED)
    assert repr(job) == (
        "Job(id='a', task='work', queue='default', payload='{}', claims=0, attempts=0, max_attempts=5, priority=0, "
        "lost_leases=0, run_at=1970-01-01T00:00:01Z, created_at=1970-01-01T00:00:01.500000Z, state='queued', "
        "cancelling=False)"
    )
    assert "run_at_us=9223372036854775807" in repr(msgspec.structs.replace(job, run_at_us=(1 << 63) - 1))


@pytest.mark.parametrize(
    ("fields", "provided"),
    [
        ({"states": "dead"}, "states: 'dead' is not valid; give a tuple: states=\\('dead',\\)"),
        ({"states": ("ded",)}, "states: 'ded' .* did you mean dead\\?"),
        ({"states": (None,)}, "states: None .* name any of scheduled, "),
        ({"tasks": "mail.send"}, "tasks: 'mail.send' is not valid; give a tuple"),
        ({"tasks": (print,)}, "tasks: <built-in function print> is not valid; give names as text"),
        ({"created_after": datetime.fromisoformat("2030-01-31")}, "created_after: .* give an aware datetime"),
        ({"created_before": "2030-01-31"}, "created_before: '2030-01-31' is not valid; give an aware datetime"),
        ({"not_started_after": 60}, "not_started_after: 60 is not valid; give an aware datetime"),
    ],
    ids=str,
)
def test_a_filter_that_could_match_nothing_is_refused(fields: dict[str, Any], provided: str) -> None:
    with pytest.raises(Invalid, match=provided):
        JobFilter(**fields)


def test_a_filter_takes_states_as_words_too() -> None:
    assert JobFilter(states=("dead",)) == JobFilter(states=(JobState.DEAD,))
