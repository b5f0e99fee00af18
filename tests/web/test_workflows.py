"""Signals, dependencies and trees over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.core.steps import NewStep
from holdfast.views import workflows
from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, refused


def submit(api: Api, **given: Any) -> dict[str, Any]:
    job: dict[str, Any] = api.post("/v1/jobs", {"task": "work", "payload": {}, **given}, 201)
    return job


def test_signal_is_kept_and_known_by_its_id(api: Api) -> None:
    sent = api.post("/v1/signals", {"topic": "approved:42", "value": {"by": "Ada"}, "id": "one"}, 201)
    assert sent == {"id": "one", "is_new": True, "job_id": None}
    again = api.post("/v1/signals", {"topic": "approved:42", "id": "one"}, 200)
    assert again == {"id": "one", "is_new": False, "job_id": None}
    api.post("/v1/signals", {"topic": "other"}, 201)
    [found] = api.get("/v1/signals", topic="approved:42")["signals"]
    assert (found["id"], found["topic"], found["value"]) == ("one", "approved:42", {"by": "Ada"})
    assert [each["value"] for each in api.get("/v1/signals")["signals"]] == [{"by": "Ada"}, None]
    assert len(api.get("/v1/signals", limit=1)["signals"]) == 1


@pytest.mark.parametrize("topic", [None, "", "a#b", "a\nb", 5, "x" * 201])
def test_signal_without_a_topic_is_refused(api: Api, topic: Any) -> None:
    body = {} if topic is None else {"topic": topic}
    assert "topic" in str(api.refused("POST", "/v1/signals", 422, json=body))
    assert api.get("/v1/signals")["signals"] == []


def test_signal_over_the_limit_is_refused(api: Api) -> None:
    refusal = api.ask("POST", "/v1/signals", json={"topic": "a", "value": "x" * (300 * 1024)})
    assert refusal.status_code in (413, 422)
    assert api.get("/v1/signals")["signals"] == []


def test_job_waits_for_others(api: Api) -> None:
    first = submit(api)["id"]
    second = submit(api, after=[first])
    assert (second["state"], second["reason"], second["run_at"]) == ("waiting", "dependency", None)
    batch = api.post(
        "/v1/jobs/batch",
        {
            "jobs": [
                {"task": "work", "payload": {}, "id": "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b99"},
                {
                    "task": "work",
                    "payload": {},
                    "after": ["0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b99", {"job_id": second["id"], "on": "end"}],
                },
            ]
        },
        201,
    )
    last = batch["jobs"][1]["id"]
    waits = api.get(f"/v1/jobs/{last}/waits")
    assert waits["receiver"] is None
    assert sorted(each["on"] for each in waits["dependencies"]) == ["end", "success"]
    assert [each["job_id"] for each in api.get(f"/v1/jobs/{first}/waits")["dependents"]] == [second["id"]]
    tree = api.get(f"/v1/jobs/{first}/tree")
    assert [(each["id"], each["parent"]) for each in tree["jobs"]] == [
        (first, None),
        (second["id"], first),
        (last, second["id"]),
    ]
    assert tree["complete"] is True
    reasons = api.get(f"/v1/jobs/{second['id']}/why")["reasons"]
    assert reasons[0]["code"] == "dependency"
    assert first in reasons[0]["text"]


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ([UNKNOWN_ID, "nonsense"], "after[1]"),
        ([UNKNOWN_ID], "after"),
        ([{"job_id": UNKNOWN_ID}], "after"),
        ([UNKNOWN_ID, {"on": "end"}], "after[1]"),
        ([{"job_id": UNKNOWN_ID, "on": "never"}], "after[0].on"),
        ([{"job_id": UNKNOWN_ID, "more": 1}], "after[0]"),
        ("text", "after"),
        ([5], "after[0]"),
    ],
)
def test_dependency_that_names_no_job_is_refused(api: Api, after: Any, field: str) -> None:
    body = {"task": "work", "payload": {}, "after": after}
    assert field in api.refused("POST", "/v1/jobs", 422, json=body)["field"]
    batch = {"jobs": [{"task": "work", "payload": {}}, body]}
    assert api.refused("POST", "/v1/jobs/batch", 422, json=batch)["field"].endswith(field)
    assert api.get("/v1/jobs")["jobs"] == []


def test_dependency_with_a_time_is_refused(api: Api) -> None:
    first = submit(api)["id"]
    body = {"task": "work", "payload": {}, "after": [first], "delay": 5}
    assert "delay" in api.refused("POST", "/v1/jobs", 422, json=body)["detail"]


@pytest.mark.parametrize("path", ["waits", "tree"])
def test_unknown_job_has_no_waits(api: Api, path: str) -> None:
    api.refused("GET", f"/v1/jobs/{UNKNOWN_ID}/{path}", 404)


def test_key_for_some_queues_sees_no_signals(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    token = keys.make("submit", "read", queues=("mail",))
    with Api(home, keys_file=str(keys.path)) as api:
        refused(ask(api, token, "POST", "/v1/signals", {"topic": "a"}), 403, "forbidden")
        refused(ask(api, token, "GET", "/v1/signals"), 403, "forbidden")
        assert ask(api, keys.spare, "POST", "/v1/signals", {"topic": "a"}).status_code == 201


def test_tree_leaves_out_jobs_of_other_queues(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    token = keys.make("read", queues=("mail",))
    with Api(home, keys_file=str(keys.path)) as api:
        body = {"task": "work", "payload": {}, "queue": "mail"}
        first = ask(api, keys.spare, "POST", "/v1/jobs", body).json()["id"]
        for queue in ("mail", "vault"):
            ask(api, keys.spare, "POST", "/v1/jobs", {**body, "queue": queue, "after": [first]})
        tree = ask(api, token, "GET", f"/v1/jobs/{first}/tree").json()
        assert [each["queue"] for each in tree["jobs"]] == ["mail", "mail"]


def test_tree_is_bounded_by_the_results_of_steps(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = api.post("/v1/batches", {"jobs": [{"task": "work", "payload": {}}] * 2}, 201)

    async def save() -> None:
        store = await api.app.open_store()
        for job_id in batch["jobs"]:
            lease = (await api.claim(job_id)).lease
            steps = [NewStep(lease, f"s{number}", number, True, '"result"') for number in (1, 2, 3)]
            assert await store.workflow.save_steps(steps) == [True] * 3

    def results() -> tuple[list[list[Any]], bool]:
        tree = api.get(f"/v1/jobs/{batch['id']}/tree")
        return [[step["result"] for step in node["steps"]] for node in tree["jobs"]], tree["complete"]

    api.run(save())
    assert results() == ([[], ["result"] * 3, ["result"] * 3], True)
    monkeypatch.setattr(workflows, "_MAX_RESULTS", 4 * len('"result"'))
    assert results() == ([[], ["result"] * 3, ["result", None, None]], False)


def test_replay_from_a_step_that_is_not_recorded_is_refused(api: Api) -> None:
    job_id = submit(api)["id"]
    api.post(f"/v1/jobs/{job_id}/cancel", {})
    refusal = api.refused("POST", f"/v1/jobs/{job_id}/replay", 422, json={"from_step": "charge"})
    assert "none is recorded" in str(refusal)
    assert api.get(f"/v1/jobs/{job_id}")["state"] == "cancelled"
