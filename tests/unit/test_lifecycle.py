"""The state table, and what becomes of a job after an attempt."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib.resources import files

import pytest

from holdfast.core.errors import Conflict
from holdfast.core.job_changes import EDITABLE
from holdfast.core.lifecycle import (
    CANCELLABLE,
    DELETABLE,
    MAX_ERROR_LENGTH,
    REPLAYABLE,
    TRANSITIONS,
    Cancelled,
    Failed,
    Lost,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
    check_replay,
    clip_error,
    decide,
    is_last_attempt,
)
from holdfast.core.models import TERMINAL, Job, JobState, Reason, Settlement
from holdfast.stores.common.named_sql import CODES, STATES, load_statements

BACKOFF = timedelta(seconds=7)
OWN = timedelta(seconds=90)
SPENT = {"left": False, "last": True, "over": True, "unlimited": False}
"""Whether the attempt now running is the last one allowed."""


class Backoff:
    """Answers seven seconds, and remembers for which number of failures. ``priority``: of retries."""

    def __init__(self, priority: int | None = None) -> None:
        self.asked: list[int] = []
        self.priority = priority

    def delay_after(self, failures: int, rng: random.Random) -> timedelta:
        self.asked.append(failures)
        return BACKOFF


def running(budget: str = "left", *, cancelling: bool = False) -> Job:
    attempts, most = {"left": (2, 5), "last": (5, 5), "over": (6, 5), "unlimited": (10_000, None)}[budget]
    return Job("id", "work", "default", "{}", 9, attempts, most, 0, 0, 0, 0, worker="worker-1", cancelling=cancelling)


def settled(job: Job, outcome: Outcome) -> tuple[Settlement, list[int]]:
    backoff = Backoff()
    return decide(job, outcome, backoff, random.Random(0)), backoff.asked


Row = tuple[JobState, Reason | None, timedelta | None, bool, bool]
"""Where the job goes, why, with which delay; whether the attempt is given back; whether the lease had run out."""


def _expected(outcome: str, *, spent: bool, cancelling: bool) -> Row:
    dead_of_budget: Row = (JobState.DEAD, Reason.MAX_ATTEMPTS, None, False, False)
    lost: Row = (JobState.DEAD if spent else JobState.QUEUED, Reason.CRASHED, None, False, True)
    return {
        "succeeded": (JobState.SUCCEEDED, None, None, False, False),
        "failed": dead_of_budget if spent else (JobState.FAILED, Reason.ERROR, BACKOFF, False, False),
        "timed out": dead_of_budget if spent else (JobState.FAILED, Reason.TIMEOUT, BACKOFF, False, False),
        "killed": (
            JobState.DEAD if spent else JobState.FAILED,
            Reason.CRASHED,
            None if spent else BACKOFF,
            False,
            False,
        ),
        "retry after": dead_of_budget if spent else (JobState.FAILED, Reason.ERROR, OWN, False, False),
        "final": (JobState.DEAD, Reason.NON_RETRYABLE, None, False, False),
        "snoozed": (JobState.SCHEDULED, Reason.SNOOZED, OWN, True, False),
        "snoozed for nothing": (JobState.QUEUED, Reason.SNOOZED, timedelta(0), True, False),
        "released": (JobState.QUEUED, Reason.RELEASED, None, True, False),
        "released for a while": (JobState.SCHEDULED, Reason.RELEASED, OWN, True, False),
        "cancelled": (JobState.CANCELLED, Reason.CANCELLED, None, False, False),
        "lost": (JobState.CANCELLED, Reason.CANCELLED, None, False, True) if cancelling else lost,
    }[outcome]


OUTCOMES: dict[str, Outcome] = {
    "succeeded": Succeeded('"done"'),
    "failed": Failed(error="boom"),
    "timed out": Failed(error="timeout", reason=Reason.TIMEOUT),
    "killed": Failed(error="its process was killed", reason=Reason.CRASHED),
    "retry after": Failed(error="busy", delay=OWN),
    "final": Failed(error="never", reason=Reason.NON_RETRYABLE, retryable=False),
    "snoozed": Snoozed(OWN),
    "snoozed for nothing": Snoozed(timedelta(0)),
    "released": Released(),
    "released for a while": Released(error="no memory", delay=OWN),
    "cancelled": Cancelled(),
    "lost": Lost(),
}


@pytest.mark.parametrize(
    ("outcome", "budget", "cancelling"), list(itertools.product(OUTCOMES, SPENT, (False, True))), ids=str
)
def test_every_outcome_with_every_budget(outcome: str, budget: str, cancelling: bool) -> None:
    job = running(budget, cancelling=cancelling)
    settlement, asked = settled(job, OUTCOMES[outcome])

    row = (settlement.state, settlement.reason, settlement.delay, settlement.refund, settlement.lease_expired)
    assert row == _expected(outcome, spent=SPENT[budget], cancelling=cancelling)
    assert (settlement.job_id, settlement.claims) == (job.id, job.claims)
    assert settlement.state in TRANSITIONS[JobState.RUNNING]
    assert asked == ([job.attempts] if settlement.delay == BACKOFF else []), "asked without need, or not asked"
    assert (settlement.result is not None) is (outcome == "succeeded")


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_only_a_failure_that_is_retried_changes_the_priority(outcome: str) -> None:
    def settled_priority(budget: str, policy: int | None) -> int | None:
        return decide(running(budget), OUTCOMES[outcome], Backoff(policy), random.Random(0)).priority

    is_retried = outcome in ("failed", "timed out", "killed", "retry after")
    assert settled_priority("left", 5) == (5 if is_retried else None)
    assert settled_priority("last", 5) is None
    assert settled_priority("left", 0) is None, "it is the job's already"
    assert settled_priority("left", None) is None


def test_budgets() -> None:
    assert {budget: is_last_attempt(running(budget)) for budget in SPENT} == SPENT


def test_a_lost_lease_says_whose_it_was() -> None:
    settlement, _ = settled(running(), Lost())
    assert settlement.error == "lease expired: worker worker-1 died, froze or was cut off during attempt 2 of work"


@pytest.mark.parametrize("text", ["x" * 10_000, "\ud800" * 4096, "\udfffé" * 3000], ids=["long", "halves", "mixed"])
def test_an_error_text_fits_and_can_be_stored(text: str) -> None:
    error = settled(running(), Failed(error=text))[0].error
    assert error == clip_error(text)
    assert error is not None
    assert len(error) <= MAX_ERROR_LENGTH
    assert error.encode()


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_state_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(JobState)
    reached = set().union(*TRANSITIONS.values())
    assert reached == set(JobState)
    assert all(state not in to for state, to in TRANSITIONS.items())


def test_a_terminal_state_is_left_by_a_replay_only() -> None:
    replayed = {JobState.QUEUED, JobState.SCHEDULED}
    assert {state for state, to in TRANSITIONS.items() if to - {JobState.WAITING} == replayed} == TERMINAL
    assert {JobState.SUCCEEDED} == TERMINAL - REPLAYABLE
    assert all(replayed <= TRANSITIONS[state] for state in REPLAYABLE)
    assert not CANCELLABLE & TERMINAL
    assert set(JobState) - {JobState.RUNNING} == DELETABLE


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", list(JobState))
def test_which_states_a_replay_accepts(state: JobState, force: bool) -> None:
    if state in REPLAYABLE or (force and state is JobState.SUCCEEDED):
        check_replay("id", state, force=force)
    else:
        with pytest.raises(Conflict, match=r"job id cannot be replayed: it (is|has) "):
            check_replay("id", state, force=force)


# ── the table and the statements of the SQL stores ────────────────────────────────────────────────────────────────
SQL_STORES = ("postgres", "sqlite")
_STATE = r"\(?\+?(?:[jd]\.)?state(?: \+ 0)?\)?"


def _statements(store: str) -> dict[str, str]:
    return load_statements(files(f"holdfast.stores.{store}") / "queries.sql")


def _guards(statement: str) -> set[JobState]:
    """The states after ``where`` that a statement leaves."""
    condition = statement.partition("where ")[2]
    listed = re.findall(rf"{_STATE} in \(([\d, ]+)\)", condition)
    single = re.findall(rf"{_STATE} = (\d)", condition)
    return {STATES[int(code)] for code in [*re.findall(r"\d", " ".join(listed)), *single]}


def _moves(store: str) -> Iterator[tuple[str, set[JobState], JobState]]:
    """Each statement that names the state a job goes to, and those it may come from: by the guard of the rows it has
    locked, or by its own."""
    for name, statement in _statements(store).items():
        goal = re.search(r"\bset state = (?:case when [^,]* then )?(\d)(?: else (\d))?", statement)
        if goal is not None:
            pieces = re.split(r"for (?:no key )?update(?: of \w+)? skip locked", statement)[:-1]
            locked = [re.split(r"from holdfast\.job(?: j)?\s", piece)[-1] for piece in pieces]
            chosen = [re.findall(rf"{_STATE} (?:= |in )[(\d, )]+", piece) for piece in locked]
            before = {state for found in chosen for each in found for state in _guards(f"where {each}")}
            before = before or _guards(statement[max(goal.end(), statement.rfind("\nwhere")) :])
            for code in filter(None, goal.groups()):
                yield f"{name} to {STATES[int(code)]}", before, STATES[int(code)]


@pytest.mark.parametrize("store", SQL_STORES)
def test_statements_make_only_transitions_of_the_table(store: str) -> None:
    moves = {name: (left, goal) for name, left, goal in _moves(store)}
    assert set(moves) >= {
        "cancel_unstarted to cancelled",
        "replay to queued",
        "replay to scheduled",
        "settle_succeeded to succeeded",
        "promote_any_queue to queued",
    }
    # These go by rows that were picked in the same transaction.
    unguarded = {name.partition(" ")[0] for name, (left, _) in moves.items() if not left}
    assert unguarded <= {"claim_picked", "mark_unreadable", "promote_queue", "init_batch"}
    for name, (left, goal) in moves.items():
        assert all(goal in TRANSITIONS[state] for state in left), name


@pytest.mark.parametrize("store", SQL_STORES)
def test_the_statements_accept_exactly_the_states_of_the_table(store: str) -> None:
    statements = _statements(store)
    settling = statements["settle_one" if store == "sqlite" else "settle_rest"]
    assert _guards(statements["cancel_unstarted"]) | _guards(statements["cancel_running"]) == CANCELLABLE
    assert _guards(statements["cancel_running"]) == {JobState.RUNNING}
    assert _guards(statements["expire_jobs"]) - {JobState.CANCELLED} == EDITABLE  # that is what it sets
    if store == "postgres":  # the states are a parameter of SQLite's
        assert _guards(statements["rewrite_unstarted"]) == EDITABLE
    assert _guards(statements["replay"]) == REPLAYABLE | {JobState.SUCCEEDED}
    assert _guards(settling) >= {JobState.RUNNING}
    assert _guards(statements["settle_succeeded"]) == {JobState.RUNNING}
    assert set(re.findall(rf"{_STATE} <> (\d)", statements["deletable"])) == {str(CODES[JobState.RUNNING])}
    due = {JobState.SCHEDULED, JobState.FAILED, JobState.WAITING}
    promoting = ("promote_ids", "promote_queue") if store == "sqlite" else ("promote_ids", "promote_queues")
    for name in (*promoting, "promote_any_queue"):
        condition = statements[name].partition("where")[2]
        listed = ",".join(re.findall(rf"{_STATE} in \(([\d, ]+)\)", condition)).split(",")
        alone = re.findall(rf"{_STATE} = (\d)", condition)
        assert {STATES[int(code)] for code in [*listed, *alone]} == due


@pytest.mark.parametrize("store", SQL_STORES)
def test_what_a_settlement_ends_early_is_whatever_is_no_ending(store: str) -> None:
    """Only the store sees the flag of a cancellation in its own write: it turns these states into cancelled."""
    statement = _statements(store)["settle_one" if store == "sqlite" else "settle_rest"]
    mark = ":state" if store == "sqlite" else r"d\.state"
    (least,) = set(re.findall(rf"case when (?:j\.)?cancelling and {mark} < (\d) then", statement))
    assert {state for state in JobState if CODES[state] >= int(least)} == TERMINAL
    ends_cancelled = rf"cancelling and {mark} < {least} then {CODES[JobState.CANCELLED]}\s.*?else {mark} end"
    assert re.search(ends_cancelled, statement, re.DOTALL)


@pytest.mark.parametrize("store", SQL_STORES)
def test_the_schema_and_the_code_number_the_states_alike(store: str) -> None:
    migration = (files("holdfast.stores") / store / "migrations/0001_initial.sql").read_text(encoding="utf-8")
    assert [CODES[state] for state in STATES] == list(range(8))
    assert f"-- {' '.join(f'{code} {state}' for code, state in enumerate(STATES))}" in migration


def test_what_a_reader_of_sqlite_is_shown_follows_the_codes() -> None:
    queries = (files("holdfast.stores.sqlite") / "queries.sql").read_text(encoding="utf-8")
    lists = re.findall(r"""'\[("queued".*?)\]'""", queries)
    assert lists
    assert set(lists) == {",".join(f'"{state}"' for state in STATES)}
