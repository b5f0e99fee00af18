"""Claims over a socket: clients that hang up, and an API that ends, while claims wait."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.web.serving import Served

pytestmark = pytest.mark.timeout(240)


def waiting(served: Served, worker: str) -> socket.socket:
    """A connection on which a claim waits."""
    body = json.dumps({"worker": worker, "wait": 60, "lease": 3600}).encode()
    head = f"POST /v1/claims HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json"
    connection = served.connect()
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    with served.client() as client:
        until = time.monotonic() + 90
        while worker not in client.get("/v1/workers").text:
            assert time.monotonic() < until
            time.sleep(0.02)
    return connection


def submit(client: httpx.Client) -> str:
    answer = client.post("/v1/jobs", json={"task": "work", "payload": {}})
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def test_client_that_disconnects_while_waiting_keeps_no_job(home: str, tmp_path: Path) -> None:
    with Served(tmp_path, home) as served, served.client() as client:
        for number in range(3):
            gone = waiting(served, f"gone-{number}")
            gone.close()
            job_id = submit(client)
            answer = client.post("/v1/claims", json={"worker": "there", "wait": 30})
            assert [(job["id"], job["attempt"]) for job in answer.json()["jobs"]] == [(job_id, 1)]


def test_stopping_api_answers_waiting_claims(home: str, tmp_path: Path) -> None:
    with Served(tmp_path, home, grace="60s") as served:
        claiming = waiting(served, "js-1")
        served.process.send_signal(signal.SIGTERM)
        answer = b""
        while part := claiming.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert b'"jobs":[]' in answer
        assert served.process.wait(30) == 0
        claiming.close()
