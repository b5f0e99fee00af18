"""Policies of uniqueness: what makes two jobs the same, and what a policy may not say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast import Holdfast, Unique
from holdfast.core.errors import Invalid
from holdfast.core.models import NewJob, UniqueKey
from holdfast.core.unique import as_unique


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("sqlite:///never-opened.db")


def key(unique: object, payload: str = "{}", *, task: str = "work", queue: str = "default") -> str:
    return bound(unique, payload, task=task, queue=queue).key


def bound(unique: Any, payload: str = "{}", *, task: str = "work", queue: str = "default") -> UniqueKey:
    made = as_unique(unique).bind(NewJob(id="a", task=task, payload=payload, queue=queue)).unique
    assert made is not None
    return made


# ── what makes two jobs the same ────────────────────────────────────────────────────────────────────────────────────
def test_task_queue_and_whole_payload_count_by_default() -> None:
    assert key("active", '{"a":1,"b":2}') == key("unstarted", '{"b":2,"a":1}')
    keys = [key("active", '{"a":1}'), key("active", '{"a":2}'), key("active", '{"a":1}', task="t")]
    assert len({*keys, key("active", '{"a":1}', queue="q"), key("active", '{"a":"1"}'), key("active", "{}")}) == 6


def test_named_values_count_alone() -> None:
    def by(*parts: str) -> Unique:
        return Unique("active", by=parts)

    assert key(by("args.a"), '{"a":1,"b":2}') == key(by("args.a"), '{"a":1,"b":3}', task="t", queue="q")
    assert key(by("args.a.b"), '{"a":{"b":1,"c":2}}') == key(by("args.a.b"), '{"a":{"b":1}}')
    assert key(by("args.a.b"), '{"a":1}') == key(by("args.a.b"), '{"a":{"b":null}}') == key(by("args.a.b"), "{}")
    assert key(by("args.a"), '{"a":1}') != key(by("args.b"), '{"b":1}')
    assert key(by("task"), '{"a":1}') == key(by("task"), "{}", queue="q")
    big = '{"a":123456789012345678901234567890}'
    assert key(by("args.a"), big) != key(by("args.a"), big.replace("890}", "891}"))
    assert key(by("args.a"), '{"a":"\\ud800"}') != key(by("args.a"), '{"a":"\\ud801"}')


@pytest.mark.parametrize("given", ["10m", 600, 600.0, timedelta(minutes=10), {"during": "10m"}, Unique("600s")])
def test_window_accepts_every_format(given: object) -> None:
    assert bound(given) == UniqueKey(key=key("active"), window_us=600_000_000)


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("activ", "unique.during.*did you mean active"),
        ("", "unique.during"),
        ("10", "unique.during.*5m"),
        (0, "unique.during.*above 0"),
        (-5, "unique.during"),
        (True, "unique.during"),
        (None, "unique.during"),
        (["active"], "unique.during"),
        (float("nan"), "unique.during"),
        ({}, "unique.*give during"),
        ({"during": "active", "on_conflit": "keep"}, "on_conflit.*did you mean on_conflict"),
        ({"during": "active", "by": "args"}, "unique.by.*give a list"),
        ({"during": "active", "by": []}, "unique.by.*give a list"),
        ({"during": "active", "by": 7}, "unique.by.*give a list"),
        ({"during": "active", "by": [7]}, "unique.by.*args.NAME"),
        ({"during": "active", "by": ["args."]}, "unique.by.*args.NAME"),
        ({"during": "active", "by": ["args..a"]}, "unique.by.*args.NAME"),
        ({"during": "active", "by": ["queue.a"]}, "unique.by.*args.NAME"),
        ({"during": "active", "by": ["payload"]}, "unique.by.*args.NAME"),
        ({"during": "active", "on_conflict": "replac"}, "unique.on_conflict.*did you mean replace"),
        ({"during": "active", "on_conflict": ["keep"]}, "unique.on_conflict"),
        ({"during": "active", "on_conflict": "replace", "by": ["args.a", "task"]}, "unique.by.*queue"),
        ({"during": "active", "on_conflict": "reschedule", "by": ["queue"]}, "unique.by.*task"),
    ],
)
def test_bad_policy_names_field_and_remedy(given: Any, message: str, app: Holdfast) -> None:
    with pytest.raises(Invalid, match=f"(?s){message}"):
        as_unique(given)
    if given is not None:
        with pytest.raises(Invalid, match=f"(?s){message}"):
            app.task("work", unique=given)
        with pytest.raises(Invalid, match=f"(?s){message}"):
            app.draft_job("work", {}, unique=given)


def test_policy_has_at_most_20_parts() -> None:
    parts = [f"args.a{number}" for number in range(20)]
    assert Unique("active", by=parts).by == parts
    with pytest.raises(Invalid, match=r"unique.by.*21 parts.*at most 20"):
        Unique("active", by=[*parts, "task"])


def test_argument_that_the_function_does_not_take_is_refused(app: Holdfast) -> None:
    with pytest.raises(Invalid, match=r"unique.by.*args.custmer.*did you mean customer"):

        @app.task("work", unique=Unique("active", by=["args.custmer"]))
        async def work(customer: int) -> None: ...

    @app.task("free")
    async def free(**arguments: int) -> None: ...

    @app.task("plain")
    async def plain(customer: int) -> None: ...

    assert free.options(unique=Unique("active", by=["args.any"])).new_job(any=1).unique is not None
    with pytest.raises(Invalid, match=r"args.x.*task 'plain' takes customer"):
        plain.options(unique=Unique("active", by=["args.x"]))
    with pytest.raises(Invalid, match=r"args.x.*task 'plain' takes customer"):
        app.draft_job("plain", {"customer": 1}, unique={"during": "active", "by": ["args.x"]})


# ── a task's policy and a submission's ──────────────────────────────────────────────────────────────────────────────
def test_submission_goes_before_the_task(app: Holdfast) -> None:
    @app.task("work", unique="active")
    async def work(customer: int) -> None: ...

    @app.task("plain")
    async def plain(customer: int) -> None: ...

    jobs = [
        work.new_job(1),
        work.options(unique="5m").new_job(1),
        app.draft_job("work", {"customer": 1}),
        plain.new_job(1),
        plain.options(unique="unstarted").new_job(1),
    ]
    given = [job.unique and (job.unique.during, job.unique.window_us) for job in jobs]
    assert given == [("active", None), (None, 300_000_000), ("active", None), None, ("unstarted", None)]
    assert jobs[0].unique == jobs[2].unique
    assert jobs[0].unique != work.new_job(2).unique
