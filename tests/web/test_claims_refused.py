"""Requests that workers in other languages may not send, and unknown leases."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import quote_value
from holdfast.core.models import Lease
from holdfast.web.lease_tokens import token_of
from tests.web.client import UNKNOWN_ID, Api
from tests.web.working import ERROR, Worker


@pytest.fixture
def worker(api: Api) -> Worker:
    return Worker(api)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("claims", {}, "worker"),
    ("claims", {"worker": ""}, "worker"),
    ("claims", {"worker": "w" * 41}, "worker"),
    ("claims", {"worker": "-w"}, "worker"),
    ("claims", {"worker": "w", "limit": 0}, "limit"),
    ("claims", {"worker": "w", "limit": 501}, "limit"),
    ("claims", {"worker": "w", "limit": True}, "limit"),
    ("claims", {"worker": "w", "wait": 61}, "wait"),
    ("claims", {"worker": "w", "wait": 1.5}, "wait"),
    ("claims", {"worker": "w", "lease": 0.5}, "lease"),
    ("claims", {"worker": "w", "lease": 86_401}, "lease"),
    ("claims", {"worker": "w", "queues": []}, "queues"),
    ("claims", {"worker": "w", "queues": {}}, "queues"),
    ("claims", {"worker": "w", "queues": "a"}, "queues"),
    ("claims", {"worker": "w", "queues": ["A"]}, "queues[0]"),
    ("claims", {"worker": "w", "queues": {"a": -1}}, "queues.a"),
    ("claims", {"worker": "w", "tasks": ["no task"]}, "tasks[0]"),
    ("claims", {"worker": "w", "colour": 1}, "colour"),
    ("claims", {"worker": "w", "limit": None}, "limit"),
    ("claims/extend", {"worker": "w"}, "leases"),
    ("claims/extend", {"worker": "w", "leases": ["?"]}, "leases[0]"),
    ("claims/extend", {"worker": "w", "leases": ["MA"]}, "leases[0]"),
    ("claims/extend", {"worker": "w", "leases": ["MS5h", "MS5h"]}, "leases[1]"),
    ("claims/leave", {"worker": "w", "leases": "MS5h"}, "leases"),
    ("claims/lines", {"worker": "w", "token": "MS5h", "lines": []}, "lines"),
    ("claims/lines", {"worker": "w", "token": "MS5h", "lines": [{"number": 0, "text": ""}]}, "lines[0].number"),
    ("claims/lines", {"worker": "w", "token": "MS5h", "lines": [{"number": 1}]}, "lines[0].text"),
    ("claims/lines", {"worker": "w", "token": "MS5h", "lines": [{"number": 1, "text": "", "ago": -1}]}, "lines[0].ago"),
    ("claims/settle", {"worker": "w", "settlements": []}, "settlements"),
    ("claims/settle", {"worker": "w", "settlements": [1]}, "settlements[0]"),
]
BAD_SETTLEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"outcome": "won"}, "outcome"),
    ({}, "outcome"),
    ({"outcome": "succeeded", "error": ERROR}, "error"),
    ({"outcome": "failed"}, "error"),
    ({"outcome": "failed", "error": "text"}, "error"),
    ({"outcome": "failed", "error": {"type": "E"}}, "error.message"),
    ({"outcome": "failed", "error": {**ERROR, "stack": ""}}, "error.stack"),
    ({"outcome": "failed", "error": ERROR, "reason": "payload"}, "reason"),
    ({"outcome": "failed", "error": ERROR, "reason": "max_attempts"}, "reason"),
    ({"outcome": "failed", "error": ERROR, "delay": -1}, "delay"),
    ({"outcome": "failed", "error": ERROR, "delay": "5"}, "delay"),
    ({"outcome": "failed", "error": ERROR, "delay": True}, "delay"),
    ({"outcome": "dead", "error": ERROR, "delay": 5}, "delay"),
    ({"outcome": "snoozed"}, "delay"),
    ({"outcome": "released", "delay": 5}, "delay"),
]


def test_what_is_wrong_is_named_and_nothing_is_changed(api: Api, worker: Worker) -> None:
    api.submit()
    for path, given, field in BAD:
        problem = api.refused("POST", f"/v1/{path}", 422, json=given)
        assert problem["field"] == field, given
    job = worker.one()
    for bad, field in BAD_SETTLEMENTS:
        settlements = [{"token": job["token"], "outcome": "succeeded"}, {"token": "MS5h", **bad}]
        problem = api.refused("POST", "/v1/claims/settle", 422, json={"worker": "js-1", "settlements": settlements})
        assert problem["field"] == f"settlements[1].{field}", bad
        assert field not in bad or problem["value"] == quote_value(bad[field]), bad
    assert worker.settle(job, "succeeded") == ("accepted", "succeeded")


def test_leases_that_were_never_granted_are_lost(api: Api, worker: Worker) -> None:
    waiting = api.submit()
    strange = [
        Lease(UNKNOWN_ID, 1),
        Lease(waiting["id"], 0),
        Lease(waiting["id"], 1),
        Lease(waiting["id"], (1 << 31) - 1),
        Lease("by-hand:ünser job", 3),
        Lease("'; drop table", 3),
    ]
    jobs = [{"token": token_of(lease)} for lease in strange]
    assert worker.verdicts(*jobs) == ["lost"] * len(jobs)
    assert [worker.settle(job, "succeeded")[0] for job in jobs] == ["lost"] * len(jobs)
    assert worker.leave(*jobs) == 0
    assert worker.one()["id"] == waiting["id"]
