"""The checker can find each fault it is there for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash import checker
from tests.crash.checker import ALWAYS, Check, Facts, Frozen, Row, complaints, excess_explained
from tests.crash.fleet import Fleet
from tests.crash.ledger import Execution, Reader, append, executions
from tests.support.stores import sqlite_file

FIRST = Execution("a", 1, 1, 100, 10.0, 1010.0, 11.0)
SECOND = Execution("a", 2, 2, 200, 12.0, 1012.0, 13.0)
SOUND = Facts(
    acknowledged=["a"], rows={"a": Row("a", "succeeded", 2, 2, None, 2)}, runs=[FIRST, SECOND], accepted=["a"]
)


def row(**changes: Any) -> dict[str, Row]:
    return {"a": replace(SOUND.rows["a"], **changes)}


def test_a_sound_history_has_no_complaints() -> None:
    assert complaints(SOUND, [*ALWAYS, excess_explained]) == []


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (checker.nothing_lost, replace(SOUND, rows={})),
        (checker.nothing_lost, replace(SOUND, rows=row(state="running"))),
        (checker.counts_sum, replace(SOUND, acknowledged=["a", "a"])),
        (checker.counts_sum, replace(SOUND, acknowledged=[])),
        (checker.finished_once, replace(SOUND, accepted=["a", "a"])),
        (checker.finished_once, replace(SOUND, accepted=["a", "a", "a"], replayed={"a": [11.5]})),
        (checker.no_late_write, replace(SOUND, rows=row(finished_by=1))),
        (checker.no_late_write, replace(SOUND, runs=[FIRST, replace(SECOND, ended=None)])),
        (checker.no_late_write, replace(SOUND, runs=[FIRST, replace(SECOND, cancelled=True)])),
        (checker.fenced, replace(SOUND, runs=[FIRST, SECOND, replace(SECOND, pid=300, started=14.0)])),
        (checker.fenced, replace(SOUND, rows=row(claims=1, finished_by=1))),
        (checker.attempts_counted, replace(SOUND, rows=row(attempts=1))),
        (checker.attempts_counted, replace(SOUND, rows=row(attempts=0), replayed={"a": [11.5]})),
        (checker.excess_explained, replace(SOUND, rows=row(attempts=3))),
        (checker.excess_explained, replace(SOUND, runs=[replace(FIRST, cancelled=True), SECOND])),
        (checker.no_overlap, replace(SOUND, runs=[replace(FIRST, ended=12.5), SECOND])),
        (checker.no_overlap, replace(SOUND, runs=[replace(FIRST, ended=None), SECOND])),
        (checker.no_overlap, replace(SOUND, runs=[replace(FIRST, ended=None), SECOND], killed={100: 12.5})),
    ],
)
def test_a_fault_is_found(check: Check, facts: Facts) -> None:
    assert list(check(facts)) != []


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (checker.no_overlap, replace(SOUND, runs=[replace(FIRST, ended=None), SECOND], killed={100: 11.5})),
        (
            checker.no_overlap,
            replace(SOUND, runs=[replace(FIRST, ended=15.0), SECOND], frozen=[Frozen(100, 10.5, 14.0)]),
        ),
        (checker.excess_explained, replace(SOUND, rows=row(attempts=3), unstarted=Counter(a=1))),
        (checker.excess_explained, replace(SOUND, runs=[replace(FIRST, cancelled=True, lost=True), SECOND])),
        (checker.attempts_counted, replace(SOUND, rows=row(attempts=1), runs=[replace(FIRST, cancelled=True), SECOND])),
        (checker.attempts_counted, replace(SOUND, rows=row(attempts=1), replayed={"a": [11.5]})),
        (checker.finished_once, replace(SOUND, accepted=["a", "a"], replayed={"a": [11.5]})),
    ],
)
def test_what_a_fault_explains_is_no_complaint(check: Check, facts: Facts) -> None:
    assert list(check(facts)) == []


def test_the_ledger_pairs_starts_with_their_endings(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    lines: Sequence[tuple[str, int]] = [("start", 1), ("start", 2), ("end", 2), ("start", 3), ("cancelled", 3)]
    for what, claims in lines:
        append(ledger, what=what, job="a", claims=claims, attempt=claims)
    reader = Reader(ledger)
    first, second, third = executions(reader.lines())
    assert first.ended is None
    assert second.ended is not None
    assert second.ended >= second.started
    assert third.cancelled


def test_cancelled_execution_whose_lease_was_another_s_is_known_as_lost(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for claims, endings in ((1, ("cancelled", "refused")), (2, ("cancelled",))):
        for what in ("start", *endings):
            append(ledger, what=what, job="a", claims=claims, attempt=1)
    assert [run.lost for run in executions(Reader(ledger).lines())] == [True, False]


def test_lease_started_twice_in_one_process_is_two_executions(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for what in ("start", "end", "start", "end"):
        append(ledger, what=what, job="a", claims=1, attempt=1)
    assert len(executions(Reader(ledger).lines())) == 2


@pytest.mark.parametrize(
    ("program", "mishaps"),
    [
        ("pass", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0),
        ("raise SystemExit(3)", 1),
        ("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", 1),
        ("1 / 0", 2),
    ],
    ids=["it ends", "it is killed", "another exit code", "an error in a thread", "an error"],
)
def test_process_that_exits_by_itself_is_reported(tmp_path: Path, program: str, mishaps: int) -> None:
    with Fleet(tmp_path, sqlite_file) as fleet:
        fleet.run([sys.executable, "-c", program]).wait(60)
        assert len(fleet.mishaps()) == mishaps
