"""Cancelling, replaying and deleting; dead letters; queues; workers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.core.lifecycle import Failed
from holdfast.core.workers import WorkerHeartbeat
from tests.web.client import UNKNOWN_ID, Api


def test_a_waiting_job_is_cancelled_once(api: Api) -> None:
    job = api.submit(key="k")
    assert api.post("/v1/jobs/key:k/cancel")["state"] == "cancelled"
    assert api.refused("POST", f"/v1/jobs/{job['id']}/cancel", 409)["code"] == "conflict"
    assert "/v1/jobs" in api.refused("POST", f"/v1/jobs/{UNKNOWN_ID}/cancel", 404)["remedy"]


def test_a_running_job_is_asked_to_stop(api: Api) -> None:
    job_id = api.submit()["id"]
    api.run(api.claim(job_id))
    job = api.post(f"/v1/jobs/{job_id}/cancel", {})
    assert (job["state"], job["cancelling"]) == ("running", True)
    assert api.refused("DELETE", f"/v1/jobs/{job_id}", 409)["code"] == "conflict"


def test_a_dead_job_is_replayed_with_edited_arguments(api: Api) -> None:
    job_id = api.dead()
    job = api.post(f"/v1/jobs/{job_id}/replay", {"payload": {"n": 2}})
    assert (job["state"], job["attempts"], job["error"], job["payload"]) == ("queued", 0, None, {"n": 2})
    assert api.refused("POST", f"/v1/jobs/{job_id}/replay", 409)["code"] == "conflict"
    api.refused("POST", f"/v1/jobs/{UNKNOWN_ID}/replay", 404)


def test_edited_arguments_that_do_not_fit_are_named(api: Api) -> None:
    @api.app.task("work")
    async def work(n: int = 1) -> None: ...

    job_id = api.dead()
    problem = api.refused("POST", f"/v1/jobs/{job_id}/replay", 422, json={"payload": {"n": "two"}})
    assert problem["field"] == "payload.n"


def test_missing_required_body_is_refused(api: Api) -> None:
    assert api.refused("POST", "/v1/jobs/cancel", 422)["code"] == "body_required"


def test_what_has_succeeded_is_replayed_by_force_only(api: Api) -> None:
    job_id = api.submit()["id"]
    api.succeed(job_id)
    api.refused("POST", f"/v1/jobs/{job_id}/replay", 409)
    assert api.post(f"/v1/jobs/{job_id}/replay", {"force": True})["state"] == "queued"


def test_a_deleted_job_is_gone_and_its_key_free(api: Api) -> None:
    first = api.submit(key="k")
    answer = api.ask("DELETE", "/v1/jobs/key:k")
    assert (answer.status_code, answer.content) == (204, b"")
    api.refused("GET", f"/v1/jobs/{first['id']}", 404)
    api.refused("DELETE", f"/v1/jobs/{first['id']}", 404)
    assert api.submit(201, key="k")["id"] != first["id"]


def test_a_job_in_another_state_than_the_caller_saw_is_not_deleted(api: Api) -> None:
    job_id = api.submit()["id"]
    problem = api.refused("DELETE", f"/v1/jobs/{job_id}?state=dead&state=failed", 409)
    assert "it is queued now" in problem["detail"]
    assert api.ask("DELETE", f"/v1/jobs/{job_id}?state=dead&state=queued").status_code == 204


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_dry_run_counts_and_changes_nothing(api: Api) -> None:
    for queue in ("mail", "mail", "other"):
        api.submit(queue=queue)
    done = api.post("/v1/jobs/cancel", {"filter": {"queue": "mail"}, "dry_run": True})
    assert done == {"dry_run": True, "count": 2, "changed": [], "refused": [], "more": False, "seconds": 0}
    assert api.post("/v1/jobs/delete", {"all": True, "dry_run": True})["count"] == 3
    assert {job["state"] for job in api.get("/v1/jobs")["jobs"]} == {"queued"}


def test_a_filter_changes_what_matches_up_to_the_limit(api: Api) -> None:
    ids = {api.submit(queue="mail")["id"] for _ in range(5)}
    kept = api.submit()["id"]
    done = api.post("/v1/jobs/cancel", {"filter": {"queue": "mail", "state": ["queued"]}, "limit": 3})
    assert (done["count"], done["more"]) == (3, True)
    rest = api.post("/v1/jobs/cancel", {"filter": {"queue": "mail", "state": "queued", "task": "work"}})
    assert (rest["count"], rest["more"]) == (2, False)
    assert {each["id"] for each in done["changed"] + rest["changed"]} == ids
    assert {each["state"] for each in done["changed"] + rest["changed"]} == {"cancelled"}
    assert api.get(f"/v1/jobs/{kept}")["state"] == "queued"


def test_named_jobs_are_changed_or_refused_one_by_one(api: Api) -> None:
    waiting, dead = api.submit(key="w")["id"], api.dead()
    done = api.post("/v1/jobs/cancel", {"ids": ["key:w", dead, UNKNOWN_ID]})
    assert done["changed"] == [{"id": waiting, "state": "cancelled"}]
    refused = {each["id"]: each["state"] for each in done["refused"]}
    assert refused == {dead: "dead", UNKNOWN_ID: None}
    assert api.post("/v1/jobs/replay", {"ids": [waiting, dead]})["count"] == 2
    assert api.post("/v1/jobs/delete", {"ids": [waiting], "dry_run": True})["count"] == 1
    assert api.post("/v1/jobs/delete", {"all": True})["count"] == 2
    assert api.count() == 0


def test_a_job_that_is_named_several_times_is_one(api: Api) -> None:
    job, dead = api.submit(key="w")["id"], api.dead(key="d")
    ids = [job, "key:w", job.upper(), dead, "key:w", "key:nothing", UNKNOWN_ID, "key:nothing"]
    asked = {"ids": ids, "rate": "1/s"}
    assert api.post("/v1/jobs/cancel", {"ids": ids, "dry_run": True})["count"] == 1
    assert api.post("/v1/jobs/replay", asked | {"dry_run": True})["seconds"] == 2
    done = api.post("/v1/jobs/replay", asked)
    assert (done["count"], done["changed"], done["seconds"]) == (1, [{"id": dead, "state": "scheduled"}], 2)
    absent = [{"id": each, "state": None} for each in ("key:nothing", UNKNOWN_ID)]
    assert done["refused"] == [{"id": job, "state": "queued"}, *absent]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"dry_run": True}, "body"),
        ({"all": False}, "all"),
        ({"all": True, "ids": [UNKNOWN_ID]}, "body"),
        ({"filter": {"queue": "a"}, "all": True}, "body"),
        ({"ids": []}, "ids"),
        ({"ids": [5]}, "ids[0]"),
        ({"ids": ["key:m1", "nothing"]}, "ids[1]"),
        ({"ids": [UNKNOWN_ID, "key:"]}, "ids[1]"),
        ({"filter": {}}, "filter"),
        ({"filter": {}, "dry_run": True}, "filter"),
        ({"filter": {"queu": "a"}}, "filter.queu"),
        ({"filter": {"state": "gone"}}, "filter.state"),
        ({"filter": {"state": 5}}, "filter.state"),
        ({"filter": {"state": ["gone"]}}, "filter.state[0]"),
        ({"filter": []}, "filter"),
        ({"all": True, "limit": 0}, "limit"),
        ({"all": True, "limit": "5"}, "limit"),
        ({"all": True, "dry_run": "yes"}, "dry_run"),
        ({"all": True, "force": True}, "force"),
        ({"all": None}, "all"),
    ],
    ids=str,
)
def test_what_does_not_say_which_jobs_changes_none(api: Api, body: dict[str, Any], field: str) -> None:
    api.submit()
    assert api.refused("POST", "/v1/jobs/cancel", 422, json=body)["field"] == field
    assert api.get("/v1/jobs")["jobs"][0]["state"] == "queued"


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_dead_letters_are_listed_shown_and_replayed_by_queue(api: Api) -> None:
    mail = [api.dead(queue="mail", task=name) for name in ("a", "b", "b")]
    other, waiting = api.dead(queue="other"), api.submit(queue="mail")["id"]
    listed = api.get("/v1/queues/mail/dead")
    assert [job["id"] for job in listed["jobs"]] == mail[::-1]
    assert [job["id"] for job in api.get("/v1/queues/mail/dead", task="a")["jobs"]] == mail[:1]
    story = api.get(f"/v1/queues/mail/dead/{mail[0]}")
    assert (story["state"], story["history"][0]["error"]) == ("dead", "it broke")
    api.refused("GET", f"/v1/queues/mail/dead/{other}", 404)
    api.refused("GET", f"/v1/queues/mail/dead/{waiting}", 409)
    api.refused("GET", "/v1/queues/a%2Fb/dead", 422)
    assert api.post(f"/v1/queues/mail/dead/{mail[0]}/replay")["state"] == "queued"
    assert api.post("/v1/queues/mail/dead/replay", {"dry_run": True})["count"] == 2
    done = api.post("/v1/queues/mail/dead/replay", {"filter": {"task": ["b"]}})
    assert {each["id"] for each in done["changed"]} == set(mail[1:])
    assert api.post("/v1/queues/mail/dead/replay")["count"] == 0
    assert api.get(f"/v1/jobs/{other}")["state"] == "dead"


def test_dead_letters_are_replayed_at_a_rate(api: Api) -> None:
    dead = [api.dead(queue="mail") for _ in range(3)]
    asked = {"rate": "30/m", "limit": 2}

    assert api.post("/v1/queues/mail/dead/replay", asked | {"dry_run": True})["seconds"] == 6
    first = api.post("/v1/queues/mail/dead/replay", asked)
    rest = api.post("/v1/queues/mail/dead/replay", asked | {"after": first["seconds"]})

    assert [(each["count"], each["more"], each["seconds"]) for each in (first, rest)] == [(2, True, 4), (1, False, 6)]
    assert [each["state"] for each in first["changed"] + rest["changed"]] == ["queued", "scheduled", "scheduled"]
    jobs = [api.get(f"/v1/jobs/{job_id}") for job_id in dead]
    instants = [datetime.fromisoformat(job["run_at"]) for job in jobs]
    assert timedelta(seconds=2) == instants[1] - instants[0]
    assert instants[2] - instants[0] >= timedelta(seconds=4)  # never sooner, however long between the calls
    assert {job["attempts"] for job in jobs} == {0}


def test_replay_at_a_rate_skips_refused_jobs(api: Api) -> None:
    dead, queued = [api.dead() for _ in range(2)], [api.submit()["id"] for _ in range(2)]
    asked = {"ids": [queued[0], dead[0], queued[1], dead[1]], "rate": "1/d"}

    assert api.post("/v1/jobs/replay", asked | {"dry_run": True})["seconds"] == 4 * 86400
    done = api.post("/v1/jobs/replay", asked)
    assert (done["count"], done["seconds"]) == (2, 4 * 86400)
    last = datetime.fromisoformat(api.get(f"/v1/jobs/{dead[1]}")["run_at"])
    assert timedelta(days=2, hours=12) < last - datetime.now(UTC) <= timedelta(days=3, hours=1)


def test_reported_seconds_are_accepted_as_after(api: Api) -> None:
    dead = [api.dead() for _ in range(2)]
    first = api.post("/v1/jobs/replay", {"ids": dead[:1], "rate": "1/d", "after": 31_536_000})
    rest = api.post("/v1/jobs/replay", {"ids": dead[1:], "rate": "1/d", "after": first["seconds"]})
    assert (first["seconds"], rest["seconds"]) == (366 * 86400, 367 * 86400)


@pytest.mark.parametrize("rate", ["10", "0/s", "10/y", "-1/s", "1.5/s", 10, "9999999/s", ""])
def test_a_rate_is_so_many_in_a_time(api: Api, rate: object) -> None:
    assert api.refused("POST", "/v1/jobs/replay", 422, json={"all": True, "rate": rate})["field"] == "rate"


def test_of_ten_replays_at_once_one_wins(api: Api) -> None:
    job_id = api.dead()

    async def race() -> list[int]:
        answers = await asyncio.gather(*[api.send("POST", f"/v1/jobs/{job_id}/replay") for _ in range(10)])
        return sorted(answer.status_code for answer in answers)

    assert api.run(race()) == [200] + [409] * 9


# ── queues, workers, figures ──────────────────────────────────────────────────────────────────────────────────────
def test_queues_count_their_jobs_and_are_paused_and_resumed(api: Api) -> None:
    api.submit(queue="mail")
    api.submit(queue="mail", delay=3600)
    api.dead(queue="other")
    mail, other = api.get("/v1/queues")["queues"]
    assert (mail["name"], mail["states"]["queued"], mail["states"]["scheduled"]) == ("mail", 1, 1)
    assert mail["oldest_ready_seconds"] >= 0
    assert (other["name"], other["states"]["dead"], other["oldest_ready_seconds"]) == ("other", 1, None)
    assert api.post("/v1/queues/mail/pause") == {"name": "mail", "paused": True}
    assert api.get("/v1/queues/mail")["paused"] is True
    assert api.post("/v1/queues/mail/resume", {}) == {"name": "mail", "paused": False}
    assert api.get("/v1/queues/mail")["paused"] is False
    api.refused("GET", "/v1/queues/nothing", 404)
    api.refused("POST", "/v1/queues/%7Btag%7D/pause", 422)
    totals = api.get("/v1/stats")["counts"]
    assert {state: number for state, number in totals.items() if number} == {"queued": 1, "scheduled": 1, "dead": 1}


def test_workers_are_listed_and_asked_to_stop(api: Api) -> None:
    async def beat() -> None:
        store = await api.app.open_store()
        heartbeat = WorkerHeartbeat(worker="w-1", host="here", pid=1, queues="mail:2", concurrency=2)
        await store.queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=1))

    assert api.get("/v1/workers") == {"workers": []}
    api.run(beat())
    (worker,) = api.get("/v1/workers")["workers"]
    assert (worker["id"], worker["state"], worker["queues"]) == ("w-1", "working", "mail:2")
    api.refused("POST", "/v1/workers/stop", 404, json={"workers": ["w-2"]})
    partly = api.refused("POST", "/v1/workers/stop", 404, json={"workers": ["w-1", "w-2"]})
    assert "there is no living worker w-2; asked to stop: w-1" in partly["detail"]
    assert api.post("/v1/workers/stop", {"workers": ["w-1"], "drain": True}) == {"asked": ["w-1"], "drain": True}
    assert api.get("/v1/workers")["workers"][0]["state"] == "draining"
    assert api.post("/v1/workers/stop")["asked"] == ["w-1"]


def test_health_names_the_service(home: str) -> None:
    with Api(home, api_service="atlasqueue-api") as api:
        assert api.ask("GET", "/health").text == '{"status":"ok","service":"atlasqueue-api"}'
        assert api.get("/health/live") == api.get("/health")
        assert api.get("/health/ready")["status"] == "ready"


def test_stats_say_how_many_jobs_there_are_of_each_kind(api: Api) -> None:
    done = api.submit()["id"]
    api.submit(queue="mail")
    api.succeed(done)
    api.dead()
    api.submit(delay=3600)
    api.run(api.end(api.submit()["id"], Failed(error="again later")))

    stats = api.get("/v1/stats", minutes=10)

    counts = {state: number for state, number in stats["counts"].items() if number}
    assert counts == {"scheduled": 1, "queued": 1, "failed": 1, "succeeded": 1, "dead": 1}
    assert (stats["at_least"], stats["most"], stats["scheduled_for_retry"]) == ([], 10_000, 1)
    assert stats["attempts"] == {"0": 2, "1": 3}
    assert [(each["name"], each["counts"]["queued"]) for each in stats["by_queue"]] == [("default", 0), ("mail", 1)]
    by_worker = {each["worker"]: sum(each["counts"].values()) for each in stats["by_worker"]}
    assert by_worker == {None: 2, "worker-1": 3}
    recent = stats["recent"]
    assert (recent["minutes"], recent["counts"], recent["by_worker"]) == (10, stats["counts"], stats["by_worker"])
    assert recent["ended_per_second"] == round(2 / 600, 6)
    assert 0 <= recent["mean_seconds"] <= recent["longest_seconds"]
    assert stats["workers"] == []
    assert api.refused("GET", "/v1/stats?minutes=0", 422)["field"] == "minutes"


def test_history_is_shown_by_step_and_bounded(api: Api) -> None:
    found = api.get("/v1/stats/history")
    assert found["interval"] == "minute"
    assert 58 <= len(found["points"]) <= 60
    nothing = {"succeeded": 0, "dead": 0, "cancelled": 0, "mean_seconds": None, "longest_seconds": None}
    assert all(point == {"start": point["start"], **nothing} for point in found["points"])
    assert api.get("/v1/stats/history", since="7d")["interval"] == "hour"
    for since in ("32d", "0s", "soon", "5"):
        assert api.refused("GET", f"/v1/stats/history?since={since}", 422)["field"] == "since"
