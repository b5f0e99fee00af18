"""The AtlasQueue example's metrics, of the API and of a worker. Tests are named by the rows they prove."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.examples.atlasqueue_support import Atlasqueue
from tests.examples.common import PATIENCE, until
from tests.examples.programs import Program
from tests.support.plain_http import PLAIN

pytestmark = pytest.mark.timeout(400)

NAMES = {
    "jobs_submitted_total",
    "jobs_succeeded_total",
    "jobs_failed_total",
    "jobs_dead_total",
    "jobs_idempotent_total",
    "jobs_retried_total",
    "lease_acquired_total",
    "lease_rejected_total",
    "worker_active_jobs",
    "job_duration_seconds",
    "http_request_duration_seconds",
    "http_requests_total",
}
"""The twelve of the document, without their prefix."""
Figures = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def figures(address: str) -> Figures:
    """What stands at an address, by name and labels, once a parser of Prometheus has read it."""
    answer = httpx.get(address, timeout=PATIENCE, verify=PLAIN, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def of(figures: Figures, name: str, **labels: Any) -> float:
    """One of them; 0 where it is not there."""
    return figures.get((f"atlasqueue_{name}", frozenset((key, str(value)) for key, value in labels.items())), 0.0)


@pytest.mark.rows("A9", "A83", "A87", "A93", "A94", "A95", "A125")
def test_api_counts_submissions_and_requests(atlasqueue: Atlasqueue) -> None:
    with atlasqueue.api() as api:
        for key in ("one", "two", "three", "one", "one"):
            api.post(key=key)
        for _ in range(100):
            api.client.get(f"/v1/jobs/{uuid4()}")
            api.client.get(f"/{uuid4()}")
        metric = figures(f"{api.address}/metrics")
        assert of(metric, "jobs_submitted_total", job_type="noop") == 3
        assert of(metric, "jobs_idempotent_total", job_type="noop") == 2
        shown = {"method": "GET", "path_template": "/v1/jobs/{job_id}", "status_code": 404}
        posted = {"method": "POST", "path_template": "/v1/jobs", "status_code": 201}
        assert of(metric, "http_requests_total", **shown) == 100
        assert of(metric, "http_requests_total", **posted) == 3
        assert of(metric, "http_request_duration_seconds_count", **shown) == 100
        assert of(metric, "http_requests_total", **{**shown, "path_template": "other"}) == 100
        templates = {
            dict(labels)["path_template"] for name, labels in metric if name == "atlasqueue_http_requests_total"
        }
        asked = {"/v1/jobs", "/v1/jobs/{job_id}", "other"}
        assert asked <= templates <= asked | {"/metrics"}
        assert of(figures(f"{api.address}/metrics/"), "jobs_submitted_total", job_type="noop") == 3


def metrics_address(worker: Program) -> str:
    """Returns the address of the metrics of this worker."""
    return str(worker.wait_for_events("metrics_served")[0]["address"])


@pytest.mark.rows("A25", "A84", "A85", "A86", "A88", "A89", "A90", "A91", "A92", "A96", "A135")
def test_worker_counts_its_work(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    with atlasqueue.worker() as worker:
        address = metrics_address(worker)

        def metric(name: str, **labels: Any) -> float:
            return of(figures(address), name, **labels)

        slow = atlasqueue.submit("test.wait", {"until": str(tmp_path / "open")})
        until(lambda: metric("worker_active_jobs") == 1, "the slow job at work")
        (tmp_path / "open").touch()
        failing, done = atlasqueue.submit("test.fail", max_attempts=3), atlasqueue.submit()
        atlasqueue.all_ended([slow, done])
        atlasqueue.all_ended([failing], "dead")
        before = metric("lease_rejected_total")
        atlasqueue.push(done, done)
        until(lambda: metric("lease_rejected_total") >= before + 2, "two refused claims")
        expected = {
            ("jobs_failed_total", "test.fail"): 2,
            ("jobs_dead_total", "test.fail"): 1,
            ("jobs_succeeded_total", "noop"): 1,
            ("jobs_succeeded_total", "test.wait"): 1,
            ("jobs_succeeded_total", "test.fail"): 0,
        }
        until(lambda: {each: metric(each[0], job_type=each[1]) for each in expected} == expected, "the counts of jobs")
        until(lambda: metric("worker_active_jobs") == 0, "no handler at work")
        assert (metric("jobs_retried_total"), metric("lease_acquired_total")) == (2, 5)
        counts = [
            metric("job_duration_seconds_count", job_type="test.fail", outcome=each) for each in ("failed", "dead")
        ]
        assert counts == [2, 1]
        until(lambda: 1 <= _taken(atlasqueue, address) <= 1.2, "a second, give or take a fifth")


def _taken(queue: Atlasqueue, address: str) -> float:
    """What a job that takes a second adds to the time of its type."""
    labels = {"job_type": "test.sleep", "outcome": "succeeded"}

    def metric(what: str) -> float:
        return of(figures(address), f"job_duration_seconds_{what}", **labels)

    before, number = metric("sum"), metric("count")
    queue.all_ended([queue.submit("test.sleep", {"seconds": 1})])
    until(lambda: metric("count") == number + 1, "the job's count")
    return metric("sum") - before


@pytest.mark.rows("A123", "A125")
def test_every_documented_metric_exists_from_the_start(atlasqueue: Atlasqueue) -> None:
    """Before anything was counted: a dashboard finds each of them."""
    with atlasqueue.api() as api, atlasqueue.worker() as worker:
        texts = [
            httpx.get(address, timeout=PATIENCE, verify=PLAIN).text
            for address in (f"{api.address}/metrics", metrics_address(worker))
        ]
    named = {line.split()[2] for text in texts for line in text.splitlines() if line.startswith("# TYPE ")}
    assert {f"atlasqueue_{name}" for name in NAMES} <= named
