"""Clients generated from the OpenAPI document, in Python and in TypeScript, and used with a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node import SOURCES, install_packages, run_node
from tests.web.serving import Served

PYTHON_CLIENT = """
import json, sys
from http import HTTPStatus

from client import Client
from client.api.jobs import cancel_jobs, list_jobs, show_job, submit_job
from client.api.metrics import show_metrics
from client.models import BulkAnswer, JobDetails, JobPage, JobSelection, JobState, Problem, Submission, SubmittedJob
from client.models import SubmissionPayload

client = Client(base_url=sys.argv[1])
payload = SubmissionPayload.from_dict({"to": "a@b.c"})
body = Submission(task="email.send", payload=payload, delay=60, tags=["spring"])
submitted = submit_job.sync(client=client, body=body, idempotency_key="python")
assert isinstance(submitted, SubmittedJob), submitted
assert (submitted.task, submitted.state) == ("email.send", JobState.SCHEDULED)
again = submit_job.sync_detailed(client=client, body=body, idempotency_key="python")
assert (again.status_code, again.parsed.id) == (HTTPStatus.OK, submitted.id)
page = list_jobs.sync(client=client, state=[JobState.SCHEDULED], task=["email.send"])
assert isinstance(page, JobPage) and [job.id for job in page.jobs] == [submitted.id]
shown = show_job.sync(str(submitted.id), client=client)
assert isinstance(shown, JobDetails) and shown.history == []
cancelled = cancel_jobs.sync(client=client, body=JobSelection(ids=[str(submitted.id)]))
assert isinstance(cancelled, BulkAnswer) and [each.state for each in cancelled.changed] == [JobState.CANCELLED]
absent = show_job.sync("key:nothing", client=client)
assert isinstance(absent, Problem) and absent.code == "not_found"
assert "holdfast_jobs_submitted_total" in show_metrics.sync(client=client)
print("done")
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server, and its document in ``openapi.json``."""
    with Served(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as served, served.client() as client:
        (tmp_path / "openapi.json").write_bytes(client.get("/openapi.json").content)
        yield served


def _run(*command: str | Path, cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return output


def test_generated_python_client_works(served: Served, tmp_path: Path) -> None:
    generator = Path(sys.executable).parent / "openapi-python-client"
    options = ("--path", "openapi.json", "--meta", "none", "--output-path", "client", "--fail-on-warning")
    _run(generator, "generate", *options, cwd=tmp_path)
    (tmp_path / "use.py").write_text(PYTHON_CLIENT)
    assert _run(sys.executable, "use.py", served.address, cwd=tmp_path).endswith("done\n")


def test_generated_typescript_client_works(served: Served, tmp_path: Path) -> None:
    packages = install_packages()
    modules, folder = packages / "node_modules", tmp_path / "typescript"
    folder.mkdir()
    (folder / "node_modules").symlink_to(modules)
    (folder / "package.json").write_text('{"type": "module"}')
    shutil.copy(SOURCES / "client.ts", folder)
    generator = modules / "openapi-typescript" / "bin" / "cli.js"
    document = tmp_path / "openapi.json"
    run_node(generator, document, "-o", "schema.ts", "--default-non-nullable=false", cwd=folder)
    options = ["--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck"]
    (folder / "globals.d.ts").write_text("declare const process: { argv: string[] };\n")
    sources = ("client.ts", "schema.ts", "globals.d.ts")
    run_node(modules / "typescript" / "bin" / "tsc", *sources, *options, cwd=folder)
    output = json.loads(run_node("client.js", served.address, cwd=folder))
    job_id = output.pop("id")
    assert output == {
        "task": "email.send",
        "listed": [job_id],
        "shown": [],
        "states": ["cancelled"],
        "absent": "not_found",
    }
