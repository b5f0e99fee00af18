"""Claim cursors in virtual time: where the next claim begins, and how long a job may be passed over."""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from typing import Any

import pytest

from holdfast.stores.postgres.cursors import (
    END,
    INTERVAL,
    LONGEST,
    START,
    Cursors,
    QueuePosition,
    ScanResult,
    split_scan,
)

CHEAP, DEAR = 0.001, 0.1  # seconds
MANY = 500


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cursors(clock: Clock) -> Cursors:
    return Cursors(clock)


def at(seq: int, rank: int = 0) -> QueuePosition:
    return QueuePosition(rank, 0, seq)


def claimed(
    cursors: Cursors,
    clock: Clock,
    last: QueuePosition | None,
    *,
    seconds: float = CHEAP,
    number: int = MANY,
    full: bool = True,
) -> QueuePosition:
    """One claim; where it began."""
    begun, began_at = cursors.start_position("q"), clock.now
    clock.now += seconds
    cursors.note_scan("q", ScanResult(begun, last, number, full, began_at, seconds))
    return begun


def test_large_full_claim_is_followed_by_one_from_its_end(cursors: Cursors, clock: Clock) -> None:
    assert claimed(cursors, clock, at(500)) == START
    assert claimed(cursors, clock, at(1000)) == at(500)
    assert cursors.start_position("q") == at(1000)
    assert cursors.start_position("another") == START


def test_scan_from_the_start_repeats_after_an_interval(cursors: Cursors, clock: Clock) -> None:
    began = clock.now
    claimed(cursors, clock, at(500))
    clock.now = began + INTERVAL - 0.002
    assert claimed(cursors, clock, at(1000)) == at(500)  # and this one does not put it off
    clock.now = began + INTERVAL
    assert cursors.start_position("q") == START


@pytest.mark.parametrize(("seconds", "pause"), [(DEAR, 10 * DEAR), (60.0, LONGEST)])
def test_expensive_looks_are_spaced_but_never_beyond_the_bound(
    cursors: Cursors, clock: Clock, seconds: float, pause: float
) -> None:
    began = clock.now
    claimed(cursors, clock, at(500), seconds=seconds)
    clock.now = began + 0.9 * pause
    assert cursors.start_position("q") == at(500)
    clock.now = began + pause
    assert cursors.start_position("q") == START


@pytest.mark.parametrize("kind", ["few", "none"])
def test_partial_claim_is_followed_by_one_from_the_start(cursors: Cursors, clock: Clock, kind: str) -> None:
    claimed(cursors, clock, at(500))
    claimed(cursors, clock, at(502) if kind == "few" else None, number=2 if kind == "few" else 0, full=False)
    assert cursors.start_position("q") == START


def test_small_claims_start_at_the_front_until_expensive_three_times(cursors: Cursors, clock: Clock) -> None:
    begins = [claimed(cursors, clock, at(n), seconds=DEAR, number=1, full=False) for n in range(5)]
    assert begins == [START, START, START, at(2), at(3)]
    clock.now += LONGEST
    assert claimed(cursors, clock, at(5), number=1) == START  # which turns out cheap
    assert cursors.start_position("q") == START


def test_a_single_slow_look_makes_nothing_expensive(cursors: Cursors, clock: Clock) -> None:
    costs = [CHEAP, DEAR, CHEAP, DEAR, DEAR, CHEAP]
    assert {claimed(cursors, clock, at(n), seconds=cost, number=1) for n, cost in enumerate(costs)} == {START}


def test_job_made_ready_in_front_is_found_at_once(cursors: Cursors, clock: Clock) -> None:
    claimed(cursors, clock, at(500))
    cursors.note_own_ready_jobs("q", END._replace(rank=0))  # behind all of its priority
    cursors.note_own_ready_jobs("q", END)
    cursors.note_own_ready_jobs("another", START)
    assert cursors.start_position("q") == at(500)
    cursors.note_own_ready_jobs("q", END._replace(rank=-1))
    assert cursors.start_position("q") == START


def test_expensive_scans_are_limited_to_a_tenth_of_time(cursors: Cursors, clock: Clock) -> None:
    for _ in range(3):
        began = clock.now
        claimed(cursors, clock, at(500), seconds=DEAR)
        cursors.note_own_ready_jobs("q", START)
        cursors.note_ready_jobs_elsewhere("q")
        clock.now = began + 5 * DEAR
        assert cursors.start_position("q") == (
            START if _ < 2 else at(500)
        )  # the third time in a row it counts as expensive
        clock.now = began + 10 * DEAR
        assert cursors.start_position("q") == START


@pytest.mark.parametrize("queue", ["q", None])
def test_news_of_others_hastens_the_next_look(cursors: Cursors, clock: Clock, queue: str | None) -> None:
    began = clock.now
    claimed(cursors, clock, at(500), number=10_000)  # at no cost beyond taking them
    cursors.note_ready_jobs_elsewhere("another")
    assert cursors.start_position("q") == at(500)
    cursors.note_ready_jobs_elsewhere(queue)
    assert (cursors.start_position("q"), clock.now < began + INTERVAL) == (START, True)


def test_news_during_claims_is_not_forgotten_when_they_end(cursors: Cursors, clock: Clock) -> None:
    """Each claim that was under way at a notification would otherwise put the scan from the start off, for ever."""
    claimed(cursors, clock, at(500))
    under_way = ScanResult(cursors.start_position("q"), at(1000), MANY, True, clock.now, CHEAP)
    cursors.note_own_ready_jobs("q", START)
    cursors.note_scan("q", under_way)
    assert cursors.start_position("q") == START


def test_claim_overtaking_a_front_scan_does_not_move_it(cursors: Cursors, clock: Clock) -> None:
    """What stands between the two was seen before that look, and the bound counts from then."""
    claimed(cursors, clock, at(500))
    overtaking = ScanResult(cursors.start_position("q"), at(1000), MANY, True, clock.now, CHEAP)
    clock.now += INTERVAL
    assert claimed(cursors, clock, at(100)) == START
    cursors.note_scan("q", overtaking)
    assert cursors.start_position("q") == at(100)


def test_of_ten_thousand_queues_no_more_is_remembered(cursors: Cursors, clock: Clock) -> None:
    for n in range(10_001):
        cursors.note_scan(f"q{n}", ScanResult(START, at(1), MANY, True, clock.now, CHEAP))
    assert [cursors.start_position(f"q{n}") for n in (0, 9_999, 10_000)] == [START, START, at(1)]


# ── several queues in one claim ───────────────────────────────────────────────────────────────────────────────────
def row(queue: str, seq: int, *, lost_leases: int = 0, priority: int = 0) -> list[Any]:
    return [None, None, queue, None, None, None, None, priority, lost_leases, 0, None, None, seq]


def seen(rows: list[list[Any]], free_slots: int, **slots: int) -> dict[str, tuple[QueuePosition | None, int, bool]]:
    found = split_scan(list(slots), list(slots.values()), [START] * len(slots), rows, free_slots, 0.0, 0.0)
    return {queue: (look.last, look.number, look.full) for queue, look in found}


def test_a_queue_whose_turn_did_not_come_was_not_seen() -> None:
    rows = [row("a", 1), row("a", 2), row("b", 3)]
    assert seen(rows, 3, a=2, b=2, c=2) == {"a": (at(2), 2, True), "b": (at(3), 1, True)}
    assert seen(rows, 9, a=2, b=2, c=2) == {"a": (at(2), 2, True), "b": (at(3), 1, False), "c": (None, 0, False)}


def test_an_empty_queue_before_the_last_one_was_seen() -> None:
    assert seen([row("b", 1)], 1, a=1, b=5, c=1) == {"a": (None, 0, False), "b": (at(1), 1, True)}


def test_suspects_count_but_are_no_place() -> None:
    rows = [row("a", 9, lost_leases=1), row("a", 1, priority=4)]
    assert seen(rows, 9, a=2) == {"a": (at(1, rank=-4), 2, True)}
    assert seen([row("a", 9, lost_leases=1)], 1, a=2, b=1) == {}


# ── the bound ─────────────────────────────────────────────────────────────────────────────────────────────────────
class World:
    """A queue with a backlog, and two workers with two claims each under way at a time. Jobs come in at any place."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.workers = [Cursors(self.clock), Cursors(self.clock)]
        self.cost = self.rng.choice([0.0, 0.003, 0.05, 0.5, 5.0])
        self.sizes = self.rng.choice([(500,), (5, 100, 500), (5,)])
        self.ready = [at(n) for n in range(1_000_000, 1_100_000)]
        self.since = dict.fromkeys(self.ready, self.clock.now)
        self.passed_over = 0.0
        self.serial = 0

    def arrive(self) -> None:
        for _ in range(self.rng.choice([1, 20])):
            self.serial += 1
            place = QueuePosition(self.rng.choice([-5, 0, 0]), self.rng.randrange(self.serial), self.serial)
            insort(self.ready, place)
            self.since[place] = self.clock.now
        if self.rng.random() < 0.3:
            self.rng.choice(self.workers).note_own_ready_jobs("q", self.rng.choice([START, END, at(0, rank=-5)]))
        if self.rng.random() < 0.3:
            self.rng.choice(self.workers).note_ready_jobs_elsewhere("q")

    def claim(self, cursors: Cursors) -> tuple[Cursors, ScanResult]:
        wanted = self.rng.choice(self.sizes)
        begun = cursors.start_position("q")
        first = bisect_right(self.ready, begun)
        waits = [self.clock.now - self.since[place] for place in self.ready[:first]]
        self.passed_over = max([self.passed_over, *waits])
        taken = self.ready[first : first + wanted]
        del self.ready[first : first + wanted]
        seconds = (self.cost if begun == START else 0.0) + self.rng.random() * 0.01
        last = taken[-1] if taken else None
        return cursors, ScanResult(begun, last, len(taken), len(taken) == wanted, self.clock.now, seconds)

    def run(self, turns: int) -> None:
        under_way: list[tuple[Cursors, ScanResult]] = []
        for _ in range(turns):
            if self.rng.random() < 0.3:
                self.arrive()
            under_way.append(self.claim(self.rng.choice(self.workers)))
            if len(under_way) > 3:
                cursors, scan = under_way.pop(self.rng.randrange(len(under_way)))
                self.clock.now = max(self.clock.now, scan.at + scan.seconds)
                cursors.note_scan("q", scan)


@pytest.mark.parametrize("seed", range(30))
def test_no_job_is_passed_over_for_longer_than_the_bound(seed: int) -> None:
    world = World(seed)
    world.run(1000)
    assert world.passed_over <= LONGEST
