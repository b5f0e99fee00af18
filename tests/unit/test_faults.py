"""Faults as they are written down, and as they are drawn."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.faults import NUMBER, Fault, FaultKind, FaultPlan, InjectedError, parse_fault, parse_faults
from holdfast.core.models import Job, Options
from holdfast.testing.scenario import load_scenario, parse_scenario, scenario_names


def job(number: int = 0, *, attempts: int = 1, task: str = "send", queue: str = "default") -> Job:
    options = Options(metadata={NUMBER: number})
    return Job(
        id=f"job-{number}",
        task=task,
        queue=queue,
        payload="{}",
        claims=attempts,
        attempts=attempts,
        max_attempts=5,
        priority=0,
        lost_leases=0,
        run_at_us=0,
        created_at_us=0,
        options=options,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "kind: None is not valid; give one of latency, error"),
        ({"kind": "eror"}, "kind: 'eror' is not valid"),
        ({"kind": "error", "taks": "x"}, "fault: 'taks'"),
        ({"kind": "error", "task": "a b"}, "task: 'a b'"),
        ({"kind": "error", "queue": "A"}, "queue: 'A'"),
        ({"kind": "error", "step": "a#b"}, "step: 'a#b'"),
        ({"kind": "error", "probability": 0}, "probability: 0 is not valid; give a number above 0, up to 1"),
        ({"kind": "error", "probability": float("nan")}, "probability: nan"),
        ({"kind": "error", "probability": True}, "probability: True"),
        ({"kind": "error", "attempts": 0}, "attempts: 0"),
        ({"kind": "error", "seconds": 1}, "seconds: 1 is not valid; leave it out: error takes no time"),
        ({"kind": "latency"}, "seconds: None is not valid; say how long a latency takes"),
        ({"kind": "freeze", "seconds": 100_000}, "seconds: 100000 is not valid; give more than 0 seconds"),
        ({"kind": "error", "when": "late"}, "when: 'late' is not valid; give before or after"),
        ({"kind": "latency", "seconds": 1, "when": "after"}, "when: 'after' is not valid; leave it out"),
        ({"kind": "lost_ack", "task": "send"}, "task: 'send' is not valid; leave it out: lost_ack is a fault of the"),
    ],
)
def test_fault_that_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_fault(given)
    assert message in str(refusal.value)


def test_faults_of_a_plan_are_numbered_in_messages() -> None:
    with pytest.raises(Invalid, match="fault 2: kind"):
        parse_faults([{"kind": "error"}, {"kind": "x"}])
    for faults in ([], [{"kind": "error"}] * 51):
        with pytest.raises(Invalid, match="give 1 to 50"):
            parse_faults(faults)


def test_draws_depend_on_seed_job_and_attempt_alone() -> None:
    plan = FaultPlan((Fault(FaultKind.ERROR, probability=0.3),), seed=7, until_us=0)
    drawn = [bool(plan.draw_faults(job(number))) for number in range(2000)]
    assert drawn == [bool(plan.draw_faults(job(number))) for number in range(2000)]
    assert 500 < sum(drawn) < 700
    assert drawn != [bool(plan.draw_faults(job(number, attempts=2))) for number in range(2000)]
    other = FaultPlan(plan.faults, seed=8, until_us=0)
    assert drawn != [bool(other.draw_faults(job(number))) for number in range(2000)]


def test_fault_of_every_step_is_drawn_for_each_of_them() -> None:
    plan = FaultPlan((Fault(FaultKind.ERROR, step="*", probability=0.5), Fault(FaultKind.ERROR, step="b")), 7, 0)
    drawn = [tuple(len(plan.draw_faults(job(number), step)) for step in ("a", "b")) for number in range(200)]
    assert set(drawn) == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert not any(plan.draw_faults(job(number)) for number in range(200))


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        (Fault(FaultKind.ERROR), True),
        (Fault(FaultKind.ERROR, task="send", queue="default", attempts=1), True),
        (Fault(FaultKind.ERROR, task="other"), False),
        (Fault(FaultKind.ERROR, queue="other"), False),
        (Fault(FaultKind.STORE_ERROR), False),
    ],
)
def test_fault_happens_to_the_jobs_it_names(fault: Fault, hit: bool) -> None:
    assert fault.applies_to(job()) == hit
    assert not fault.applies_to(job(attempts=2)) or fault.attempts is None


def test_permanent_error_says_that_it_is_not_to_be_retried() -> None:
    error = InjectedError(Fault(FaultKind.PERMANENT_ERROR, when="after"), "task send")
    assert str(error) == "a fault was injected: permanent_error after task send"
    assert not error.retryable
    assert InjectedError(Fault(FaultKind.ERROR), "task send").retryable


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ready_scenarios_can_be_read() -> None:
    names = scenario_names()
    assert names == ["duplicate-delivery", "partial-execution", "retry-storm", "worker-crash"]
    for name in names:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert scenario.description
        assert scenario.faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "staging.toml: "),
        ("", "faults: '0 faults' is not valid"),
        ("fault = 1", "fault: 1 is not valid; write each fault as a table: [[fault]]"),
        ('[[fault]]\nkind = "x"', "fault 1: kind: 'x'"),
        ('jbos = 1\n[[fault]]\nkind = "error"', "field: 'jbos'"),
        ('jobs = 0\n[[fault]]\nkind = "error"', "jobs: 0"),
        ('span = "x"\n[[fault]]\nkind = "error"', "span: 'x'"),
        ('effects = "count"\n[[fault]]\nkind = "error"', "effects: 'count' is not valid; give module:function"),
        ('retry = "often"\n[[fault]]\nkind = "error"', "retry: 'often'"),
        ('payload = 1\n[[fault]]\nkind = "error"', "payload: 1 is not valid; give an object"),
        ('settings = 1\n[[fault]]\nkind = "error"', "settings: 1 is not valid; write a table of settings"),
    ],
)
def test_file_that_is_no_scenario_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_scenario("staging.toml", text)
    assert message in str(refusal.value)


def test_scenario_takes_values_of_a_command() -> None:
    scenario = load_scenario("retry-storm").with_values(jobs=3, task=None, span="20s", payload={"to": "{n}"})
    assert (scenario.jobs, scenario.span, scenario.task, scenario.payload) == (3, 20.0, None, {"to": "{n}"})
    with pytest.raises(Invalid, match="workers: 0"):
        scenario.with_values(workers=0)


def test_unknown_scenario_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no scenario 'retry-strom'; .*; did you mean retry-storm\?"):
        load_scenario("retry-strom")
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_scenario("none.toml")


def test_each_repetition_of_a_step_has_a_draw_of_its_own() -> None:
    plan = FaultPlan((parse_fault({"kind": "error", "step": "*", "probability": 0.5}),), 1, 0)
    steps = ["charge", *(f"charge#{number}" for number in range(2, 40))]
    drawn = [bool(plan.draw_faults(job(), step)) for step in steps]
    assert {True, False} <= set(drawn)
    named = FaultPlan((parse_fault({"kind": "error", "step": "charge", "probability": 0.5}),), 1, 0)
    assert len({bool(named.draw_faults(job(), step)) for step in steps}) == 1
    assert plan.draw_faults(job()) == []
