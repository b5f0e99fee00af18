"""Requests as part of traces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace

from holdfast.core.events import LeaseAcquired
from holdfast.core.models import Job
from holdfast.telemetry.trace_context import trace_id_of
from tests.support.spans import Spans, identity, inside
from tests.web.client import Api

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def api(home: str) -> Iterator[Api]:
    with Api(home, traces=True) as api:
        yield api


def stored(api: Api, job_id: str) -> Job:
    async def get() -> Job:
        return await api.app.get(job_id)

    return api.run(get())


def test_submission_continues_the_trace_of_its_request(api: Api) -> None:
    spans = Spans()
    answer = api.post(
        "/v1/jobs", {"task": "work", "payload": {}}, 201, traceparent=PARENT, tracestate="vendor=1,other=2"
    )
    (request,) = spans.named("POST /v1/jobs")
    (submission,) = spans.named("submit work")
    assert request.parent is not None
    assert submission.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, SPAN)
    assert (submission.parent.trace_id, submission.parent.span_id) == identity(request)
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/jobs",
        "http.response.status_code": 201,
    }
    job = stored(api, answer["id"])
    assert trace_id_of(job) == TRACE
    assert job.options_or_default.traceparent == f"00-{TRACE}-{submission.context.span_id:016x}-01"
    assert job.options_or_default.tracestate == "vendor=1,other=2"
    assert api.get(f"/v1/jobs/{job.id}")["trace_id"] == TRACE


def test_a_header_that_is_no_context_is_ignored(api: Api) -> None:
    for header in ("nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff" + PARENT[2:], "x" * 8000, "\xff"):
        spans = Spans()
        answer = api.ask(
            "POST",
            "/v1/jobs",
            content=b'{"task": "work", "payload": {}}',
            headers=[
                (b"content-type", b"application/json"),
                (b"traceparent", header.encode("latin-1")),
                (b"tracestate", b"=,;\xfe"),
            ],
        )
        assert answer.status_code == 201
        (request,) = spans.named("POST /v1/jobs")
        assert request.parent is None
        assert trace_id_of(stored(api, answer.json()["id"])) == f"{request.context.trace_id:032x}"


def test_request_that_is_already_traced_gets_no_second_span(api: Api) -> None:
    spans = Spans()

    async def mounted() -> str:
        with inside("their own") as outer:
            await api.send("GET", "/v1/queues")
        return f"{outer.trace_id:032x}"

    api.run(mounted())
    assert [span.name for span in spans.ended] == ["their own"]


def test_a_waiting_claim_is_served_outside_of_every_trace(api: Api) -> None:
    """A single task serves the waiting claims of all requests."""
    seen: list[trace.SpanContext] = []
    api.app.events.subscribe(lambda _: seen.append(trace.get_current_span().get_span_context()), LeaseAcquired)

    async def claim_waiting() -> None:
        with inside("their own"):
            claim = {"worker": "js-1", "wait": 30, "limit": 1}
            claiming = asyncio.create_task(api.send("POST", "/v1/claims", json=claim))
        await api.until(api.app.workers)
        await asyncio.sleep(0.1)  # then the claim has found nothing, and waits
        await api.send("POST", "/v1/jobs", json={"task": "work", "payload": {}})
        assert len((await claiming).json()["jobs"]) == 1

    api.run(claim_waiting())
    assert [context.is_valid for context in seen] == [False]


def test_health_checks_make_no_spans_and_failures_do(api: Api) -> None:
    spans = Spans()
    api.get("/health")
    api.refused("GET", "/v1/jobs/key:nobody", 404)
    api.refused("GET", "/v1/nothing", 404)
    found = [(span.name, (span.attributes or {})["http.response.status_code"]) for span in spans.ended]
    assert found == [("GET /v1/jobs/{job_id}", 404), ("GET", 404)]
