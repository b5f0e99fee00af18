"""Each rule of the history checker finds a violation, and finds none in a legal history that is close to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.models import JobState
from tests.storm.history.checker import RULES, Terms, check, describe
from tests.storm.history.records import FAR, Event, Recorder, read_histories

SECOND = 1_000_000_000
JOB, OTHER = "job-a", "job-b"
Q, R, OK, FAILED, DEAD, CANCELLED = (
    JobState[name] for name in ("QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "DEAD", "CANCELLED")
)
LEASE_US = 1_000_000


def event(verb: str, at: float, got: dict[str, Any] | None = None, *, job: str = JOB, **given: Any) -> Event:
    """A call that takes 10 ms. ``got`` None: its outcome is unknown."""
    asked, since_us = round(at * SECOND), round(at * 1e6)
    until = {} if got is None else {"answered": asked + SECOND // 100, "until_us": since_us + 10_000}
    return Event(verb=verb, process="w", job=job, asked=asked, since_us=since_us, given=given, got=got, **until)


def submit(at: float, *, job: str = JOB, made: str | None = None, **given: Any) -> Event:
    given = {"queue": "mail", "priority": 0, "delay": None, **given}
    return event("submit", at, {"accepted": made in (None, job), "id": made or job}, job=job, **given)


def claim(at: float, claims: int = 1, *, job: str = JOB, **got: Any) -> Event:
    got = {"run_at_us": 0, "lease_until_us": round(at * 1e6) + LEASE_US, "attempts": 1, "max_attempts": 3, **got}
    got |= {"accepted": True, "state": R, "claims": claims, "lease_for": LEASE_US, "queue": "mail"}
    return event("claim", at, got, job=job)


def settle(at: float, to: JobState = OK, claims: int = 1, *, accepted: bool = True, **given: Any) -> Event:
    given = {"claims": claims, "to": to, "mark": f"mark-{at}", **given}
    return event("settle", at, {"accepted": accepted, "state": to}, **given)


def beat(at: float, *, accepted: bool = True, locked: bool = False) -> Event:
    return event("heartbeat", at, {"accepted": accepted, "open": locked}, claims=1, lease_for=LEASE_US)


def step(at: float, *, accepted: bool = True) -> Event:
    return event("step", at, {"accepted": accepted}, claims=1, mark=f"mark-{at}")


def read(at: float, state: JobState | None, claims: int | None = None, **got: Any) -> Event:
    return event("read", at, {"state": state, "claims": claims, **got})


def change(verb: str, at: float, state: JobState = Q, *, accepted: bool = True) -> Event:
    return event(verb, at, {"accepted": accepted, "state": state})


def unknown(verb: str, at: float, **given: Any) -> Event:
    return event(verb, at, **given)


MARKED: dict[str, Any] = {"claims": 1, "to": OK, "mark": "mark"}
GONE = event("settle", 1.2, {"accepted": False, "state": None, "open": True}, claims=1, mark="mark")
SWEPT = event("settle", 2.5, {"accepted": False, "state": DEAD}, claims=1, to=DEAD, lost=True, mark="mark")
RELEASE_TRY = event("settle", 1.5, claims=1, to=Q, mark=None)
RELEASE = event("settle", 4, {"accepted": True, "state": Q}, **RELEASE_TRY.given)
OK_TRY = unknown("settle", 1.5, **MARKED)
OK_AGAIN = event("settle", 2, {"accepted": True, "state": OK}, **MARKED)
LOCKED_BEAT = beat(1.9, accepted=False, locked=True)
LATE_STEP = msgspec.structs.replace(
    event("step", 1.5, {"accepted": False}, claims=1, mark="late"), answered=SECOND * 5 // 2, until_us=2_500_000
)
PRUNE = event("prune", 4, {"count": 1}, job="")

CASES: dict[str, tuple[Sequence[Sequence[Event]], Sequence[Sequence[Event]]]] = {
    # rule: histories that break it, and histories that do not
    "present": (
        [
            [submit(0), read(1, None)],
            [submit(0), claim(1), settle(1.5), read(2, None)],
            [submit(0), claim(1), settle(1.5), read(3, None), PRUNE],
        ],
        [
            [submit(0), change("delete", 0.5), read(1, None)],
            [submit(0), unknown("delete", 0.5), read(1, None)],
            [submit(0), claim(1), settle(1.5), PRUNE, read(5, None)],
            [submit(0), claim(1), unknown("settle", 1.5, claims=1), PRUNE, read(5, None)],
            [submit(0), change("cancel", 0.5, R), PRUNE, read(5, None)],
            [submit(0), claim(1), GONE, PRUNE, read(5, None)],
            [submit(0), claim(1), SWEPT, PRUNE, read(5, None)],
            [unknown("submit", 0), read(1, None)],
        ],
    ),
    "absent_for_good": (
        [[submit(0), change("delete", 1), read(2, None), read(3, Q, 0)]],
        [[submit(0), change("delete", 1), read(0.5, Q, 0), read(2, None), read(3, None)]],
    ),
    "states": (
        [
            [submit(0), claim(1), settle(1.5), read(2, Q, 1)],
            [submit(0), read(1, Q, 0), read(2, OK, 0)],
            [submit(0), claim(1), settle(1.5, DEAD), read(2, R, 2)],
            [submit(0), claim(1), OK_TRY, OK_AGAIN, read(3, Q, 1)],
            [submit(0), claim(1), OK_TRY, OK_AGAIN, claim(3, 2), settle(3.5, OK, 2)],
        ],
        [
            [submit(0), claim(1), settle(1.5), change("replay", 2), read(3, Q, 1)],
            [submit(0), claim(1), settle(1.5), unknown("replay", 2), read(3, R, 2)],
            [submit(0), read(1, Q, 0), read(2, OK, 1)],
            [submit(0), claim(1), settle(1.5, FAILED), read(2, Q, 1)],
            [submit(0), claim(1), RELEASE_TRY, claim(2, 2), settle(3, DEAD, 2), RELEASE, read(5, DEAD, 2)],
        ],
    ),
    "growing_claims": (
        [[submit(0), claim(1, 2), read(3, Q, 1)], [submit(0), claim(1), settle(1.5, Q), claim(2, 1)]],
        [[submit(0), claim(1), settle(1.5, Q), claim(2, 2), read(2.5, R, 2)]],
    ),
    "claim_terms": (
        [[submit(0), claim(1, run_at_us=1_500_000)], [submit(0), claim(1, attempts=4)]],
        [[submit(0), claim(1, run_at_us=900_000, attempts=3)]],
    ),
    "one_lease": (
        [[submit(0), claim(1), claim(1.5, 2)], [submit(0), claim(1), beat(1.9), claim(2.5, 2)]],
        [
            [submit(0), claim(1), claim(2.5, 2)],
            [submit(0), claim(1), unknown("settle", 1.2, claims=1), claim(1.5, 2)],
            [submit(0), claim(1), settle(1.2, Q), claim(1.5, 2)],
        ],
    ),
    "no_effect_after_lease": (
        [
            [submit(0), claim(1), settle(2.5)],
            [submit(0), claim(1), beat(2.5)],
            [submit(0), claim(1), step(2.5)],
            [submit(0), claim(1), settle(1.5, Q, lost=True)],
            [submit(0), claim(1), beat(1.9), settle(2.5, Q, lost=True)],
            [submit(0), claim(1), LOCKED_BEAT, settle(2.5)],
            [submit(0), claim(1), unknown("heartbeat", 1.9, claims=1), claim(3, 2), settle(3.5)],
            [submit(0), claim(1), unknown("settle", 1.9, **MARKED), claim(3, 2), settle(3.5)],
            [submit(0), claim(1), claim(3, 2), unknown("settle", 3.4, **MARKED), settle(3.5, **MARKED)],
        ],
        [
            [submit(0), claim(1), beat(1.9), settle(2.5)],
            [submit(0), claim(1), unknown("heartbeat", 1.9, claims=1), settle(3.5)],
            [submit(0), claim(1), settle(2.5, accepted=False)],
            [submit(0), claim(1), settle(2.5, Q, lost=True)],
            [submit(0), claim(1), LOCKED_BEAT, settle(2.5, Q, lost=True)],
            [submit(0), claim(1), unknown("settle", 1.5, **MARKED), claim(3, 2), settle(3.5, **MARKED)],
        ],
    ),
    "lasting_leases": (
        [
            [submit(0), claim(1), settle(1.5, accepted=False)],
            [submit(0), claim(1), beat(1.5, accepted=False)],
            [submit(0), claim(1), step(1.5, accepted=False)],
            [submit(0), claim(1), read(1.5, Q, 1)],
            [submit(0), claim(1), read(1.5, None)],
            [submit(0), claim(1), change("replay", 1.5)],
            [submit(0), claim(1), change("delete", 1.5)],
            [submit(0), claim(1), change("cancel", 1.5, CANCELLED)],
            [submit(0), claim(1), claim(3, 2), settle(3.5, **MARKED)],
        ],
        [
            [submit(0), claim(1), settle(1.2, Q), settle(1.5, accepted=False)],
            [submit(0), claim(1), unknown("settle", 1.2, claims=1), beat(1.5, accepted=False)],
            [submit(0), claim(1), read(1.5, R, 1), change("cancel", 1.6, R), beat(1.7)],
            [submit(0), claim(1), beat(2.5, accepted=False)],
            [submit(0), claim(1), LOCKED_BEAT, settle(1.95)],
            [submit(0), claim(1), unknown("settle", 1.5, **MARKED), claim(3, 2), settle(3.5, **MARKED)],
            [submit(0), claim(1), GONE, beat(1.5, accepted=False), change("delete", 1.6)],
        ],
    ),
    "settled_once": (
        [[submit(0), claim(1), settle(1.2, FAILED), settle(1.4, FAILED)]],
        [
            [submit(0), claim(1), settle(1.2, FAILED), settle(1.4, FAILED, accepted=False)],
            [submit(0), claim(1), settle(1.2, FAILED), claim(1.4, 2), settle(1.6, FAILED, 2)],
        ],
    ),
    "cancelled_stays": (
        [
            [submit(0), change("cancel", 1, CANCELLED), claim(2)],
            [submit(0), claim(1), change("cancel", 1.2, R), settle(1.5, FAILED)],
        ],
        [
            [submit(0), change("cancel", 1, CANCELLED), change("replay", 1.5), claim(2)],
            [submit(0), claim(1), change("cancel", 1.2, R), settle(1.5, CANCELLED)],
            [submit(0), change("cancel", 1, R, accepted=False), claim(2)],
            [submit(0), claim(1), RELEASE_TRY, change("cancel", 1.7, CANCELLED), RELEASE],
        ],
    ),
    "refused_writes": (
        [
            [submit(0), claim(1), settle(2.5, accepted=False), read(3, OK, 1, marks=["mark-2.5"])],
            [submit(0), claim(1), step(1.5), settle(1.6), read(3, OK, 1, marks=[])],
            [submit(0), claim(1), step(2.5, accepted=False), read(3, Q, 1, marks=["mark-2.5"])],
            [submit(0, made=OTHER), read(1, Q, 0)],
        ],
        [
            [submit(0), claim(1), step(1.5), settle(1.6), read(3, OK, 1, marks=["mark-1.5", "mark-1.6"])],
            [submit(0), claim(1), LATE_STEP, read(3, Q, 1, marks=["late"])],
            [submit(0, made=OTHER), read(1, None)],
        ],
    ),
    "ended": (
        [[submit(0), read(9, Q, 0, final=True)]],
        [[submit(0), claim(1), settle(1.5), read(9, OK, 1, final=True)], [submit(0), read(9, Q, 0)]],
    ),
    "unique_keys": (
        [
            [submit(0, key="k"), submit(1, job=OTHER, key="k")],
            [submit(0, unique="u"), claim(0.5), submit(1, job=OTHER, unique="u")],
            [submit(0, key="k"), claim(0.2), settle(0.5), submit(1, job=OTHER, key="k")],
        ],
        [
            [submit(0, key="k"), submit(1, job=OTHER, made=JOB, key="k")],
            [submit(0, key="k"), change("delete", 0.5), submit(1, job=OTHER, key="k")],
            [submit(0, unique="u"), claim(0.2), settle(0.5), submit(1, job=OTHER, unique="u")],
        ],
    ),
    "in_order": (
        [
            [submit(0), submit(1, job=OTHER), claim(2, job=OTHER), claim(3)],
            [submit(1, priority=5), submit(0, job=OTHER), claim(2, job=OTHER), claim(3)],
        ],
        [
            [submit(0), submit(1, job=OTHER), claim(2), claim(3, job=OTHER)],
            [submit(0, priority=0), submit(1, job=OTHER, priority=5), claim(2, job=OTHER), claim(3)],
            [submit(0, delay=1.0), submit(1, job=OTHER), claim(2, job=OTHER), claim(3)],
            [submit(1), submit(1.005, job=OTHER), claim(2, job=OTHER), claim(3)],
        ],
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_rule_finds_violations_and_no_others(rule: str) -> None:
    violating, legal = CASES[rule]

    for history in violating:
        assert rule in {each.rule for each in check(history, Terms())}, history
    for history in legal:
        assert check(history, Terms()) == [], history


def test_sweeps_may_both_be_answered_where_an_answer_was_cut_off() -> None:
    def sweeps(*marks: str) -> list[Event]:
        return [submit(0), claim(1), *(settle(2.5 + n, Q, lost=True, mark=mark) for n, mark in enumerate(marks))]

    assert [each.rule for each in check(sweeps("lost", "lost"), Terms())] == ["settled_once"]
    assert check(sweeps("lost", "lost"), Terms(repeats_lost=True)) == []
    assert [each.rule for each in check(sweeps("lost", "other"), Terms(repeats_lost=True))] == ["settled_once"]


def test_every_rule_has_cases() -> None:
    assert set(CASES) == {*RULES, "unique_keys", "in_order"}


def test_violation_shows_the_whole_history_of_its_job() -> None:
    history = [submit(0), submit(0.5, job=OTHER), claim(1), settle(2.5)]

    [text] = describe(check(history, Terms()), history)

    first, *lines = text.splitlines()
    assert first == f"no_effect_after_lease: {JOB}: settle under claim 1 was accepted after its lease"
    assert [line.split(" (own clock")[0].split()[-1] for line in lines] == ["w", "w", "w"]
    assert "settle(claims=1, to=succeeded, mark=mark-2.5) → accepted=True, state=succeeded" in lines[-1]


async def _record_call(recorder: Recorder, *, answered: bool) -> None:
    async def answer() -> list[str]:
        if not answered:
            raise TimeoutError
        return ["a", "b"]

    given = [{"job": "a"}, {"job": "b"}]
    await recorder.call("read", given, answer(), lambda ids: [{"job": each, "state": Q} for each in ids])


@pytest.mark.parametrize("answered", [True, False])
def test_recorded_call_is_read_back_with_its_outcome(tmp_path: Path, answered: bool) -> None:
    file = tmp_path / "client-1.jsonl"
    asyncio.run(_record_call(Recorder(file), answered=answered))
    with file.open("ab") as torn:
        torn.write(b'{"n": 7, "verb": "cl')  # its process was killed

    events = read_histories(tmp_path)

    assert [(each.process, each.verb, each.job) for each in events] == [("client-1", "read", job) for job in "ab"]
    assert [each.got and each.got["state"] for each in events] == ([Q, Q] if answered else [None, None])
    assert all((each.answered < FAR) is answered for each in events)
