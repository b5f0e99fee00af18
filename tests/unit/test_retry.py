"""Retry policies: the formula, its text form, its bounds, and what is refused."""

import random
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Invalid
from holdfast.core.retry import MAX_DELAY, Retry

SECONDS = st.floats(0, MAX_DELAY.total_seconds())
JITTERS = st.one_of(
    st.sampled_from(["none", "full"]),
    st.floats(0, 1000).map(lambda more: f"add:{more!r}"),
    st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted).map(lambda ends: f"scale:{ends[0]!r}:{ends[1]!r}"),
)
PRIORITIES = st.none() | st.integers(-100, 100)
FAILURES = st.one_of(st.integers(1, 50), st.integers(1, 10**6), st.just(10**6), st.just(10**400))


@st.composite
def formulas(draw: st.DrawFn, least_factor: float = 1e-300) -> Retry:
    base = draw(SECONDS)
    return Retry(
        base=base,
        factor=draw(st.floats(least_factor, 1000)),
        offset=draw(st.integers(-100, 100)),
        cap=draw(st.none() | st.floats(base, MAX_DELAY.total_seconds())),
        jitter=draw(JITTERS),
        priority=draw(PRIORITIES),
    )


POLICIES = st.one_of(
    formulas(),
    st.builds(Retry.from_delays, st.lists(SECONDS, min_size=1, max_size=9), jitter=JITTERS, priority=PRIORITIES),
    st.builds(Retry.immediate, priority=PRIORITIES),
)


def seconds(policy: Retry, attempts: int) -> list[float]:
    return [delay.total_seconds() for delay in policy.schedule(attempts)]


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("exponential:base=5,factor=2,offset=0,cap=none,jitter=add:2", [10, 20, 40, 80, 160, 320]),
        ("exponential:base=1,factor=2,offset=0,cap=none,jitter=none", [2, 4, 8, 16, 32, 64]),
        ("exponential:base=1,factor=5,cap=none,jitter=none", [1, 5, 25, 125, 625, 3125]),
        ("exponential:base=5,factor=3,cap=300,jitter=scale:0.7:1", [5, 15, 45, 135, 300, 300]),
        ("immediate", [0, 0, 0, 0, 0, 0]),
        ("exponential", [5, 10, 20, 40, 80, 160]),
    ],
)
def test_parsed_policy_has_its_schedule(text, delays):
    assert seconds(Retry.parse(text), 7) == delays
    assert Retry.parse(str(Retry.parse(text))) == Retry.parse(text)


@pytest.mark.parametrize(
    ("text", "third"),
    [
        ("exponential:base=5,factor=2,offset=0,cap=none,jitter=add:2", (40, 42)),
        ("exponential:base=1,factor=2,offset=0,cap=none,jitter=none", (8, 8)),
        ("exponential:base=1,factor=5,cap=none,jitter=none", (25, 25)),
        ("exponential:base=5,factor=3,cap=300,jitter=scale:0.7:1", (31.5, 45)),
        ("immediate", (0, 0)),
    ],
)
def test_parsed_policy_has_its_jitter(text, third):
    assert tuple(bound.total_seconds() for bound in Retry.parse(text).delay_bounds(3)) == third


def test_default_is_five_seconds_doubling_to_an_hour():
    assert Retry() == Retry.exponential() == Retry.exponential(base=5, factor=2, cap=3600, offset=-1, jitter="full")
    assert seconds(Retry(), 13) == [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]
    assert Retry().delay_bounds(1) == (timedelta(0), timedelta(seconds=5))


def test_a_list_repeats_its_last_delay():
    assert seconds(Retry.from_delays([1, timedelta(seconds=5), 25]), 6) == [1, 5, 25, 25, 25]
    assert seconds(Retry.fixed(10), 4) == [10, 10, 10]
    assert Retry.immediate() == Retry.parse("immediate")


def test_full_jitter_uses_the_whole_range():
    rng, policy = random.Random(1), Retry.exponential(base=100)
    drawn = [policy.delay_after(1, rng).total_seconds() for _ in range(2000)]
    assert min(drawn) < 2
    assert max(drawn) > 98
    assert 47 < sum(drawn) / len(drawn) < 53


def test_added_jitter_is_drawn_from_nothing_to_its_bound():
    rng, policy = random.Random(1), Retry.parse("exponential:offset=0,cap=none,jitter=add:2")
    drawn = [policy.delay_after(1, rng).total_seconds() for _ in range(2000)]
    assert 10 <= min(drawn) < 10.05
    assert 11.95 < max(drawn) <= 12


@given(POLICIES, FAILURES, st.integers())
def test_a_delay_is_within_its_bounds_and_the_ceiling(policy, failures, seed):
    least, most = policy.delay_bounds(failures)
    assert timedelta(0) <= least <= policy.delay_after(failures, random.Random(seed)) <= most <= MAX_DELAY


@given(formulas(least_factor=1.0), st.integers(2, 300))
def test_a_nominal_schedule_with_a_factor_from_one_never_falls(policy, attempts):
    schedule = policy.schedule(attempts)
    assert len(schedule) == attempts - 1
    assert schedule == sorted(schedule)


@given(formulas())
def test_no_delay_is_over_the_cap_before_jitter(policy):
    assert policy.cap is None or all(delay <= timedelta(seconds=policy.cap) for delay in policy.schedule(60))


def test_a_million_failures_neither_overflow_nor_take_long():
    rng = random.Random(1)
    for factor in (1e-300, 0.5, 1.0, 1.000001, 2, 1000):
        policy = Retry(factor=factor, cap=None, jitter="none")
        assert timedelta(0) <= policy.delay_after(10**6, rng) <= MAX_DELAY
    assert Retry(factor=2, cap=None, jitter="none").delay_after(10**6, rng) == MAX_DELAY


@given(POLICIES)
def test_a_policy_survives_being_stored_and_being_written(policy):
    assert Retry.from_builtins(policy.to_builtins()) == policy
    assert Retry.from_builtins(msgspec.json.decode(msgspec.json.encode(policy.to_builtins()))) == policy
    assert Retry.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        (
            "exponential:base=1,factor=3,cap=none,offset=0,jitter=add:2",
            Retry(base=1, factor=3, cap=None, offset=0, jitter="add:2"),
        ),
        ("exponential:cap=1h, base=5m", Retry(base=300, cap=3600)),
        (
            "exponential:base=1,offset=0,cap=none,jitter=none,factor=3",
            Retry(base=1, factor=3, offset=0, cap=None, jitter="none"),
        ),
        ("1,5,25,125", Retry.from_delays([1, 5, 25, 125])),
        ("1, 5m, 2h,jitter=full", Retry.from_delays([1, 300, 7200], jitter="full")),
        ("fixed:10", Retry.fixed(10)),
        ("fixed:10s,jitter=scale:0.5:1.5", Retry.fixed(10, jitter="scale:0.5:1.5")),
        ("0", Retry.fixed(0)),
        ("0,priority=-5", Retry.fixed(0, priority=-5)),
        ("fixed:10,priority=5", Retry.fixed(10, priority=5)),
        ("fixed:10,priority=5,jitter=full", Retry.fixed(10, jitter="full", priority=5)),
        ("1,5,jitter=full,priority=100", Retry.from_delays([1, 5], jitter="full", priority=100)),
        ("immediate:priority=5", Retry.immediate(priority=5)),
        ("exponential:priority=0,base=1", Retry.exponential(1, priority=0)),
    ],
)
def test_text_is_read_as_a_policy(text, policy):
    assert Retry.parse(text) == policy


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("", "retry", "exponential"),
        (":", "retry", "exponential"),
        (None, "retry", "exponential"),
        ("expnential", "retry", "did you mean exponential?"),
        ("exponential:bse=5", "retry", "did you mean base?"),
        ("exponential:base=5,base=6", "retry", "each once"),
        ("exponential:base", "retry", "name=value"),
        ("exponential:base=x", "retry.base", "30s"),
        ("exponential:base=nan", "retry.base", "number"),
        ("exponential:factor=inf", "retry.factor", "number"),
        ("exponential:offset=1.5", "retry.offset", "whole number"),
        ("exponential:jitter=some", "retry.jitter", "scale:LOW:HIGH"),
        ("exponential:jitter=scale:1:0.5", "retry.jitter", "from 1"),
        ("exponential:jitter=add:-1", "retry.jitter", "from 0"),
        ("exponential:jitter=add:x", "retry.jitter", "number"),
        ("fixed:", "retry.delays", "30s"),
        ("fixed:1,2", "retry", "at most 1"),
        ("1,,2", "retry.delays", "30s"),
        ("1,-2", "retry.delays", "from 0"),
        ("1,priority=101", "retry.priority", "-100 to 100"),
        ("1,priority=5,priority=6", "retry", "each once, of jitter, priority"),
        ("fixed:10,priority=high", "retry.priority", "whole number"),
        ("immediate:base=1", "retry", "each once, of priority"),
    ],
)
def test_text_that_is_no_policy_is_refused_with_a_remedy(text, field, hint):
    with pytest.raises(Invalid) as refused:
        Retry.parse(text)
    assert refused.value.field == field
    assert hint in str(refused.value)


@pytest.mark.parametrize("base", [0, 0.0, 1e-300, 3600])
def test_base_from_nothing_is_taken(base):
    assert Retry.exponential(base=base).delay_bounds(10**6)[1] <= timedelta(hours=1)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"base": -1}, "base"),
        ({"base": True}, "base"),
        ({"base": "5"}, "base"),
        ({"base": float("nan")}, "base"),
        ({"base": 1e18}, "base"),
        ({"factor": 0}, "factor"),
        ({"factor": -2}, "factor"),
        ({"factor": 1e308}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 10**400}, "factor"),
        ({"base": 10, "cap": 9}, "cap"),
        ({"cap": -1}, "cap"),
        ({"cap": float("inf")}, "cap"),
        ({"offset": 0.5}, "offset"),
        ({"offset": 101}, "offset"),
        ({"priority": 101}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"jitter": None}, "jitter"),
        ({"jitter": "full:1"}, "jitter"),
        ({"jitter": "scale:nan:1"}, "jitter"),
        ({"delays": [1]}, "delays"),
        ({"delays": (1, "x")}, "delays"),
        ({"delays": (1,) * 101}, "delays"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(arguments, field):
    with pytest.raises(Invalid) as refused:
        Retry(**arguments)
    assert refused.value.field == f"retry.{field}"
    if field != "delays":
        with pytest.raises(Invalid):
            Retry.exponential(**arguments)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        "full",
        {"unknown": 1},
        {"base": "5"},
        {"base": True},
        {"offset": 1.5},
        {"jitter": 5},
        {"factor": 0},
        {"delays": [-1]},
        {"priority": "5"},
        {"priority": -101},
    ],
)
def test_a_stored_policy_is_read_strictly(stored):
    with pytest.raises(Invalid, match="retry"):
        Retry.from_builtins(stored)


@pytest.mark.parametrize("delays", [[], [-1], ["1"], [float("nan")], [1e9]])
def test_a_list_of_delays_is_checked(delays):
    with pytest.raises(Invalid, match=r"retry\.delays"):
        Retry.from_delays(delays)


@pytest.mark.parametrize("attempts", [0, -1, True, 1.5, 10_001])
def test_a_schedule_is_for_a_sensible_number_of_attempts(attempts):
    with pytest.raises(Invalid, match="attempts"):
        Retry().schedule(attempts)


def test_stored_policy_without_a_priority_is_that_of_earlier_versions():
    assert "priority" not in Retry().to_builtins()
    assert Retry(priority=0).to_builtins()["priority"] == 0


def test_delays_are_accepted_as_text():
    assert Retry.fixed("5m") == Retry.fixed(300)
    assert Retry.from_delays(["1s", 5, "2h"]).delays == (1, 5, 7200)
    assert Retry.exponential("2s", cap="1h") == Retry.exponential(2, cap=3600)
