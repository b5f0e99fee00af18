"""The demo, on a smaller input: it kills one of its workers and still every figure is right."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import corpus, report, show
from examples.demo.measure import measure
from holdfast import Holdfast, JobState

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "HOLDFAST_URL": f"sqlite:///{folder}/not_this_one.db"}
    command = [sys.executable, "-m", "examples.demo", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_the_demo_survives_its_kill_and_cleans_up(tmp_path: Path) -> None:
    ran = _run(tmp_path, "--files", "60")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Halfway: kill -9" in ran.stdout
    assert "killed by SIGKILL" in ran.stdout
    assert "Every figure is right." in ran.stdout
    assert "differs" not in ran.stdout
    assert list(tmp_path.glob("holdfast-demo-*")) == []
    assert not (tmp_path / "not_this_one.db").exists()


def test_ctrl_c_ends_the_demo_and_its_workers(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-u", "-m", "examples.demo"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "jobs are stored" in line:
                break
        time.sleep(0.5)  # into the run: the supervisor is there at once, its workers begin
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode == 1
    assert "the workers were stopped" in rest
    assert list(tmp_path.glob("holdfast-demo-*")) == []


def test_what_is_kept_can_be_looked_at(tmp_path: Path) -> None:
    ran = _run(tmp_path, "--files", "20", "--keep")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if "holdfast dlq list --url" in line]
    command = [sys.executable, "-m", "holdfast", *line.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    looked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert looked.returncode == 0, looked.stderr
    assert looked.stdout.count("SyntaxError") >= 10


def test_a_difference_fails_the_demo(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    direct = report.compute([tmp_path / "one.py"], [])
    outcome = report.Outcome(figures=report.Figures(**vars(direct)))
    console = Console(quiet=True)
    assert report.print_comparison(console, outcome, direct)
    outcome.figures.lines += 1
    assert not report.print_comparison(console, outcome, direct)


def test_a_job_that_never_ran_fails_the_demo() -> None:
    outcome = report.Outcome(jobs=2, attempts=2)
    outcome.executions.update(["one"])
    assert not report.print_story(Console(quiet=True), outcome, frozenset(), 1.0)
    outcome.executions.update(["two"])
    assert report.print_story(Console(quiet=True), outcome, frozenset(), 1.0)
    outcome.executions.update(["two"])
    assert not report.print_story(Console(quiet=True), outcome, frozenset(), 1.0), "more executions than attempts"


def test_unfinished_job_of_the_killed_worker_fails_the_demo() -> None:
    outcome = report.Outcome(jobs=2, attempts=3, executions=Counter(one=1, two=2), rerun={"two"})
    assert report.print_story(Console(quiet=True), outcome, frozenset({"two"}), 1.0)
    assert not report.print_story(Console(quiet=True), outcome, frozenset({"one", "two"}), 1.0)


@pytest.mark.parametrize("later", [frozenset({"job"}), frozenset()], ids=["another held one", "none did"])
def test_demo_kills_another_worker_if_the_first_held_nothing(
    monkeypatch: pytest.MonkeyPatch, later: frozenset[str]
) -> None:
    kills = [show.Kill(1, frozenset(), 1.0), None, show.Kill(2, later, 2.0)]
    ended = iter([4, 5, 6, 7, 10])

    async def states(_app: Holdfast) -> dict[str, int]:
        return {JobState.SUCCEEDED: next(ended)}

    async def kill_one(*_: object, **__: object) -> show.Kill | None:
        return kills.pop(0) if kills else None

    monkeypatch.setattr(show, "_states", states)
    monkeypatch.setattr(show, "_kill_one", kill_one)
    monkeypatch.setattr(show, "_LOOK", 0.0)

    async def watched() -> show.Kill:
        app, running = Holdfast("sqlite:///never-opened.db"), asyncio.get_running_loop().create_future()
        return await show._watch(Console(quiet=True), app, 10, time.monotonic(), running, whole=True)

    if later:
        assert asyncio.run(watched()) == show.Kill(2, later, 2.0)
    else:
        with pytest.raises(show.DemoFailed, match="no worker that was killed held a job"):
            asyncio.run(watched())


def test_omitted_lines_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    copies = corpus.copy_for_gzip([Path(corpus.__file__)], tmp_path / "gzip", 5)
    assert copies == []
    assert "there is no gzip here" in show.verdict(True, commands=bool(copies), seconds=1.0)
    assert "It took 61 s" in show.verdict(True, commands=True, seconds=61.0)
    assert show.verdict(True, commands=True, seconds=59.0) == "[bold green]Every figure is right.[/]"


def test_the_broken_files_are_broken_and_the_library_is_not(tmp_path: Path) -> None:
    broken = corpus.write_broken(tmp_path / "broken")
    assert len(broken) == 20
    for path in broken:
        with pytest.raises((SyntaxError, ValueError)):
            measure(str(path))
    assert measure(corpus.__file__).functions == 4


def test_gzip_file_counts_only_if_it_unpacks_to_its_source(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("x = 1\n" * 100, encoding="utf-8")
    copies = corpus.copy_for_gzip([source], tmp_path / "gzip", 5)
    assert corpus.unpacked(copies) == (0, 0)
    subprocess.run(["gzip", "-k", str(copies[0])], check=True)
    assert corpus.unpacked(copies) == (1, 600)
    copies[0].write_text("y = 2\n", encoding="utf-8")
    assert corpus.unpacked(copies) == (0, 0)
