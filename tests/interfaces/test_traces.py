"""Traces across processes, exported by OTLP to a receiver here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interfaces.cli import ROOT, Cli
from tests.interfaces.otlp import Receiver, Span, receiving
from tests.support.pages import find_block

REPORTS = find_block("docs/observability.md", "# reports.py").text
SHOWN = find_block("docs/observability.md", "span ").text
PRINTER = """

@app.task("report.print", executor="process", max_attempts=1)
def print_it(month: str) -> str:
    with tracer.start_as_current_span("print pages"):
        found = f"{trace.get_current_span().get_span_context().trace_id:032x}"
    provider.force_flush()
    return found
"""

pytestmark = pytest.mark.timeout(180)  # several processes on a busy machine


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def environment(receiver: Receiver, service: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:.",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
        "OTEL_SERVICE_NAME": service,
    }


def submitted(receiver: Receiver, *words: str) -> str:
    """What a submitting process prints: the id of its job."""
    done = subprocess.run(
        [sys.executable, *words], env=environment(receiver, "shop"), stdout=subprocess.PIPE, check=True, timeout=60
    )
    return done.stdout.decode().strip()


def tree(spans: list[Span], parent: str = "", depth: int = 0) -> list[list[str]]:
    """The spans as the page shows them."""
    rows = []
    for span in sorted((each for each in spans if each.parent == parent), key=lambda each: each.began):
        given = span.attributes
        came = f"attempt {given['holdfast.attempt']}: {given['holdfast.state']}" if "holdfast.attempt" in given else ""
        came += f", {given['error.type']}" if "error.type" in given else ""
        rows.append(["  " * depth + span.name, span.service, span.kind, came])
        rows += tree(spans, span.id, depth + 1)
    return rows


def test_submit_run_retry_success_is_one_trace_across_two_processes(cli: Cli) -> None:
    target = cli.write_jobs(REPORTS)
    with receiving() as receiver:
        job_id = submitted(receiver, f"{target.partition(':')[0]}.py")
        worker = cli.process("worker", "start", "--app", target, env=environment(receiver, "reports"))
        try:
            until(lambda: cli.state(job_id) == "succeeded", "the end of the job")
        finally:
            worker.send_signal(signal.SIGTERM)
            given, _ = worker.communicate(timeout=40)
        until(lambda: len(receiver.spans) >= 6, "every span")

    (root,) = receiver.named("close the month")
    assert cli.json("show", job_id)["trace_id"] == root.trace
    assert root.trace in cli.run("show", job_id)
    (submission,) = receiver.named("submit report.build")
    runs = receiver.named("run report.build")
    failed, succeeded = sorted(runs, key=lambda span: int(span.attributes["holdfast.attempt"]))
    assert {span.trace for span in receiver.spans} == {root.trace}
    assert [span.service for span in (root, submission, failed, succeeded)] == ["shop", "shop", "reports", "reports"]
    assert (submission.kind, submission.parent) == ("producer", root.id)
    for attempt, span in enumerate((failed, succeeded), 1):
        assert (span.kind, span.parent, span.links) == ("consumer", submission.id, [(root.trace, submission.id)])
        assert span.attributes["holdfast.attempt"] == attempt
        assert (span.attributes["messaging.message.id"], span.attributes["messaging.system"]) == (job_id, "holdfast")
    assert (failed.failed, failed.attributes["holdfast.state"]) == (True, "failed")
    assert failed.attributes["error.type"] == "ValueError"
    ((event, exception),) = failed.events
    assert (event, exception["exception.message"]) == ("exception", "the file is locked")
    assert "in build" in exception["exception.stacktrace"]
    assert (succeeded.failed, succeeded.attributes["holdfast.state"], succeeded.events) == (False, "succeeded", [])
    assert {span.parent for span in receiver.named("read rows")} == {failed.id, succeeded.id}
    assert len(receiver.spans) == 6

    rows = [["span", "service", "kind", "what came of it"], *tree(receiver.spans)]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    table = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    assert table == SHOWN.splitlines()

    lines = [json.loads(line) for line in given.splitlines()]
    about = [line for line in lines if line["event"] in ("reading", "job_failed")]
    assert {line["event"] for line in about} == {"reading", "job_failed"}
    assert {(line["job_id"], line["task"], line["trace_id"]) for line in about} == {
        (job_id, "report.build", root.trace)
    }


def test_handler_in_a_child_process_is_part_of_the_trace(cli: Cli) -> None:
    target = cli.write_jobs(REPORTS + PRINTER)
    with receiving() as receiver:
        words = ("-m", "holdfast", "enqueue", "report.print", '{"month": "may"}', "--app", target)
        job_id = submitted(receiver, *words)
        worker = cli.process("worker", "start", "--app", target, env=environment(receiver, "reports"))
        try:
            until(lambda: cli.state(job_id) == "succeeded", "the end of the job")
            until(lambda: receiver.named("print pages"), "the span of the child")
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=40)
        until(lambda: len(receiver.spans) >= 3, "every span")
    (submission,) = receiver.named("submit report.print")
    (run,) = receiver.named("run report.print")
    (inner,) = receiver.named("print pages")
    assert (submission.parent, run.parent, inner.parent) == ("", submission.id, run.id)
    assert {submission.trace, run.trace, inner.trace} == {cli.json("show", job_id)["result"]}


def test_nothing_of_opentelemetry_is_imported_unless_it_is_wanted(tmp_path: Path) -> None:
    program = (
        "import sys; import holdfast.cli, holdfast.worker.process, holdfast.web, holdfast.telemetry.logs; "
        "from holdfast import Holdfast; app = Holdfast(); app.sync.enqueue('x'); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == b"[]"


def test_a_receiver_that_is_away_hinders_nothing(cli: Cli) -> None:
    target = cli.write_jobs(REPORTS)
    with receiving() as receiver:
        gone = {**environment(receiver, "shop"), "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    words = ("enqueue", "report.build", '{"month": "may"}', "--wait-for", "80s", "--app", target)
    submitting = cli.process(*words, env=gone)
    worker = cli.process("worker", "start", "--app", target, env=gone)
    try:
        given, _ = submitting.communicate(timeout=90)
    finally:
        submitting.kill()
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)
    assert (submitting.returncode, given.decode().strip(), worker.returncode) == (0, '"report of may"', 0)
