"""The spans of submissions and attempts in one process. (Across processes: tests/interfaces/test_traces.py)"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from holdfast import Context, Dead, Holdfast, Invalid, RetryAfter, Snooze
from holdfast.core.models import Job, Options
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from holdfast.tasks import CURRENT
from holdfast.telemetry.trace_context import JobFields, add_job_fields, trace_id_of
from tests.support.spans import Spans, identity, inside
from tests.worker.support import harness

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    return Holdfast(f"sqlite:///{tmp_path}/jobs.db", traces=True)


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


async def test_submission_and_attempts_are_spans_of_one_trace(app: Holdfast) -> None:
    seen: list[int] = []

    @app.task("blocking", queue="mail")
    def blocking() -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    spans = Spans()
    async with harness(app) as harnessed:
        with inside("request") as request:
            job = await blocking.enqueue()
        await harnessed.run_until_idle()
    (submission,), (run,) = spans.named("submit blocking"), spans.named("run blocking")
    assert parent_of(submission) == (request.trace_id, request.span_id)
    assert parent_of(run) == identity(submission)
    assert [(link.context.trace_id, link.context.span_id) for link in run.links] == [identity(submission)]
    assert seen == [run.context.span_id]
    assert dict(submission.attributes or {}) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "submit",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "messaging.message.id": job.id,
        "holdfast.task": "blocking",
    }
    kept = await job.job()
    assert trace_id_of(kept) == f"{request.trace_id:032x}"
    await app.close()


async def test_batch_is_one_span_above_all_its_jobs(app: Holdfast) -> None:
    @app.task("small")
    async def small(n: int) -> None: ...

    spans = Spans()
    async with harness(app) as harnessed:
        await app.enqueue_many([small.new_job(n) for n in range(3)])
        await harnessed.run_until_idle()
    (submission,) = spans.named("submit small")
    assert (submission.attributes or {})["messaging.batch.message_count"] == 3
    assert [parent_of(run) for run in spans.named("run small")] == [identity(submission)] * 3
    await app.close()


async def test_a_span_says_how_its_attempt_ended(app: Holdfast) -> None:
    @app.task("ends", max_attempts=1)
    async def ends(ctx: Context, how: str) -> None:
        if ctx.attempts == 1 and not ctx.claims > 1:
            raise {"dead": Dead("for good"), "snoozed": Snooze(5), "failed": ValueError("no"), "exit": SystemExit(3)}[
                how
            ]

    spans = Spans()
    async with harness(app, defer_for="0s") as harnessed:
        for how in ("dead", "snoozed", "failed", "exit"):
            await ends.enqueue(how)
            await harnessed.run_until_idle()
        await app.enqueue("nowhere", max_attempts=1)
        await harnessed.run_until_idle()
    found = [
        (run.name, (run.attributes or {})["holdfast.state"], (run.attributes or {}).get("error.type"), len(run.events))
        for run in spans.ended
        if run.name.startswith("run")
    ]
    assert found == [
        ("run ends", "dead", "non_retryable", 1),
        ("run ends", "scheduled", None, 0),
        ("run ends", "succeeded", None, 0),
        ("run ends", "dead", "ValueError", 1),
        ("run ends", "dead", "SystemExit", 1),
        ("run nowhere", "dead", "no_handler", 1),
    ]
    await app.close()


@pytest.mark.parametrize(
    "stored",
    [
        "nonsense",
        "",
        "\0",
        "\ud800",
        PARENT.upper(),
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        "ff" + PARENT[2:],
        "x" * 100_000,
    ],
    ids=range(8),
)
async def test_invalid_trace_context_starts_a_new_trace(app: Holdfast, stored: str) -> None:
    @app.task("small")
    async def small() -> None: ...

    job = Job("j", "small", "default", "{}", 1, 1, 5, 0, 0, 0, 0, Options(traceparent=stored, tracestate="=,\0;"))
    spans = Spans()
    assert app.spans is not None
    app.spans.start_execution(job, "w").end_span("succeeded")
    assert trace_id_of(job) is None
    (run,) = spans.named("run small")
    assert (run.parent, list(run.links)) == (None, [])


def test_log_records_say_which_job_and_trace_they_are_of() -> None:
    job = Job("job-1", "mail", "default", "{}", 1, 3, 5, 0, 0, 0, 0, Options(traceparent=PARENT))
    record = logging.makeLogRecord({})
    assert JobFields().filter(record)
    assert (record.job_id, record.trace_id) == ("-", "-")  # type: ignore[attr-defined]
    token = CURRENT.set(Context(job))
    try:
        JobFields().filter(record)
        found = {"job_id": "job-1", "task": "mail", "queue": "default", "attempt": 3}
        found["trace_id"] = "4bf92f3577b34da6a3ce929d0e0e4736"
        assert {name: vars(record)[name] for name in found} == found
        assert add_job_fields(None, "info", {"event": "x", "queue": "its own"}) == {
            **found,
            "event": "x",
            "queue": "its own",
        }
        Spans()
        with inside("handler") as span:
            assert add_job_fields(None, "info", {})["trace_id"] == f"{span.trace_id:032x}"
    finally:
        CURRENT.reset(token)
    assert json.dumps(dict(add_job_fields(None, "info", {}))) == "{}"


async def test_steps_are_spans_of_their_attempts(app: Holdfast) -> None:
    seen: list[int] = []

    def note() -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    @app.task("order")
    async def order(context: Context) -> None:
        for _ in range(2):
            await context.step("charge", note)
        await context.wait_for("approved", timeout=60)

    @app.task("blocking")
    def blocking(context: Context) -> None:
        context.sync.step("charge", note)

    spans = Spans()
    async with harness(app) as harnessed:
        await harnessed.start()
        await app.signal("approved")
        for task in (order, blocking):
            await task.enqueue()
            await harnessed.run_until_idle()
    (run,), (blocking_run,) = spans.named("run order"), spans.named("run blocking")
    steps = spans.named("step charge")
    assert [parent_of(step) for step in steps] == [identity(run)] * 2 + [identity(blocking_run)]
    assert [step.context.span_id for step in steps] == seen
    assert [dict(step.attributes or {})["holdfast.step"] for step in steps] == ["charge", "charge#2", "charge"]
    await app.close()


def exported(span: ReadableSpan) -> str:
    """All text of a span that leaves the process."""
    return f"{span.status.description} {dict(span.attributes or {})} {[dict(e.attributes or {}) for e in span.events]}"


@pytest.mark.parametrize("redacted", [[], ["payload.card"], ["error"]], ids=str)
async def test_error_in_a_span_is_masked_and_hidden_as_in_the_log(tmp_path: Path, redacted: list[str]) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", traces=True, redacted=redacted)

    def refuse() -> None:
        raise ValueError("card 4111-1111 is refused by https://shop:hunter2@bank")

    @app.task("charge", max_attempts=1)
    async def charge(context: Context, card: str) -> None:
        await context.step("ask", refuse)

    spans = Spans()
    async with harness(app) as harnessed:
        await charge.enqueue("4111-1111")
        await harnessed.run_until_idle()
    assert app.spans is not None
    with (
        pytest.raises(ValueError, match="refused"),
        app.spans.submission_span([charge.new_job("1"), charge.new_job("2")]),
    ):
        refuse()
    failed = [*spans.named("run charge"), *spans.named("step ask"), spans.named("submit charge")[-1]]
    assert len(failed) == 3
    for span in failed:
        assert span.status.status_code is trace.StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ValueError"
        text = exported(span)
        assert "hunter2" not in text
        assert ("4111-1111" in text) is ("ValueError: card" in text) is not redacted
    await app.close()


async def test_refused_value_is_in_no_span_of_an_application_with_a_codec(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", traces=True, codec=AesGcmCodec({"key": new_key()}))

    @app.task("bill")
    async def bill(cents: int) -> None: ...

    @app.task("order", max_attempts=1)
    async def order(context: Context, name: str) -> None:
        await context.step("bill", lambda: app.enqueue("bill", {"cents": name}))

    @app.task("fails", max_attempts=1)
    async def fails(context: Context) -> None:
        await context.step("ask", lambda: 1 // 0)

    @app.task("choose", max_attempts=1)
    async def choose(context: Context, name: str) -> None:
        def misfit() -> Literal["yes", "no"]:
            return name  # type: ignore[return-value]

        await context.step("misfit", misfit)

    @app.task("retry", max_attempts=1)
    async def retry(context: Context, name: str) -> None:
        async def again() -> None:
            try:
                await app.enqueue("bill", {"cents": name})
            except Invalid:
                raise RetryAfter(1, "later")  # noqa: B904 - without "from", as many write it

        await context.step("again", again)

    spans = Spans()
    async with harness(app) as harnessed:
        for task in (order, choose, retry):
            await task.enqueue("Ada Smith")
        await fails.enqueue()
        await harnessed.run_until_idle()
    (run,), (step,), (other,) = [spans.named(name) for name in ("run order", "step bill", "step ask")]
    (misfit,), (again,) = spans.named("step misfit"), spans.named("step again")
    assert "does not fit the function's return annotation: ValidationError" in exported(misfit)
    assert "RetryAfter: later" in exported(again)
    assert (step.status.status_code, dict(step.attributes or {})["error.type"]) == (trace.StatusCode.ERROR, "Invalid")
    assert "argument 'cents' of task 'bill': [encrypted] is not valid" in exported(run)
    assert "ZeroDivisionError: integer" in exported(other)
    assert not any("Ada Smith" in exported(span) for span in spans.ended)
    await app.close()


async def test_step_that_snoozes_its_job_is_no_error(app: Holdfast) -> None:
    @app.task("order")
    async def order(context: Context) -> None:
        def ask() -> None:
            if context.claims == 1:
                raise Snooze(5)

        await context.step("ask", ask)

    spans = Spans()
    async with harness(app) as harnessed:
        await order.enqueue()
        await harnessed.run_until_idle()
    assert [step.status.status_code for step in spans.named("step ask")] == [trace.StatusCode.UNSET] * 2
    await app.close()
