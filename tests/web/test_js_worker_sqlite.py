"""The JavaScript worker with invalid settings: it prints one line, and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.node import NODE, WORKER, run_node
from tests.support.pages import find_block
from tests.web.keyed import Keys
from tests.web.serving import Served


def _ended(**settings: str) -> tuple[int, str]:
    """The worker's exit code, and what it wrote."""
    variables = {f"HOLDFAST_{name.upper()}": value for name, value in settings.items()}
    ended = subprocess.run(
        [str(NODE), str(WORKER)],
        env={"PATH": os.defpath, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queues", "mail"),
        ("queues", '["mail"]'),
        ("queues", '{"mail": "5"}'),
        ("concurrency", "x"),
        ("concurrency", "0"),
        ("lease", "-1"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_it(name: str, value: str) -> None:
    code, output = _ended(api_url="http://127.0.0.1:9", **{name: value})
    assert code == 78
    assert output.startswith(f"HOLDFAST_{name.upper()}: ")
    assert len(output.splitlines()) == 1


def test_a_key_that_is_refused_ends_it(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path)) as served:
        unknown = _ended(api_url=served.address, api_key=keys.spare[:-4] + "0000")
        reader = _ended(api_url=served.address, api_key=keys.make("read"))
    for code, output in (unknown, reader):
        assert code == 1
        assert '"worker_stopping"' in output
        assert '"reason":"refused"' in output


HANDLER_OF_THE_GUIDE = f"""
import {{ createServer }} from "node:http";
import {{ Dead, RetryAfter }} from "{WORKER.with_name("holdfast.js")}";

const server = createServer((request, response) => response.writeHead(status).end());
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const mailer = `http://127.0.0.1:${{server.address().port}}`;
const signal = new AbortController().signal;
let status = 200;
const handlers = {{
{find_block("examples/js_worker/README.md", '"email.send"').text}
}};
for (status of [200, 429, 400]) {{
  const outcome = await handlers["email.send"]({{ to: "a@b.c" }}, {{ signal }}).catch((error) => error);
  console.log(outcome instanceof Error ? outcome.constructor.name : JSON.stringify(outcome));
}}
server.closeAllConnections();
server.close();
"""


def test_handler_of_the_guide_does_what_the_guide_says(tmp_path: Path) -> None:
    program = tmp_path / "program.mjs"
    program.write_text(HANDLER_OF_THE_GUIDE, encoding="utf-8")
    assert run_node(program, cwd=tmp_path).splitlines() == ['{"sent":true}', "RetryAfter", "Dead"]


ODD_HANDLERS = f"""
import {{ RetryAfter, Worker }} from "{WORKER.with_name("holdfast.js")}";

const circular = {{}};
circular.self = circular;
const handlers = {{
  plain: async () => 1,
  slow: async () => new Promise((resolve) => setTimeout(() => resolve(2), 300)),
  bigint: async () => ({{ rows: 10n }}),
  circular: async () => circular,
  bare: async () => {{ throw Object.create(null); }},
  spoiled: async () => {{ throw new RetryAfter(10n); }},
}};
const worker = new Worker({{ url: process.env.HOLDFAST_API_URL, handlers, wait: 1 }});
process.on("SIGTERM", () => worker.stop());
await worker.run();
process.exit();
"""


def test_odd_results_and_errors_end_their_own_job_only(tmp_path: Path) -> None:
    program = tmp_path / "program.mjs"
    program.write_text(ODD_HANDLERS, encoding="utf-8")
    expected = {
        "bigint": ("dead", "result"),
        "circular": ("dead", "result"),
        "bare": ("dead", "max_attempts"),
        "spoiled": ("dead", "max_attempts"),
        "slow": ("succeeded", None),
        "plain": ("succeeded", None),
    }
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.client() as client:
        common = {"payload": {}, "timeout": "26d", "max_attempts": 1}
        ids = {name: client.post("/v1/jobs", json={"task": name, **common}).json()["id"] for name in expected}
        environment = {"PATH": os.defpath, "HOLDFAST_API_URL": served.address}
        worker = subprocess.Popen([str(NODE), str(program)], env=environment, stdout=subprocess.PIPE, text=True)
        jobs = {name: client.get(f"/v1/jobs/{ids[name]}", params={"wait": 30}).json() for name in expected}
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=50)
    assert {name: (job["state"], job["reason"]) for name, job in jobs.items()} == expected
    assert "BigInt" in jobs["bigint"]["error"]
    assert ('"bug"' in output, '"settle_failed"' in output) == (False, False)


def test_it_counts_its_successes_and_failures(tmp_path: Path) -> None:
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.client() as client:
        environment = {"PATH": os.defpath, "HOLDFAST_API_URL": served.address}
        worker = subprocess.Popen([str(NODE), str(WORKER)], env=environment, stdout=subprocess.PIPE, text=True)
        for task in ("echo", "echo", "dead"):
            job = client.post("/v1/jobs", json={"task": f"conformance.{task}", "payload": {"value": 1}}).json()
            ended = client.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json()
            assert ended["state"] in ("succeeded", "dead")
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=50)
    stopped = json.loads(output.splitlines()[-1])
    assert (stopped["event"], stopped["succeeded"], stopped["failed"]) == ("worker_stopped", 2, 1)
