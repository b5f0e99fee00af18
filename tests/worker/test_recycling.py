"""Worker processes that are replaced by fresh ones: after so many jobs, and above so much memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast import Holdfast, JobFilter, JobState
from holdfast.worker.supervisor import FINISHED, RECYCLE

ROOT = Path(__file__).resolve().parents[2]

TASKS = """
import os
from holdfast import Holdfast

app = Holdfast("sqlite:///jobs.db")

@app.task("who")
async def who() -> int:
    return os.getpid()
"""

CHILD = """
import os, sys
from holdfast.worker.process import run_worker
from holdfast.worker.supervisor import SUPERVISOR_PIPE
from jobs import app

os.environ[SUPERVISOR_PIPE] = str(os.pipe()[0])

name, value = sys.argv[1:]
sys.exit(run_worker(app, app.settings.replace_values(**{name: value})))
"""


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    (tmp_path / "jobs.py").write_text(TASKS, encoding="utf-8")
    return Holdfast(f"sqlite:///{tmp_path}/jobs.db")


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "PYTHONPATH": f"{ROOT}:{folder}"}


def run(folder: Path, *words: str) -> int:
    """A process in the folder of the application; its exit code."""
    command, outside = [sys.executable, *words], environment(folder)
    ended = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False, timeout=40)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode


@pytest.mark.parametrize(("name", "value"), [("recycle_jobs", "3"), ("recycle_memory", "1MiB")])
def test_recycled_worker_reports_it_by_exit_code(name: str, value: str, app: Holdfast, tmp_path: Path) -> None:
    handles = [app.sync.enqueue("who") for _ in range(3)]
    assert run(tmp_path, "-c", CHILD, name, value) == RECYCLE == 84
    assert [handle.sync.state() for handle in handles] == [JobState.SUCCEEDED] * 3
    assert len({handle.sync.result() for handle in handles}) == 1
    assert app.sync.workers() == [], "it has signed off"
    app.sync.close()


def test_under_its_limits_it_ends_well(app: Holdfast, tmp_path: Path) -> None:
    app.sync.enqueue("who")
    program = CHILD.replace("**{name: value})", "**{name: value}), drain=True")
    assert run(tmp_path, "-c", program, "recycle_jobs", "1000000") == FINISHED
    assert app.sync.count(JobFilter(states=(JobState.SUCCEEDED,))) == 1
    app.sync.close()


def test_one_process_goes_on_through_its_replacements(app: Holdfast, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "holdfast", "worker", "start", "--processes", "1", "--app", "jobs:app"]
    outside = environment(tmp_path) | {"HOLDFAST_RECYCLE_JOBS": "2"}
    seen: set[int] = set()
    with subprocess.Popen(words, cwd=tmp_path, env=outside, stderr=subprocess.PIPE) as supervisor:
        deadline = time.monotonic() + 120
        while len(seen) < 3:
            assert time.monotonic() < deadline, seen
            seen.add(app.sync.enqueue("who").sync.result(timeout=60))
        assert supervisor.poll() is None
        supervisor.send_signal(signal.SIGTERM)
        _, given = supervisor.communicate(timeout=60)
        assert (supervisor.returncode, b"Traceback" in given) == (0, False), given
    assert app.sync.count(JobFilter(states=(JobState.SUCCEEDED,))) == app.sync.count()
    app.sync.close()
