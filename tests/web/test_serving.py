"""``holdfast api``: a process, its socket and its signals."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.interfaces.cli import ROOT, Cli
from tests.web.serving import Served

JOB = {"task": "work", "payload": {}}


def test_it_serves_and_ends_well_on_sigterm(home: str, tmp_path: Path) -> None:
    with Served(tmp_path, home) as served, served.client() as client:
        assert client.get("/health").json() == {"status": "ok", "service": "holdfast-api"}
        job = client.post("/v1/jobs", json=JOB)
        assert (job.status_code, "server" in job.headers) == (201, False)
        assert client.get(f"/v1/jobs/{job.json()['id']}").json()["state"] == "queued"
        assert served.stop() == 0
        assert served.line("api_stopping")["reason"] == "SIGTERM"


def test_64_parallel_posts_of_one_key_make_one_job(home: str, tmp_path: Path) -> None:
    with Served(tmp_path, home) as served:
        barrier, codes, ids = threading.Barrier(64), [], set()

        def post() -> None:
            with served.client() as client:
                barrier.wait(30)
                answer = client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "one"})
                codes.append(answer.status_code)
                ids.add(answer.json()["id"])

        threads = [threading.Thread(target=post) for _ in range(64)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (sorted(codes), len(ids)) == ([200] * 63 + [201], 1)


def test_oversized_body_is_answered_before_it_has_arrived(tmp_path: Path) -> None:
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1073741824\r\n\r\n"
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.connect() as connection:
        connection.sendall(head)
        answer = b""
        while part := connection.recv(65_536):  # until the server closes
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["code"] == "too_large"


def test_large_body_is_sent_whole_before_its_refusal_is_read(tmp_path: Path) -> None:
    body = b" " * (8 * 1024 * 1024)
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.connect() as connection:
        connection.sendall(head % len(body) + body)
        answer = b""
        while part := connection.recv(65_536):  # a reset would raise
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--exposed"),  # noqa: S104 - that it is refused is the test
        (["--host", "::"], "--exposed"),
        (["--host", "not a host"], "api_host"),
        (["--port", "70000"], "api_port"),
        (["--port", "http"], "api_port"),
    ],
    ids=str,
)
def test_an_address_that_is_not_to_be_served_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    program = [sys.executable, "-m", "holdfast", "api", *words]
    ran = subprocess.run(
        program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=40, check=False
    )
    assert ran.returncode in (2, 78)
    assert message in ran.stderr.replace("--host", "api_host").replace("--port", "api_port")
    assert "Traceback" not in ran.stderr


def test_occupied_port_is_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with Served(tmp_path, url) as served:
        ran = Cli(tmp_path).complete("api", "--port", str(served.port))
    assert ran.returncode == 78
    assert b"cannot listen on 127.0.0.1" in ran.stderr


def test_a_burst_of_stop_signals_keeps_the_grace_of_requests(tmp_path: Path) -> None:
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", grace="60s") as served, served.connect() as slow:
        slow.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 30\r\n\r\n{")
        with served.client() as client:
            client.get("/health")  # by then it has read the beginning of the other request
        for number in (signal.SIGTERM, signal.SIGINT):
            served.process.send_signal(number)
        served.line("api_stopping")
        time.sleep(1.5)
        assert served.process.poll() is None
        assert served.stop() == 0  # a second one, a second later: at once


def test_a_read_that_waits_is_answered_when_the_server_stops(tmp_path: Path) -> None:
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", grace="60s") as served, served.connect() as waiting:
        with served.client() as client:
            job_id = client.post("/v1/jobs", json=JOB).json()["id"]
            waiting.sendall(f"GET /v1/jobs/{job_id}?wait=50 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            client.get("/health")  # by then it has read the request that waits
        served.process.send_signal(signal.SIGTERM)
        waiting.settimeout(40)
        answer = b""
        while part := waiting.recv(65536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b'"state":"queued"' in answer
        assert served.process.wait(40) == 0


def test_it_speaks_tls(tmp_path: Path) -> None:
    files = {"tls_certificate": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    wanted = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    made = ["-out", files["tls_certificate"], "-keyout", files["tls_key"]]
    subprocess.run(["openssl", *wanted.split(), *made], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=files["tls_certificate"])
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", **files) as served, served.client(verify=trusted) as client:
        assert served.address.startswith("https://")
        assert client.post("/v1/jobs", json=JOB).status_code == 201
        message = time.monotonic()
        assert served.stop(signal.SIGINT) == 0  # though the client is still connected
        assert time.monotonic() - message < 20
