"""Errors over HTTP: groups of failed jobs, one group with its traceback, and changes of the jobs of a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.lifecycle import Failed
from holdfast.core.models import JobState
from tests.web.client import Api
from tests.web.keyed import Keys, ask, refused

TRACEBACK = 'Traceback (most recent call last):\n  File "/srv/shop/cards.py", line 7, in charge\nValueError: declined'


def die(api: Api, error: str, queue: str = "default", **fields: object) -> str:
    """Returns the id of a new job that is dead with this error."""
    job_id = str(api.submit(queue=queue, **fields)["id"])
    api.run(api.end(job_id, Failed(error=error, traceback=TRACEBACK, retryable=False)))
    return job_id


def test_errors_are_listed_in_groups_with_the_latest_first(api: Api) -> None:
    assert api.get("/v1/errors") == {"groups": [], "total": 0}
    die(api, "ValueError: card 17 declined")
    last = die(api, "ValueError: card 18 declined", queue="other")
    die(api, "KeyError: 'city'")
    answer = api.get("/v1/errors")
    assert [each["error"] for each in answer["groups"]] == ["KeyError: 'city'", "ValueError: card 18 declined"]
    found = answer["groups"][1]
    assert (found["dead"], found["retrying"], found["latest_job"], answer["total"]) == (2, 0, last, 2)
    assert (set(found["queues"]), sum(each["number"] for each in found["hours"])) == ({"default", "other"}, 2)
    assert api.get(f"/v1/jobs/{last}")["error_group"] == found["id"]
    assert len(api.get("/v1/errors?limit=1")["groups"]) == 1
    assert api.get("/v1/errors?queue=other")["groups"][0]["dead"] == 1


def test_run_is_counted_and_its_errors_grouped_by_its_tag(api: Api) -> None:
    die(api, "ValueError: card 17 declined", tags=["run-7"])
    die(api, "ValueError: card 18 declined", queue="other", tags=["run-7"])
    die(api, "KeyError: 'city'")
    api.submit(tags=["run-7"])
    (group,) = api.get("/v1/errors?tag=run-7")["groups"]
    assert (group["dead"], api.get("/v1/errors?tag=run-7&queue=other")["groups"][0]["dead"]) == (2, 1)
    counts = api.get("/v1/jobs/counts?tag=run-7")
    assert counts["total"] == sum(counts["states"].values()) == 3
    assert (set(counts["states"]), counts["states"]["dead"], counts["states"]["queued"]) == (set(JobState), 2, 1)
    assert api.get("/v1/jobs/counts")["total"] == 4
    assert api.get("/v1/jobs/counts?tag=run-7&state=dead&queue=other")["total"] == 1
    refused(api.ask("GET", "/v1/jobs/counts?queue=-"), 422, "invalid")


def test_group_shows_its_place_and_latest_traceback(api: Api) -> None:
    die(api, "ValueError: card 17 declined")
    group = api.get("/v1/errors")["groups"][0]
    shown = api.get(f"/v1/errors/{group['id']}")
    assert shown == {**group, "place": "shop/cards.py in charge", "traceback": TRACEBACK}
    refused(api.ask("GET", "/v1/errors/0123456789ab"), 404, "not_found")
    refused(api.ask("GET", "/v1/errors/x"), 422, "invalid")


def test_jobs_of_a_group_are_found_and_replayed(api: Api) -> None:
    ids = {die(api, f"ValueError: card {number} declined") for number in range(3)}
    other = die(api, "KeyError: 'city'")
    group = api.get(f"/v1/jobs/{min(ids)}")["error_group"]
    assert {job["id"] for job in api.get(f"/v1/jobs?error_group={group}&state=dead")["jobs"]} == ids
    chosen = {"filter": {"error_group": group, "state": ["dead"]}}
    assert api.post("/v1/jobs/replay", {**chosen, "dry_run": True})["count"] == 3
    assert {each["id"] for each in api.post("/v1/jobs/replay", chosen)["changed"]} == ids
    assert api.get(f"/v1/jobs/{other}")["state"] == "dead"
    refused(api.ask("GET", "/v1/jobs?error_group=everything"), 422, "invalid")


def test_key_for_some_queues_sees_no_others_errors(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path)) as api:
        own = keys.make("read", queues=("mail",))
        api._client.headers["x-api-key"] = keys.spare
        die(api, "ValueError: card 1 declined", queue="mail")
        foreign = die(api, "ValueError: card 2 declined", queue="vault")
        secret = die(api, "KeyError: 'vault'", queue="vault")
        del api._client.headers["x-api-key"]
        answer = ask(api, own, "GET", "/v1/errors")
        assert ("vault" not in answer.text, foreign not in answer.text) == (True, True)
        (group,) = answer.json()["groups"]
        assert (group["dead"], group["queues"]) == (1, ["mail"])
        assert ask(api, own, "GET", "/v1/jobs/counts").json()["total"] == 1
        shown = ask(api, own, "GET", f"/v1/errors/{group['id']}").json()
        assert (shown["dead"], "card 1" in shown["error"]) == (1, True)
        hidden = ask(api, keys.spare, "GET", f"/v1/jobs/{secret}").json()["error_group"]
        refused(ask(api, own, "GET", f"/v1/errors/{hidden}"), 404, "not_found")


@pytest.mark.parametrize("redacted", ["error", "payload.card"])
def test_errors_hide_what_is_redacted(home: str, redacted: str) -> None:
    with Api(home, redacted=(redacted,)) as api:
        job_id = str(api.submit(payload={"card": "4111-1111"})["id"])
        error = Failed(error="ValueError: 4111-1111", traceback=TRACEBACK + " 4111-1111", retryable=False)
        api.run(api.end(job_id, error))
        answer = api.get("/v1/errors")
        shown = api.get(f"/v1/errors/{answer['groups'][0]['id']}")
        assert "4111" not in f"{answer} {shown}"
        assert "[redacted]" in shown["error"]
