"""Tasks that the application of an API lacks: accepted, and reported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core.events import TaskUnknown
from tests.web.client import JSON, Api


def _submit(api: Api, *types: str) -> None:
    jobs: list[dict[str, Any]] = [{"task": each, "payload": {}} for each in types]
    assert api.ask("POST", "/v1/jobs", json=jobs[0], headers=JSON).status_code == 201
    assert api.ask("POST", "/v1/jobs/batch", json={"jobs": jobs}, headers=JSON).status_code == 201


def test_unknown_task_is_accepted_and_reported_once(tmp_path: Path) -> None:
    with Api(f"sqlite:///{tmp_path}/jobs.db") as api:
        reported: list[TaskUnknown] = []
        api.app.events.subscribe(reported.append, TaskUnknown)
        _submit(api, "mail.sent", "other")  # an application without tasks knows nothing of them
        assert reported == []
        api.app.task("mail.send")(print_nothing)
        _submit(api, "mail.sent", "other", "mail.send")
        assert [event.task for event in reported] == ["mail.sent", "other"]
        assert "did you mean mail.send?" in reported[0].remedy


def test_misspelt_task_is_accepted_with_a_warning(tmp_path: Path) -> None:
    with Api(f"sqlite:///{tmp_path}/jobs.db") as api:
        job = {"task": "mail.sent", "payload": {}, "key": "k"}
        assert "warning" not in api.post("/v1/jobs", {**job, "key": "first"}, 201)
        api.app.task("mail.send")(print_nothing)
        expected = "the application of this API has no task mail.sent; did you mean mail.send?"
        assert api.post("/v1/jobs", job, 201)["warning"] == expected
        assert "warning" not in api.post("/v1/jobs", job, 200)
        batch = [{"task": each, "payload": {}} for each in ("mail.send", "mail.sent")]
        stored = api.post("/v1/jobs/batch", {"jobs": batch}, 201)["jobs"]
        assert [each.get("warning") for each in stored] == [None, expected]


async def print_nothing() -> None:
    """What ``mail.send`` does."""
