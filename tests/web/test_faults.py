"""Faults over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.client import Api

ERROR = {"kind": "error", "task": "work", "probability": 0.3}


def test_faults_need_the_setting(api: Api) -> None:
    assert api.get("/v1/faults") == {"faults": [], "seed": None, "until": None}
    problem = api.refused("POST", "/v1/faults", 409, json={"faults": [ERROR], "span": "5m"})
    assert "allow_faults = true" in str(problem)
    assert api.get("/v1/faults")["faults"] == []
    assert api.ask("DELETE", "/v1/faults").status_code == 204


def test_faults_are_switched_on_and_off(home: str) -> None:
    with Api(home, allow_faults=True) as api:
        started = api.post("/v1/faults", {"faults": [ERROR, {"kind": "lost_ack"}], "span": "5m", "seed": 7})
        assert api.get("/v1/faults") == started
        assert (started["seed"], [each["kind"] for each in started["faults"]]) == (7, ["error", "lost_ack"])
        assert api.ask("DELETE", "/v1/faults").status_code == 204
        assert api.get("/v1/faults")["faults"] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"faults": [ERROR]}, "span"),
        ({"faults": [], "span": 60}, "faults"),
        ({"faults": [{**ERROR, "kind": "x"}], "span": 60}, "fault 1: kind"),
        ({"faults": [{**ERROR, "probability": 2}], "span": 60}, "fault 1: probability"),
        ({"faults": [{**ERROR, "what": 2}], "span": 60}, "fault 1: fault"),
        ({"faults": [ERROR], "span": "2d"}, "span"),
        ({"faults": [ERROR], "span": 60, "seed": -1}, "seed"),
    ],
)
def test_faults_that_make_no_sense_are_refused(api: Api, body: dict[str, Any], field: str) -> None:
    assert api.refused("POST", "/v1/faults", 422, json=body)["field"] == field
