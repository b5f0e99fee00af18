"""``/metrics`` of the API: exact on every store, few series, and an answer while the store is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from tests.support.postgres import Postgres
from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, refused
from tests.web.serving import Served

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name.removeprefix("holdfast_"), frozenset(sample.labels.items())): sample.value
        for family in text_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def requests(samples: Samples) -> Iterator[tuple[dict[str, str], float]]:
    for (name, labels), number in samples.items():
        if name == "http_requests_total":
            yield dict(labels), number


def test_submissions_requests_and_queues_are_counted(api: Api) -> None:
    """Requirements A83, A87, A93 and A94."""
    for _ in range(3):
        api.submit(task="mail", queue="post", status=201)
    for status in (201, 200, 200):
        api.submit(task="mail", key="one", status=status)
    api.submit(task="sms", delay=3600)
    dead = api.dead(task="sms")
    for number in range(100):
        api.refused("GET", f"/v1/jobs/{UNKNOWN_ID[:-3]}{number:03x}", 404)
    api.get(f"/v1/jobs/{dead}")
    api.post("/v1/queues/idle/pause")

    samples = parsed(api.ask("GET", "/metrics").text)

    assert value(samples, "jobs_submitted_total", task="mail") == 4
    assert value(samples, "jobs_submitted_total", task="sms") == 2
    assert value(samples, "jobs_idempotent_total", task="mail") == 2
    counted = {(each["path_template"], each["status_code"]): number for each, number in requests(samples)}
    assert counted["/v1/jobs", "201"] == 6
    assert counted["/v1/jobs", "200"] == 2
    assert counted["/v1/jobs/{job_id}", "404"] == 100
    assert counted["/v1/jobs/{job_id}", "200"] == 1
    labels = {"method": "POST", "path_template": "/v1/jobs", "status_code": "201"}
    assert value(samples, "http_request_duration_seconds_count", **labels) == 6
    assert value(samples, "http_requests_in_flight") == 1  # this very one
    assert value(samples, "store_up") == 1
    states = {labels: number for (name, labels), number in samples.items() if name == "queue_jobs" and number}
    assert {tuple(sorted(dict(each).values())): number for each, number in states.items()} == {
        ("post", "queued"): 3,
        ("default", "queued"): 1,
        ("default", "scheduled"): 1,
        ("dead", "default"): 1,
    }
    assert value(samples, "queue_paused", queue="idle") == 1
    assert 0 <= value(samples, "queue_oldest_seconds", queue="post") < 50
    assert value(samples, "predicted_drain_seconds") == 3600  # something waits, and there is no worker
    assert value(samples, "store_latency_seconds_count", verb="submit") >= 6


def test_tasks_registered_after_the_api_start_at_zero(api: Api) -> None:
    @api.app.task("mail.send")
    async def send() -> None: ...

    samples = parsed(api.ask("GET", "/metrics").text)

    for name in ("jobs_submitted_total", "jobs_idempotent_total", "jobs_failed_total", "jobs_dead_total"):
        assert value(samples, name, task="mail.send") == 0


def test_both_paths_answer_in_every_format(api: Api) -> None:
    """Requirements A9, A95, X16 and X17."""
    for path in ("/metrics", "/metrics/"):
        plain = api.ask("GET", path)
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert parsed(plain.text)
        openly = api.ask("GET", path, headers={"accept": "application/openmetrics-text;version=1.0.0"})
        assert list(open_families(openly.text))
        body: Any = api.ask("GET", path, headers={"accept": "application/json"}).json()
        assert "holdfast_queue_jobs" in {each["name"] for each in body["metrics"]}
        assert api.ask("HEAD", path).content == b""


def test_unknown_paths_make_one_series(api: Api) -> None:
    for number in range(50):
        api.refused("GET", f"/nowhere/{number}", 404)
        api.run(api.raw(f"M{number}", "/v1/jobs"))

    labels = [each for each, _ in requests(parsed(api.ask("GET", "/metrics").text))]

    assert sorted((each["method"], each["path_template"], each["status_code"]) for each in labels) == [
        ("GET", "other", "404"),
        ("other", "other", "405"),
    ]


@pytest.mark.parametrize("opened", [True, False])
def test_metrics_need_a_key_that_reads_every_queue(tmp_path: Path, opened: bool) -> None:
    keys = Keys(tmp_path)
    reader, some, submitter = keys.make("read"), keys.make("read", queues=("mail",)), keys.make("submit")
    url = f"sqlite:///{tmp_path}/jobs.db"
    with Api(url, keys_file=str(keys.path), metrics_open=opened) as api:
        assert ask(api, reader, "GET", "/metrics").status_code == 200
        if opened:
            assert ask(api, None, "GET", "/metrics").status_code == 200
        else:
            refused(ask(api, None, "GET", "/metrics"), 401, "unauthorized")
            refused(ask(api, some, "GET", "/metrics"), 403, "forbidden")
            refused(ask(api, submitter, "GET", "/metrics"), 403, "forbidden")


def test_metrics_are_served_while_the_store_is_down(tmp_path: Path) -> None:
    with (
        Postgres() as server,
        Served(tmp_path, server.url(), metrics_prefix="shop_") as served,
        served.client() as client,
    ):
        assert client.post("/v1/jobs", json={"task": "work", "payload": {}}).status_code == 201
        server.stop()
        answer = client.get("/metrics")
        assert answer.status_code == 200
        samples = parsed(answer.text)
        assert value(samples, "shop_store_up") == 0
        assert value(samples, "shop_jobs_submitted_total", task="work") == 1
        assert not any(name == "shop_queue_jobs" for name, _ in samples)
        assert json.loads(client.get("/metrics", headers={"accept": "application/json"}).text)["metrics"]
