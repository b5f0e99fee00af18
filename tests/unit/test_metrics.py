"""Metrics: what is heard is counted, and rendered in every format its reader may ask for."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from holdfast.core.events import Event, Events, JobDead, JobFailedEvent, LeaseLostEvent, ScheduleFired, SweepComplete
from holdfast.core.metric_events import JobsClaimed, JobsSubmitted, RequestAnswered, SettlementsWritten, StoreAnswered
from holdfast.telemetry.metric_types import OTHER, expose_metrics, wants_json
from holdfast.telemetry.metrics import Metrics


def failed(kind: type[Event], task: str, seconds: float, **more: Any) -> Event:
    return kind(job_id="1", task=task, attempt=1, reason="error", error="x", seconds=seconds, **more)


HEARD = (
    JobsSubmitted(created={"mail": 3, "sms": 1}, deduplicated={"mail": 2}),
    JobsClaimed(retried=2, refused=4, queue_wait={"default": [0.002, 3.0], "slow": [0.2]}),
    SettlementsWritten(size=5, succeeded={"mail": [0.02, 0.4]}),
    failed(JobFailedEvent, "mail", 1.5, retry_at=None),
    failed(JobDead, "mail", 0.5),
    failed(JobDead, "mail", 0.0),  # its worker was gone: it was never seen to end
    LeaseLostEvent(job_id="1", task="mail", worker_id="w"),
    ScheduleFired(
        schedule="nightly",
        task="mail",
        tick=datetime(2026, 1, 1, tzinfo=UTC),
        job_ids=["1", "2"],
        late=0.1,
        missed=3,
        skipped=0,
    ),
    SweepComplete(promoted=0, recovered=2, pruned=7),
    StoreAnswered(verb="claim", seconds=0.003, failed=False),
    StoreAnswered(verb="claim", seconds=2.0, failed=True),
    RequestAnswered(method="GET", path="/v1/jobs/{job_id}", status=200, seconds=0.004),
)


@pytest.fixture
def metrics() -> Metrics:
    events = Events()
    metrics = Metrics(events, labels=100)
    metrics.set_gauge("worker_slots", lambda: 10)
    for event in HEARD:
        events.emit(event)
    return metrics


def rendered(metrics: Metrics, accept: str = "", prefix: str = "holdfast_") -> tuple[str, str]:
    body, media = expose_metrics(metrics.read(), prefix=prefix, accept=accept)
    return body.decode(), media


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_families(text)
        for sample in family.samples
    }


def test_every_event_is_counted_where_it_belongs(metrics: Metrics) -> None:
    text, media = rendered(metrics)
    found = samples(text)

    def value(name: str, **labels: str) -> float:
        return found[f"holdfast_{name}", frozenset(labels.items())]

    assert media.startswith("text/plain; version=0.0.4")
    assert value("jobs_submitted_total", task="mail") == 3
    assert value("jobs_submitted_total", task="sms") == 1
    assert value("jobs_idempotent_total", task="mail") == 2
    assert value("jobs_succeeded_total", task="mail") == 2
    assert value("jobs_failed_total", task="mail") == 1
    assert value("jobs_dead_total", task="mail") == 2
    assert value("jobs_retried_total") == 2
    assert value("jobs_recovered_total") == 2
    assert value("jobs_pruned_total") == 7
    assert value("lease_acquired_total") == 3
    assert value("lease_rejected_total") == 4
    assert value("lease_lost_total") == 1
    assert value("schedule_runs_total", schedule="nightly") == 2
    assert value("schedule_missed_total", schedule="nightly") == 3
    assert value("job_duration_seconds_sum", task="mail", outcome="succeeded") == pytest.approx(0.42)
    assert value("job_duration_seconds_bucket", task="mail", outcome="succeeded", le="0.05") == 1
    assert value("job_duration_seconds_count", task="mail", outcome="failed") == 1
    assert value("job_duration_seconds_count", task="mail", outcome="dead") == 1
    assert value("job_lateness_seconds_count", queue="default") == 2
    assert value("settle_batch_jobs_bucket", le="5.0") == 1
    assert value("store_latency_seconds_count", verb="claim") == 2
    assert value("store_errors_total", verb="claim") == 1
    labels = {"method": "GET", "path_template": "/v1/jobs/{job_id}", "status_code": "200"}
    assert value("http_requests_total", **labels) == value("http_request_duration_seconds_count", **labels) == 1
    assert value("worker_slots") == 10


def test_open_metrics_parse_and_say_the_same(metrics: Metrics) -> None:
    text, media = rendered(metrics, "application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in open_families(text)}

    assert media.startswith("application/openmetrics-text; version=1.0.0")
    assert families["holdfast_jobs_retried"].samples[0].value == 2
    assert text.endswith("# EOF\n")


def test_json_has_every_metric_under_its_name(metrics: Metrics) -> None:
    text, media = rendered(metrics, "application/json")
    found = {each["name"]: each for each in json.loads(text)["metrics"]}

    assert media == "application/json"
    assert found["holdfast_jobs_dead_total"]["series"] == [{"labels": {"task": "mail"}, "value": 2.0}]
    [batches] = found["holdfast_settle_batch_jobs"]["series"]
    assert (batches["count"], batches["sum"], batches["buckets"]["5.0"]) == (1, 5.0, 1)


def test_the_prefix_is_the_settings_own(metrics: Metrics) -> None:
    text, _ = rendered(metrics, prefix="atlasqueue_")

    assert "holdfast_" not in text
    assert 'atlasqueue_jobs_submitted_total{task="mail"} 3.0' in text


def test_task_field_names_the_label_of_the_task() -> None:
    events = Events()
    metrics = Metrics(events, labels=10, tasks=lambda: ["mail"], task_field="job_type")

    text, _ = rendered(metrics)
    assert 'holdfast_jobs_dead_total{job_type="mail"} 0.0' in text
    assert 'task="' not in text


def test_twelve_metrics_are_there_before_anything_happened() -> None:
    """Requirements A83 to A94: a dashboard finds each, if only as a name."""
    metrics = Metrics(Events(), labels=1)
    metrics.set_gauge("worker_active_jobs", lambda: 0)
    text, _ = rendered(metrics)
    counters = ("submitted", "succeeded", "failed", "dead", "idempotent", "retried")
    wanted = [f"jobs_{each}_total" for each in counters]
    wanted += ["lease_acquired_total", "lease_rejected_total", "worker_active_jobs", "job_duration_seconds"]
    wanted += ["http_request_duration_seconds", "http_requests_total"]

    assert [name for name in wanted if f"# TYPE holdfast_{name} " not in text] == []


def test_tasks_beyond_the_cap_are_one_series() -> None:
    events = Events()
    metrics = Metrics(events, labels=2)
    events.emit(JobsSubmitted(created={f"task-{number}": 1 for number in range(50)}, deduplicated={}))
    found = samples(rendered(metrics)[0])

    submitted = {dict(labels)["task"]: n for (name, labels), n in found.items() if "submitted_total" in name}
    assert submitted == {"task-0": 1, "task-1": 1, OTHER: 48}


def test_label_with_any_text_is_exported_unchanged() -> None:
    events = Events()
    metrics = Metrics(events, labels=2)
    events.emit(JobsSubmitted(created={'a"b\\c\nd': 1}, deduplicated={}))

    assert ("holdfast_jobs_submitted_total", frozenset({("task", 'a"b\\c\nd')})) in samples(rendered(metrics)[0])


def test_closed_it_counts_no_more() -> None:
    events = Events()
    metrics = Metrics(events, labels=2)
    metrics.close()

    assert not events.has_subscriber(JobsSubmitted)
    assert not events.has_subscriber(SettlementsWritten)


@pytest.mark.parametrize(
    ("accept", "json"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", True),
        ("application/json;q=0.9, text/plain;q=0.5", True),
        ("text/plain, application/json", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("text/html, application/json", True),
        ("application/json, text/plain, */*", True),
        ("text/plain;q=0.5, application/json", True),
        ("text/plain; q=0.5, application/json; q=0.6, */*;q=0.1", True),
        ("application/json;q=0.4, text/plain", False),
        ("application/json;q=0.4, text/plain;version=0.0.4;q=0.5", False),
        ("text/plain;version=0.0.4;q=0.4, application/json;q=0.4", False),
        ("application/json;q=x, text/plain;q=1.0", True),
        ("text/plain;q=1.0, application/json;q=nan", False),
        ("application/json;q=-1, text/plain;q=0.1", False),
        ("application/json;q=, text/plain", True),
        ("application/json;q=0", False),
        ("application/json;q=0.000, text/html", False),
        ("text/plain;q=0, application/json;q=0.1", True),
        ("application/json;q=0.5, text/plain;q=0.50", True),
        ("text/plain;q=0.5, application/json;q=0.500", False),
        ("text/plain;q=0.45, application/json;q=0.5", True),
        ("application/json;seq=0;q=0.5;level=1, text/plain;q=0.5", True),
        ("text/plain;\tq=0.5,\tapplication/json ;\tq=0.6", True),
    ],
)
def test_json_is_served_only_if_preferred(accept: str, json: bool) -> None:
    assert wants_json(accept) is json
