"""``--metrics-port``: every worker process serves its own figures, and a taken port is reported at once."""

from __future__ import annotations

import json
import signal
import socket

import httpx
import pytest

from tests.interfaces.cli import Cli
from tests.support.plain_http import PLAIN


def test_every_worker_process_serves_its_own_metrics(cli: Cli) -> None:
    target = cli.write_jobs()
    for _ in range(5):
        cli.run("enqueue", "mail.send", "--arg", "to=a", "--app", target)
    words = ("worker", "start", "--app", target, "--processes", "2", "--metrics-port", "0")
    process = cli.process(*words, env={"HOLDFAST_LOG_FORMAT": "json"})
    try:
        addresses: list[str] = []
        assert process.stdout is not None
        while len(addresses) < 2:
            line = json.loads(process.stdout.readline())
            if line["event"] == "metrics_served":
                addresses.append(line["address"])
        assert len(set(addresses)) == 2
        succeeded = 0.0
        while succeeded < 5:
            for address in addresses:
                assert httpx.get(f"{address}/health/live", timeout=60, verify=PLAIN).json()["status"] == "ok"
            succeeded = sum(_succeeded(address) for address in addresses)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.communicate()


def _succeeded(address: str) -> float:
    """Jobs that the worker there has seen succeed."""
    headers = {"accept": "application/json"}
    metrics = httpx.get(f"{address}/metrics", headers=headers, timeout=60, verify=PLAIN).json()["metrics"]
    (metric,) = [each for each in metrics if each["name"] == "holdfast_jobs_succeeded_total"]
    return sum(series["value"] for series in metric["series"])


def test_occupied_metrics_port_is_reported_before_anything_starts(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = cli.complete("worker", "start", "--app", cli.write_jobs(), "--metrics-port", port)
    assert ended.returncode == 75  # a service manager starts it again
    assert b"metrics_port: cannot listen on 127.0.0.1:" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_that_is_none_is_refused(cli: Cli, port: str) -> None:
    assert "--metrics-port: " in cli.fail(
        "worker", "start", "--app", cli.write_jobs(), f"--metrics-port={port}", code=2
    )
    assert "holdfast: --port: " in cli.fail("api", f"--port={port}", code=2)
