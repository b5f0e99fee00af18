"""From the handlers' ledger, the rows of the store and what the test did to whom, to a list of complaints. Pure.

Every promise here is DESIGN section 3's; the figures the product keeps of itself are never asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.crash.ledger import Execution, by_job

TERMINAL = frozenset({"succeeded", "dead", "cancelled"})
ALIVE_UNTIL_THE_END = float("inf")


@dataclass(frozen=True)
class Row:
    """A job as the store has it at the end."""

    id: str
    state: str
    claims: int
    attempts: int
    reason: str | None
    finished_by: int | None
    """Of a job that succeeded: the claim whose execution wrote the result that stands."""
    error: str | None = None


@dataclass(frozen=True)
class Frozen:
    """A process that was stopped, and woken or killed later."""

    pid: int
    since: float
    until: float


@dataclass(frozen=True)
class Facts:
    """All there is to judge by."""

    acknowledged: Sequence[str]
    rows: Mapping[str, Row]
    runs: Sequence[Execution]
    accepted: Sequence[str] = ()
    """Job ids in the order their success was accepted, as workers reported it; one that is in twice finished twice."""
    killed: Mapping[int, float] = field(default_factory=dict)
    """When each killed process died, by pid."""
    frozen: Sequence[Frozen] = ()
    unstarted: Counter[str] = field(default_factory=Counter)
    """Claims per job that had not started when their process was killed or frozen."""
    replayed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """When a replay was answered, by job: each time its count of attempts began again."""


Check = Callable[[Facts], Iterable[str]]


def nothing_lost(facts: Facts) -> Iterable[str]:
    """Every acknowledged job exists and has reached its end."""
    for job in facts.acknowledged:
        row = facts.rows.get(job)
        if row is None:
            yield f"{job} was acknowledged and does not exist"
        elif row.state not in TERMINAL:
            yield f"{job} has not ended: {row.state} after {row.attempts} attempts"


def counts_sum(facts: Facts) -> Iterable[str]:
    """Every job was submitted, nothing is acknowledged twice."""
    twice = [job for job, count in Counter(facts.acknowledged).items() if count > 1]
    yield from (f"{job} was acknowledged for two submissions" for job in twice)
    unknown_jobs = set(facts.rows) - set(facts.acknowledged)
    yield from (f"{job} was never acknowledged, yet it exists" for job in sorted(unknown_jobs))


def finished_once(facts: Facts) -> Iterable[str]:
    """At most one success of a job is accepted, and one more after each replay."""
    for job, count in Counter(facts.accepted).items():
        replays = len(facts.replayed.get(job, ()))
        if count > 1 + replays:
            yield f"{job} finished {count} times and was replayed {replays} times"


def no_late_write(facts: Facts) -> Iterable[str]:
    """The result that stands is the last claim's, and that claim ran to its end."""
    ended = {(run.job, run.claims) for run in facts.runs if run.ended is not None and not run.cancelled}
    for row in facts.rows.values():
        if row.state != "succeeded":
            continue
        if row.finished_by != row.claims:
            yield f"{row.id} keeps the result of claim {row.finished_by}, but claim {row.claims} was its last"
        elif (row.id, row.claims) not in ended:
            yield f"{row.id} succeeded under claim {row.claims}, which no handler finished"


def fenced(facts: Facts) -> Iterable[str]:
    """Every claim is executed at most once, and no execution happens without one."""
    for (job, claims), count in Counter((run.job, run.claims) for run in facts.runs).items():
        if count > 1:
            yield f"{job} was executed {count} times under claim {claims}"
        if job not in facts.rows or claims > facts.rows[job].claims:
            yield f"{job} was executed under claim {claims}, which the store does not know"


def attempts_counted(facts: Facts) -> Iterable[str]:
    """Attempts never fall short of the executions that count (those not given back by a release) since a replay."""
    runs = by_job(facts.runs)
    for row in facts.rows.values():
        since = max(facts.replayed.get(row.id, ()), default=0.0)
        counting = [run for run in runs.get(row.id, ()) if not run.cancelled and run.started > since]
        if row.attempts < len(counting):
            yield f"{row.id} has {row.attempts} attempts and was executed {len(counting)} times"


def excess_explained(facts: Facts) -> Iterable[str]:
    """Attempts exceed executions only by the leases a killed or frozen process held unstarted."""
    # A process that wakes, or is served, too late for its lease cancels the handler: an attempt like any other.
    executed = Counter(run.job for run in facts.runs if not run.cancelled or run.lost or _froze(run, facts))
    for row in facts.rows.values():
        excess = row.attempts - executed[row.id]
        if excess > facts.unstarted[row.id]:
            yield (
                f"{row.id} has {row.attempts} attempts, was executed {executed[row.id]} times "
                f"and was held unstarted at {facts.unstarted[row.id]} kills and freezes"
            )


def no_overlap(facts: Facts) -> Iterable[str]:
    """Two executions of one job overlap only where the earlier one's process was frozen."""
    for job, runs in by_job(facts.runs).items():
        for earlier, later in pairwise(runs):
            if later.started < _end(earlier, facts) and not _froze(earlier, facts):
                yield (
                    f"{job}: claim {later.claims} (process {later.pid}) started while claim {earlier.claims} "
                    f"(process {earlier.pid}) was running"
                )


def _end(run: Execution, facts: Facts) -> float:
    return facts.killed.get(run.pid, ALIVE_UNTIL_THE_END) if run.ended is None else run.ended


def _froze(run: Execution, facts: Facts) -> bool:
    return any(each.pid == run.pid and each.until >= run.started for each in facts.frozen)


ALWAYS: Sequence[Check] = (nothing_lost, counts_sum, finished_once, no_late_write, fenced, attempts_counted, no_overlap)
"""What holds whatever was done to the workers."""

SINCE_A_LOSS: Sequence[Check] = (nothing_lost, counts_sum, no_late_write)
"""What still holds where a server may have forgotten a claim or a settlement: then its job is executed once more, under
the same number."""


def complaints(facts: Facts, checks: Sequence[Check] = ALWAYS) -> list[str]:
    """Everything that is wrong; empty: the promises were kept."""
    return [complaint for check in checks for complaint in check(facts)]
