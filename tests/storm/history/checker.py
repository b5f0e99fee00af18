"""Judges a history: every job against the table of transitions and the promises of ``docs/guarantees.md``. Pure.

Only what is sure counts: of two calls one comes first if it was answered before the other was asked; an unknown
outcome excuses whatever it may have caused. Leases are compared by the store's clock, of which each call gives bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple

from holdfast.core.lifecycle import TRANSITIONS
from holdfast.core.models import TERMINAL, JobState
from tests.storm.history.records import FAR, Event, describe_history, group_by_job

SLACK_US = 5_000
"""By which the clocks of a server and its host may differ: servers cache theirs for milliseconds."""


class Violation(NamedTuple):
    """A broken promise: the rule, the job, and the events that break it."""

    rule: str
    job: str
    problem: str


@dataclass(frozen=True)
class Terms:
    """Terms of a history. ``kept_us``: time for which ended jobs are kept.

    ``order_us``: None where jobs come in the order of their arrival in a transport; else the time after which a ready
    job is no longer passed over. ``passes_locked``: a claim passes over jobs that others look at. ``repeats_lost``: of
    several sweeps that settle one lost lease alike, more than one may be answered as accepted where one was cut off.
    """

    kept_us: int = 2_000_000
    order_us: int | None = 0
    passes_locked: bool = False
    repeats_lost: bool = False


class JobLease:
    """A lease whose claim was answered, and every call about it."""

    def __init__(self, claim: Event, events: Sequence[Event]) -> None:
        assert claim.got is not None
        self.claim = claim
        self.claims: int = claim.got["claims"]
        self.first_end_us: int = claim.got["lease_until_us"]  # of the earliest lease of the claim
        self.last_end_us: int = claim.until_us + claim.got["lease_for"]
        own = [event for event in events if event.given.get("claims") == self.claims]
        self.settlements = [event for event in own if event.verb == "settle"]
        self.heartbeats = [event for event in own if event.verb == "heartbeat"]

    def lasts_until(self, asked: int) -> int:
        """Returns the store's instant until which it lasts at least, by answers that came before ``asked``."""
        extended: list[int] = [
            beat.since_us + beat.given["lease_for"]
            for beat in self.heartbeats
            if beat.is_accepted and beat.answered < asked
        ]
        return max([self.first_end_us, *extended])

    def ends_by(self, event: Event) -> int:
        """Returns the store's instant at which it has ended at the latest, without what ``event`` itself does."""
        others = [beat for beat in self.heartbeats if beat is not event and (beat.got is None or beat.is_accepted)]
        ends = [FAR if beat.got is None else beat.until_us + beat.given["lease_for"] for beat in others]
        return max([self.last_end_us, *ends])

    def may_be_settled(self, before: int, *, without: Event | None = None) -> bool:
        """Returns True if a settlement may have ended it before this instant."""
        return any(each is not without and each.may_have_effect and each.asked < before for each in self.settlements)


@dataclass
class History:
    """The history of one job."""

    job: str
    events: Sequence[Event]
    prunes: Sequence[Event] = ()
    terms: Terms = field(default_factory=Terms)

    def of(self, *verbs: str) -> list[Event]:
        """Returns the calls of these verbs."""
        return [event for event in self.events if event.verb in verbs]

    @cached_property
    def submissions(self) -> list[Event]:
        return self.of("submit")

    @cached_property
    def claims(self) -> list[Event]:
        return [event for event in self.of("claim") if event.got is not None]

    @cached_property
    def leases(self) -> list[JobLease]:
        return [JobLease(claim, self.events) for claim in self.claims]

    @cached_property
    def facts(self) -> list[tuple[Event, str | None]]:
        """Answers that say in which state the job was; None: it was not there."""
        found: list[tuple[Event, str | None]] = []
        for event in self.events:
            if event.got is None:
                continue
            if event.verb in ("read", "claim") or (event.verb in ("settle", "cancel", "replay") and event.is_accepted):
                found.append((event, event.got["state"]))
        return found

    def may_change(self, verb: str, since: int, until: int) -> bool:
        """Returns True if such a call may have had its effect between these instants."""
        return any(e.may_have_effect and e.asked < until and e.answered > since for e in self.of(verb))

    @cached_property
    def possible_ends(self) -> list[Event]:
        """Calls that may have ended the job. A running job that is asked to stop ends with its lease, or when a store
        gives a claim back whose answer was lost: no call names the job then."""
        return [event for event in self.of("settle", "cancel") if _may_have_ended(event)]


Rule = Callable[[History], Iterator[str]]


def _may_have_ended(event: Event) -> bool:
    state = None if event.got is None else event.got["state"]
    if event.may_have_effect:
        return not (event.is_accepted and event.verb == "settle" and state not in TERMINAL)
    # A sweep whose first answer was lost finds the job in the state that it asked for, and is refused.
    return bool(event.given.get("lost")) and state in TERMINAL and state == event.given["to"]


def present(history: History) -> Iterator[str]:
    """An acknowledged job is there until it is deleted, or has ended and is no longer kept."""
    acknowledged = min((e.answered for e in history.submissions if e.is_accepted), default=FAR)
    ends = [event.since_us + history.terms.kept_us for event in history.possible_ends]
    for event, state in history.facts:
        if state is not None or event.asked < acknowledged:
            continue
        if history.may_change("delete", 0, event.answered):
            continue
        pruned = any(prune.asked < event.answered for prune in history.prunes)
        if not ends:
            yield "it is gone: acknowledged, not deleted, and not ended"
        elif not pruned or min(ends) > event.until_us + SLACK_US:
            yield "it is gone before its retention is over"


def absent_for_good(history: History) -> Iterator[str]:
    """A job that is gone does not come back."""
    gone = min((event.answered for event, state in history.facts if state is None), default=FAR)
    created = any(event.may_have_effect and event.answered > gone for event in history.submissions)
    if not created and any(state is not None and event.asked > gone for event, state in history.facts):
        yield "it was gone, and is there again"


def states(history: History) -> Iterator[str]:
    """Each state can be reached from the one before it, by the table of transitions."""
    facts = sorted(((e, s) for e, s in history.facts if s is not None), key=lambda fact: fact[0].answered)
    timed = [(e, s) for e, s in facts if s in TERMINAL or _begun(history, e) == e.asked]  # others may be long past
    answers = [event.answered for event, _ in timed]
    for event, state in facts:
        earlier = bisect_left(answers, _begun(history, event)) - 1
        if earlier < 0:
            continue
        before, state_before = timed[earlier]
        numbers = _claims_of(before), _claims_of(event)
        may_run = None in numbers or numbers[0] != numbers[1]
        replayed = history.may_change("replay", before.asked, event.answered)
        if state not in _reachable(JobState(state_before), may_run=may_run, replayed=replayed):
            yield f"{state_before} ({before.verb}) became {state} ({event.verb})"


def _claims_of(event: Event) -> int | None:
    assert event.got is not None
    number: int | None = event.got.get("claims", event.given.get("claims"))
    return number


@lru_cache(maxsize=256)
def _reachable(state: JobState, *, may_run: bool, replayed: bool) -> frozenset[JobState]:
    """Returns the states that a job in this state may reach. Only a replay leaves a terminal state."""
    found, border = {state}, [state]
    while border:
        left = border.pop()
        for each in TRANSITIONS[left] if replayed or left not in TERMINAL else ():
            if each not in found and (may_run or each is not JobState.RUNNING):
                found.add(each)
                border.append(each)
    return frozenset(found)


def growing_claims(history: History) -> Iterator[str]:
    """Each claim has a greater number than every one before it, and no read goes back."""
    known = sorted(((e, e.got.get("claims")) for e, _ in history.facts if e.got), key=lambda each: each[0].answered)
    numbered = [(event, number) for event, number in known if number is not None]
    answers = [event.answered for event, _ in numbered]
    greatest = [0]
    for _, number in numbered:
        greatest.append(max(greatest[-1], number))
    for event, number in numbered:
        before = greatest[bisect_left(answers, event.asked)]
        if number < before or (event.verb == "claim" and number == before):
            yield f"claims={number} ({event.verb}) after claims={before}"
    taken = [number for event, number in numbered if event.verb == "claim"]
    if len(taken) != len(set(taken)):
        yield f"two claims have the same number: {sorted(taken)}"


def claim_terms(history: History) -> Iterator[str]:
    """No claim comes before the job is due, or beyond its attempts."""
    for claim in history.claims:
        got = claim.got or {}
        if claim.until_us < got["run_at_us"] - SLACK_US:
            yield f"claim {got['claims']} came before the job was due"
        if got["max_attempts"] is not None and got["attempts"] > got["max_attempts"]:
            yield f"claim {got['claims']} is attempt {got['attempts']} of {got['max_attempts']}"


def one_lease(history: History) -> Iterator[str]:
    """No claim takes a job whose lease lasts, by the store's clock."""
    for lease in history.leases:
        for other in history.leases:
            if other.claims <= lease.claims or lease.may_be_settled(other.claim.answered):
                continue
            if other.claim.until_us < lease.lasts_until(other.claim.asked) - SLACK_US:
                yield f"claim {other.claims} took the job under the lease of claim {lease.claims}"


def no_effect_after_lease(history: History) -> Iterator[str]:
    """Nothing is accepted under a lease that has ended, and none counts as lost before."""
    leases = {lease.claims: lease for lease in history.leases}
    for event in history.of("settle", "heartbeat", "step"):
        lease = leases.get(event.given["claims"])
        if lease is None or not event.is_accepted:
            continue
        if event.given.get("lost"):
            if event.until_us < lease.lasts_until(event.asked) - SLACK_US:
                yield f"claim {lease.claims} was settled as lost while its lease lasted"
            continue
        tried = _first_try(history, event)
        if tried.since_us > lease.ends_by(tried) + SLACK_US:
            yield f"{event.verb} under claim {lease.claims} was accepted after its lease"
        elif any(other.claims > lease.claims and other.claim.answered < tried.asked for other in history.leases):
            yield f"{event.verb} under claim {lease.claims} was accepted after a later claim"


def _first_try(history: History, event: Event) -> Event:
    """Returns the earliest request for this write if its outcome is unknown: a repeated one is answered as it was."""
    if event.verb == "heartbeat":
        return event
    tries = [each for each in history.of(event.verb) if each.got is None and each.given == event.given]
    return min([*tries, event], key=lambda each: each.asked)


def _begun(history: History, event: Event) -> int:
    """Returns the instant from which on the call may have had its effect."""
    return _first_try(history, event).asked if event.verb == "settle" else event.asked


def lasting_leases(history: History) -> Iterator[str]:
    """While a lease lasts, its worker's calls are accepted, and nothing else changes the job."""
    for lease in history.leases:
        for event in history.events:
            if event.got is None or event.asked < lease.claim.answered:
                continue
            if event.until_us > lease.lasts_until(event.asked) - SLACK_US:
                continue
            if lease.may_be_settled(event.answered, without=event if not event.is_accepted else None):
                continue
            problem = _against(lease, event)
            if problem and _first_try(history, event).asked >= lease.claim.answered:
                yield f"{problem} while the lease of claim {lease.claims} lasted"


def _against(lease: JobLease, event: Event) -> str | None:
    got = event.got or {}
    own = event.given.get("claims") == lease.claims
    match event.verb:
        case "settle" | "heartbeat" | "step" if own and not event.may_have_effect:
            return f"{event.verb} was refused"
        case "settle" | "heartbeat" | "step" if not own and got["accepted"]:
            return f"{event.verb} of claim {event.given['claims']} was accepted"
        case "read" if (got["state"], got.get("claims")) != (JobState.RUNNING, lease.claims):
            return f"the job was {got['state'] or 'gone'} with claims={got.get('claims')}"
        case "replay" | "delete" if got["accepted"]:
            return f"{event.verb} was accepted"
        case "cancel" if got["accepted"] and got["state"] != JobState.RUNNING:
            return f"the job was cancelled as {got['state']}"
    return None


def settled_once(history: History) -> Iterator[str]:
    """Of the settlements under one lease at most one is accepted."""
    accepted: dict[int, set[object]] = defaultdict(set)
    for event in history.of("settle"):
        if event.is_accepted:
            alike = history.terms.repeats_lost and event.given.get("lost")
            accepted[event.given["claims"]].add(event.given["mark"] if alike else event.asked)
    for claims, settlements in accepted.items():
        if len(settlements) > 1:
            yield f"{len(settlements)} settlements of claim {claims} were accepted"


def cancelled_stays(history: History) -> Iterator[str]:
    """A job whose cancellation was acknowledged is not taken again, and no retry follows, unless it is replayed."""
    for cancellation in history.of("cancel"):
        if not cancellation.is_accepted:
            continue
        for event, state in history.facts:
            if _begun(history, event) < cancellation.answered:
                continue
            goes_on = event.verb == "claim" or (event.verb == "settle" and state not in TERMINAL)
            if goes_on and not history.may_change("replay", cancellation.asked, event.answered):
                yield f"it was cancelled, and became {state} ({event.verb})"


def refused_writes(history: History) -> Iterator[str]:
    """A refused write leaves no trace, and an accepted step does. A step that was asked for in time may be written by a
    first try whose answer is lost, and be refused when the lease is over."""
    refused = history.submissions and not any(event.may_have_effect for event in history.submissions)
    if refused and any(state is not None for _, state in history.facts):
        yield "its submission was refused or answered with another job, and it is there"
    for final in history.of("read"):
        marks = (final.got or {}).get("marks")
        if marks is None:
            continue
        for event in history.of("settle", "step"):
            mark = event.given["mark"]
            leases = [lease for lease in history.leases if lease.claims == event.given["claims"]]
            in_time = event.verb == "step" and any(event.since_us < lease.ends_by(event) for lease in leases)
            if not event.may_have_effect and mark in marks and not (event.given.get("lost") or in_time):
                yield f"{event.verb} {mark} was refused and is there"
            if event.verb == "step" and event.is_accepted and mark not in marks:
                yield f"step {mark} was accepted and is not there"


def ended(history: History) -> Iterator[str]:
    """When the workers have had their time, every job has ended."""
    for final in history.of("read"):
        got = final.got or {}
        if got.get("final") and got["state"] is not None and got["state"] not in TERMINAL:
            yield f"it has not ended: it is {got['state']}"


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        present,
        absent_for_good,
        states,
        growing_claims,
        claim_terms,
        one_lease,
        no_effect_after_lease,
        lasting_leases,
        settled_once,
        cancelled_stays,
        refused_writes,
        ended,
    )
}
"""Rules for one job, by name."""


def unique_keys(histories: Mapping[str, History]) -> Iterator[Violation]:
    """A key makes one job while it lives: until the job is deleted, or, for an active job, has ended."""
    jobs: dict[tuple[str, str], dict[str, Event]] = defaultdict(dict)
    for history in histories.values():
        for event in history.submissions:
            for kind in ("key", "unique"):
                if event.given.get(kind) and event.got and "id" in event.got:
                    jobs[kind, event.given[kind]].setdefault(event.got["id"], event)
    for (kind, key), answered in jobs.items():
        for (first, one), (second, other) in combinations(answered.items(), 2):
            pair = [(histories.get(first), other.answered), (histories.get(second), one.answered)]
            if not any(history is None or _may_free(history, kind, until) for history, until in pair):
                yield Violation("unique_keys", second, f"{kind} {key!r} made {first} and {second}")


def _may_free(history: History, kind: str, until: int) -> bool:
    frees = history.of("delete") if kind == "key" else [*history.of("delete"), *history.possible_ends]
    return any(event.may_have_effect and event.asked < until for event in frees)


def in_order(histories: Mapping[str, History], claims: Sequence[Event], terms: Terms) -> Iterator[Violation]:
    """A job is not taken for the first time while one of higher priority, or an earlier one of the same, is ready."""
    if terms.order_us is None:
        return
    gap = terms.order_us * 1000
    first = {
        job: claim for job, each in histories.items() for claim in each.claims if claim.got and claim.got["claims"] == 1
    }
    ready = {job: given for job, claim in first.items() if (given := _steady(histories[job], claim, gap)) is not None}
    by_queue: dict[str, list[str]] = defaultdict(list)
    for job, submission in sorted(ready.items(), key=lambda item: item[1].answered):
        by_queue[submission.given["queue"]].append(job)
    others = sorted((event for event in claims), key=lambda event: event.asked)
    for queue, jobs in by_queue.items():
        for taken in (job for job, claim in first.items() if claim.got and claim.got["queue"] == queue):
            claim = first[taken]
            if terms.passes_locked and _overlapped(claim, others):
                continue
            for passed in jobs:
                if ready[passed].answered + gap > claim.asked:
                    break
                if first[passed].asked > claim.answered and _precedes(ready[passed], histories[taken], gap):
                    problem = f"{taken} was taken before it, by {claim.process} at {claim.asked}"
                    yield Violation("in_order", passed, problem)


def _steady(history: History, claim: Event, gap: int) -> Event | None:
    """Returns the submission of a job that was ready from then to its first claim."""
    submission = next((event for event in history.submissions if event.is_accepted), None)
    if submission is None or submission.given["delay"]:
        return None
    disturbed = any(history.may_change(verb, 0, claim.asked) for verb in ("cancel", "replay"))
    return None if disturbed else submission


def _precedes(submission: Event, taken: History, gap: int) -> bool:
    later = next((event for event in taken.submissions), None)
    if later is None or later.given["delay"]:
        return False
    mine, other = submission.given["priority"], later.given["priority"]
    return mine > other or (mine == other and submission.answered + gap < later.asked)


def _overlapped(claim: Event, claims: Sequence[Event]) -> bool:
    """Returns True if another call may have held rows that this claim passed over."""
    return any(
        other.process != claim.process
        and other.asked < claim.answered
        and min(other.answered, other.asked + 30 * 10**9) > claim.asked
        for other in claims
    )


def check(events: Sequence[Event], terms: Terms) -> list[Violation]:
    """Returns every violation in a history."""
    grouped = group_by_job(events)
    unnamed = grouped.pop("", [])
    prunes = [event for event in unnamed if event.verb == "prune"]
    histories = {job: History(job, each, prunes, terms) for job, each in grouped.items()}
    found = [
        Violation(name, job, problem)
        for job, history in histories.items()
        for name, rule in RULES.items()
        for problem in rule(history)
    ]
    claims = [event for event in events if event.verb == "claim"]
    return [*found, *unique_keys(histories), *in_order(histories, claims, terms)]


def describe(violations: Sequence[Violation], events: Sequence[Event]) -> list[str]:
    """Returns each violation, and the whole history of its job below the first."""
    grouped = group_by_job(events)
    shown: set[str] = set()
    texts = []
    for each in violations:
        text = f"{each.rule}: {each.job}: {each.problem}"
        if each.job not in shown:
            text += "\n" + describe_history(grouped[each.job])
        shown.add(each.job)
        texts.append(text)
    return texts
