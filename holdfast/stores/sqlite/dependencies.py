"""Dependencies between jobs on SQLite, as statement flows: for connections of ours and of callers."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.core.batches import check_batches, named_batches
from holdfast.core.dependencies import NEVER_US, Condition, describe_failed_dependency, missing_dependency
from holdfast.core.models import TERMINAL, JobState, NewJob, Reason
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.sqlite.encoding import as_json

T = TypeVar("T")

_OPEN, _MET, _FAILED = range(3)
_FAILING = "failing"  # of a batch that has not ended, and whose first member has failed


class Resolution(msgspec.Struct):
    """Effects of ended jobs: queues with jobs that are due now; jobs that were cancelled, and batches that ended."""

    queues: set[str] = msgspec.field(default_factory=set)
    ended: list[str] = msgspec.field(default_factory=list)

    def add(self, other: Resolution) -> None:
        """Adds further effects."""
        self.queues |= other.queues
        self.ended += other.ended


def resolve_dependencies(
    statements: Mapping[str, str], ended: Iterable[tuple[str, str]], now_us: int
) -> StatementFlow[Resolution]:
    """Resolves dependencies on jobs that ended, given as (id, how it ended), and on those that this ends."""
    resolution = Resolution()
    level = list(ended)
    while level:
        rows = yield Statement(statements["resolve_dependencies"], (as_json(level),))
        how = dict(level)
        met = Counter(waiter for waiter, state, _ in rows if state == _MET)
        failed = Counter(waiter for waiter, state, _ in rows if state != _MET)
        errors = {
            waiter: describe_failed_dependency(other, how[other]) for waiter, state, other in rows if state != _MET
        }
        level = []
        if rows:
            level = yield from _count_members(statements, met, failed, resolution, now_us)
        if met:
            resolution.queues |= yield from decrement_waits(statements, met, now_us)
        if failed:
            cancelled = yield Statement(statements["cancel_waiters"], (as_json(errors.items()), now_us))
            resolution.ended += [job_id for job_id, _ in cancelled]
            level += [(job_id, JobState.CANCELLED) for job_id, has_dependents in cancelled if has_dependents]
    return resolution


def _count_members(
    statements: Mapping[str, str], met: Mapping[int, int], failed: Mapping[int, int], effects: Resolution, now_us: int
) -> StatementFlow[list[tuple[str, str]]]:
    """Counts ends in the batches among the jobs that wait. Returns those that have ended, or will not succeed now."""
    counts = as_json((waiter, met.get(waiter, 0), failed.get(waiter, 0)) for waiter in {*met, *failed})
    rows = yield Statement(statements["count_members"], (counts, now_us))
    level: list[tuple[str, str]] = []
    for seq, job_id, has_dependents, code, failures in rows:
        state = STATES[code]
        if state in (JobState.SUCCEEDED, JobState.DEAD):
            effects.ended.append(job_id)
            level += [(job_id, str(state))] if has_dependents else []
        elif state is JobState.WAITING and 0 < failures == failed.get(seq, 0):
            level += [(job_id, _FAILING)] if has_dependents else []
    return level


def decrement_waits(statements: Mapping[str, str], met: Mapping[int, int], now_us: int) -> StatementFlow[set[str]]:
    """Jobs (rows) wait for so many things less. Returns the queues of those that are due now."""
    rows = yield Statement(statements["decrement_waits"], (as_json(met.items()), now_us))
    return {queue for queue, state in rows if STATES[state] is JobState.SCHEDULED}


def check_dependencies(statements: Mapping[str, str], jobs: Sequence[NewJob]) -> StatementFlow[None]:
    """Raises Invalid if a job waits for one that is neither stored nor earlier among ``jobs``. Writes nothing."""
    earlier: set[str] = set()
    outside: list[tuple[NewJob, str]] = []
    for job in jobs:
        outside += [(job, each.job_id) for each in job.after if each.job_id not in earlier]
        earlier.add(job.id)
    if not outside:
        return
    rows = yield Statement(statements["states_by_id"], (as_json({job_id for _, job_id in outside}),))
    stored = {job_id for job_id, _ in rows}
    for job, job_id in outside:
        if job_id not in stored and not (yield from _is_known(statements, job)):
            raise missing_dependency(job_id)


def check_members(statements: Mapping[str, str], jobs: Sequence[NewJob]) -> StatementFlow[None]:
    """Raises Invalid or Conflict if a job cannot be a member of its batch. Writes nothing."""
    pairs = named_batches(jobs)
    if not pairs:
        return
    rows = yield Statement(statements["batch_states"], (as_json({batch_id for batch_id, _ in pairs}),))
    states = {batch_id: None if code is None else STATES[code] for batch_id, code in rows}
    has_ended = not TERMINAL.isdisjoint(states.values())
    members = (yield Statement(statements["known_members"], (as_json(pairs),))) if has_ended else []
    check_batches(jobs, states, {(batch_id, job_id) for batch_id, job_id in members})


def _is_known(statements: Mapping[str, str], job: NewJob) -> StatementFlow[bool]:
    """Returns True if the id or key of a job stands for one already: then its submission changes nothing."""
    known = yield Statement(statements["is_stored"], (job.id,))
    if not known and job.key is not None:
        known = yield Statement(statements["key_holder"], (job.key,))
    return bool(known)


def add_dependencies(
    statements: Mapping[str, str], job: NewJob, answered: Mapping[str, str], now_us: int
) -> StatementFlow[None]:
    """Makes a job that was just inserted wait. ``answered``: jobs that stand for those earlier in the submission."""
    conditions: dict[str, str] = {}
    for each in job.after:
        conditions.setdefault(answered.get(each.job_id, each.job_id), each.on)
    rows = yield Statement(statements["mark_depended_on"], (as_json(conditions),))
    states = {job_id: STATES[code] for job_id, code, _ in rows}
    failing = {job_id for job_id, _, is_failing in rows if is_failing}
    edge_states = {job_id: _edge_state(on, states.get(job_id), job_id in failing) for job_id, on in conditions.items()}
    edges = as_json((job_id, on, edge_states[job_id]) for job_id, on in conditions.items())
    yield Statement(statements["add_dependencies"], (job.id, edges, 0))
    waits = sum(state != _MET for state in edge_states.values())
    failed = next((job_id for job_id, state in edge_states.items() if state == _FAILED), None)
    if failed is not None:
        error = describe_failed_dependency(failed, states[failed])
        row: tuple[object, ...] = (job.id, CODES[JobState.CANCELLED], NEVER_US, waits, Reason.DEPENDENCY, error, now_us)
    elif waits:
        row = (job.id, CODES[JobState.WAITING], NEVER_US, waits, Reason.DEPENDENCY, None, None)
    else:
        row = (job.id, CODES[JobState.SCHEDULED], now_us, 0, None, None, None)
    yield Statement(statements["set_waiting"], row)


def _edge_state(on: str, state: JobState | None, is_failing: bool = False) -> int:
    """State of a dependency on a job in a state; None: the job was deleted, and its key is still there.

    ``is_failing``: it is a batch of which a member has failed.
    """
    if state is None:
        return _MET
    if state not in TERMINAL:
        return _MET if is_failing and on == Condition.FAILURE else _OPEN
    if on == Condition.END:
        return _MET
    return _MET if (on == Condition.SUCCESS) == (state is JobState.SUCCEEDED) else _FAILED


def add_members(
    statements: Mapping[str, str], batch_id: str, members: Sequence[str], now_us: int
) -> StatementFlow[Resolution]:
    """Makes jobs members of a batch, unless they are already."""
    added = {job_id for (job_id,) in (yield Statement(statements["add_members"], (batch_id, as_json(members))))}
    if not added:
        return Resolution()
    yield Statement(statements["add_member_count"], (batch_id, len(added)))
    rows = yield Statement(statements["mark_depended_on"], (as_json(added),))
    # A job that was deleted, and whose key is still there, counts as one that has succeeded.
    states = dict.fromkeys(added, JobState.SUCCEEDED) | {job_id: STATES[code] for job_id, code, _ in rows}
    ended = [(job_id, state) for job_id, state in states.items() if state in TERMINAL]
    return (yield from resolve_dependencies(statements, ended, now_us))


def wait_for_children(
    statements: Mapping[str, str], parent: tuple[int, str], children: Mapping[str, str]
) -> StatementFlow[dict[str, JobState]]:
    """Makes a job (its row and id) wait for the ends of its children; returns the states of those that are there.

    ``children``: their own ids, and the jobs that stand for them. A child may have the key of the job itself.
    """
    seq, job_id = parent
    rows = yield Statement(statements["mark_depended_on"], (as_json(children.values()),))
    states = {child: STATES[code] for child, code, _ in rows}
    others = {child: state for child, state in states.items() if child != job_id}
    edges = [(child, Condition.END, _edge_state(Condition.END, state)) for child, state in others.items()]
    answered = [(own, Condition.END, _MET, job) for own, job in children.items() if job in others and own not in others]
    yield Statement(statements["mark_earlier_children_met"], (seq,))
    yield Statement(statements["add_dependencies"], (job_id, as_json([*edges, *answered]), 1))
    yield Statement(statements["detach_receiver"], (seq,))
    yield Statement(statements["set_waits"], (seq, sum(state not in TERMINAL for state in others.values())))
    return states


def renew_dependencies(
    statements: Mapping[str, str], waiters: Sequence[int], replayed: Sequence[str]
) -> StatementFlow[set[str]]:
    """After a replay: of ``waiters``, jobs by their rows, and on ``replayed``. Returns the jobs that wait again."""
    again: set[str] = set()
    restored = yield from _reopen_dependencies(statements, replayed)
    if waiters:
        yield Statement(statements["renew_dependencies"], (as_json(waiters),))
        rows = yield Statement(statements["wait_again"], (as_json(waiters),))
        again = {job_id for job_id, state in rows if STATES[state] is JobState.WAITING}
        yield from _reopen_dependencies(statements, [*replayed, *restored])
    return again


def _reopen_dependencies(statements: Mapping[str, str], replayed: Sequence[str]) -> StatementFlow[list[str]]:
    """Opens the dependencies on replayed jobs; returns cancelled jobs that wait again, and for which others wait."""
    found: list[str] = []
    level = list(replayed)
    while level:
        rows = yield Statement(statements["reopen_dependencies"], (as_json(level),))
        seqs = as_json({waiter for (waiter,) in rows})
        yield Statement(statements["reopen_waiters"], (seqs,))
        restored = yield Statement(statements["restore_waiters"], (seqs,))
        level = [job_id for job_id, has_dependents in restored if has_dependents]
        found += level
    return found


def run_flow(connection: sqlite3.Connection, flow: StatementFlow[T]) -> T:
    """Runs a statement flow on a connection of ours."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(connection.execute(statement.sql, statement.parameters).fetchall())
    except StopIteration as stop:
        answer: T = stop.value
        return answer
