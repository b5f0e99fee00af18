"""Runs chaos scenarios: worker processes that get faults, jobs that must come through, and the books at the end."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.faults import NUMBER
from holdfast.core.models import TERMINAL, Attempt, Job, JobState, NewJob, Reason
from holdfast.settings.types import PREFIX
from holdfast.testing.scenario import Scenario

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_AT_ONCE = 1000
_ATTEMPTS_AT_ONCE = 50


class Effects(msgspec.Struct, frozen=True):
    """Numbers of jobs by the count of their effects, from the application's own function."""

    once: int
    repeated: int
    """Jobs with more than one effect."""
    unexplained: int
    """Jobs with more effects than executions."""
    missing: int
    """Jobs that succeeded without an effect."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scenario."""

    scenario: str
    seed: int
    seconds: float
    accepted: int
    """Jobs; a copy of a submission is none."""
    submitted: int
    succeeded: int
    dead: int
    cancelled: int
    executions: int
    lost: int
    """Executions whose worker died, froze or was cut off."""
    killed_workers: int
    injected: dict[str, int]
    """Faults that happened, by kind."""
    retries: dict[int, int]
    """Executions after the first of each job, by the second in which they began, from the submission on."""
    effects: Effects | None
    problems: list[str]
    """Broken promises; empty if the books balance."""

    @property
    def balanced(self) -> bool:
        """Returns True if every job has ended, and every effect is there once."""
        return not self.problems


async def run_chaos(app: Holdfast, scenario: Scenario, *, target: str) -> ChaosReport:
    """Runs a scenario on the application's store, with worker processes of this machine.

    target: ``module:name`` by which the workers import the application. Its settings must allow faults: else Conflict.
    ConfigError: the scenario does not fit the application.
    """
    task = _task_of(app, scenario)
    count_effects = None if scenario.effects is None else _load_function(scenario.effects)
    drafts = _draft_jobs(app, scenario, task)
    async with app:
        plan = await app.faults.start(scenario.faults, span=scenario.span, seed=scenario.seed)
        try:
            with _Workers(app, scenario, target) as workers:
                await workers.await_ready()
                began = time.time()
                handles = await app.enqueue_many(drafts)
                ids = list(dict.fromkeys(handle.id for handle in handles))
                jobs = await _await_ends(app, ids, workers, scenario.deadline)
        finally:
            await app.faults.stop()
        attempts = await _read_attempts(app, jobs)
        counted = None if count_effects is None else await _counted(count_effects, jobs)
    states = Counter(job.state for job in jobs)
    effects = None if counted is None else _judge_effects(jobs, counted)
    problems, injected = list(_problems(scenario, ids, jobs, effects)), workers.read_injected()
    if problems:
        problems.append(f"the logs of the workers are in {workers.folder}")
    else:
        shutil.rmtree(workers.folder)
    return ChaosReport(
        scenario=scenario.name,
        seed=plan.seed,
        seconds=round(time.time() - began, 1),
        accepted=len(ids),
        submitted=len(handles),
        succeeded=states[JobState.SUCCEEDED],
        dead=states[JobState.DEAD],
        cancelled=states[JobState.CANCELLED],
        executions=sum(job.attempts for job in jobs),
        lost=sum(attempt.reason == Reason.CRASHED for each in attempts.values() for attempt in each),
        killed_workers=workers.killed,
        injected=injected,
        retries=_retries(jobs, attempts, began),
        effects=effects,
        problems=problems,
    )


# ── before ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _task_of(app: Holdfast, scenario: Scenario) -> str:
    names = app.registry.task_names()
    if scenario.task is None and len(names) == 1:
        return names[0]
    if scenario.task is None or scenario.task not in names:
        said = "say which task the jobs are of" if scenario.task is None else f"there is no task {scenario.task!r} here"
        raise ConfigError(f"task: {said}; the application has {', '.join(names) or 'none'}: --task NAME")
    return scenario.task


def _load_function(target: str) -> Any:
    module, _, name = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"effects: {target} cannot be imported: {error}; give module:function") from None
    finally:
        sys.path.pop(0)


def _draft_jobs(app: Holdfast, scenario: Scenario, task: str) -> list[NewJob]:
    """Returns the jobs, copies with the same idempotency key among them."""
    run = uuid.uuid4().hex[:12]
    options = {name: getattr(scenario, name) for name in ("queue", "retry", "max_attempts")}
    given = {name: value for name, value in options.items() if value is not None}
    return [
        app.draft_job(
            task,
            _numbered(scenario.payload, number),
            key=f"chaos-{run}-{number}",
            tags=["chaos", f"chaos-{run}"],
            metadata={NUMBER: number},
            **given,
        )
        for _ in range(scenario.copies)
        for number in range(scenario.jobs)
    ]


def _numbered(value: Any, number: int) -> Any:
    """Returns a payload in which the number of its job stands for ``{n}``."""
    match value:
        case str():
            return value.replace("{n}", str(number))
        case Mapping():
            return {name: _numbered(each, number) for name, each in value.items()}
        case list():
            return [_numbered(each, number) for each in value]
    return value


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Workers:
    """The worker processes of a scenario: started, replaced when they are killed, and none left behind."""

    def __init__(self, app: Holdfast, scenario: Scenario, target: str) -> None:
        settings = app.settings
        self._app = app
        self._count = scenario.workers
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
        self._started = 0
        self._living: dict[int, subprocess.Popen[bytes]] = {}  # by number
        self._environment = {
            **os.environ,
            f"{PREFIX}APP": target,
            f"{PREFIX}URL": settings.url,
            **({f"{PREFIX}CONFIG": str(settings.file)} if settings.stamp else {}),
            f"{PREFIX}LOG_FORMAT": "json",
            f"{PREFIX}LOG_LEVEL": "WARNING",
            **{f"{PREFIX}{name.upper()}": value for name, value in scenario.settings.items()},
        }
        self.killed = 0

    def __enter__(self) -> _Workers:
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._living.values():
            process.terminate()
        until = time.monotonic() + _STOP_SECONDS
        for process in self._living.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        with (self.folder / f"worker-{self._started}.log").open("wb") as log:
            self._living[self._started] = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "worker", "start"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started += 1

    def replace_dead(self) -> None:
        """Starts a process for each that was killed. Raises HoldfastError for one that ended otherwise."""
        for number, process in list(self._living.items()):
            code = process.poll()
            if code is None:
                continue
            del self._living[number]
            if code != -signal.SIGKILL:
                log = self.folder / f"worker-{number}.log"
                last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it wrote nothing"]
                raise HoldfastError(f"a worker ended with exit code {code}: {last[0]} (log: {log})")
            self.killed += 1
            self._start()

    async def await_ready(self) -> None:
        """Waits until as many workers as asked for are there."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            self.replace_dead()
            pids = {process.pid for process in self._living.values()}
            ready = {each.heartbeat.pid for each in await self._app.workers() if each.alive}
            if len(pids & ready) >= self._count:
                return
            await asyncio.sleep(_LOOK_SECONDS / 5)
        raise HoldfastError(f"the workers did not start within {_START_SECONDS:g} s; their logs are in {self.folder}")

    def read_injected(self) -> dict[str, int]:
        """Returns the numbers of faults in the workers' logs, by kind."""
        found: Counter[str] = Counter()
        for line in self._log_lines():
            if line.get("event") == "fault_injected":
                found[str(line.get("kind"))] += 1
        return dict(sorted(found.items()))

    def _log_lines(self) -> Iterator[dict[str, Any]]:
        for log in sorted(self.folder.iterdir()):
            for line in log.read_text("utf-8", "replace").splitlines():
                try:
                    read = json.loads(line)
                except ValueError:
                    continue  # the application prints, too
                if isinstance(read, dict):
                    yield read


# ── after ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _await_ends(app: Holdfast, ids: Sequence[str], workers: _Workers, deadline: float) -> list[Job]:
    """Returns the jobs when all have ended, or as they are at the deadline."""
    until = time.monotonic() + deadline
    while True:
        workers.replace_dead()
        jobs = [job for job in await _summaries(app, ids) if job is not None]
        if all(job.state in TERMINAL for job in jobs) or time.monotonic() > until:
            return jobs
        await asyncio.sleep(_LOOK_SECONDS)


async def _summaries(app: Holdfast, ids: Sequence[str]) -> list[Job | None]:
    store = await app.open_store()
    found: list[Job | None] = []
    for start in range(0, len(ids), _AT_ONCE):
        found += await store.query.summaries(ids[start : start + _AT_ONCE])
    return found


async def _read_attempts(app: Holdfast, jobs: Sequence[Job]) -> dict[str, list[Attempt]]:
    """Returns the attempts of each job that did not succeed."""
    found: dict[str, list[Attempt]] = {}
    for start in range(0, len(jobs), _ATTEMPTS_AT_ONCE):
        some = jobs[start : start + _ATTEMPTS_AT_ONCE]
        read = await asyncio.gather(*[app.attempts(job.id) for job in some])
        found |= {job.id: attempts for job, attempts in zip(some, read, strict=True)}
    return found


def _retries(jobs: Sequence[Job], attempts: Mapping[str, Sequence[Attempt]], began: float) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for job in jobs:
        starts = [attempt.started_at_us or attempt.ended_at_us for attempt in attempts[job.id]]
        if job.state is JobState.SUCCEEDED and job.started_at_us is not None:
            starts.append(job.started_at_us)
        counts.update(max(0, int(start / 1e6 - began)) for start in sorted(starts)[1:])
    return dict(sorted(counts.items()))


async def _counted(count_effects: Any, jobs: Sequence[Job]) -> Mapping[str, int]:
    counted: object = count_effects([job.id for job in jobs])
    if inspect.isawaitable(counted):
        counted = await counted
    if not isinstance(counted, Mapping):
        raise ConfigError(f"effects: the function returned {type(counted).__name__}; return a number for each id")
    return counted


def _judge_effects(jobs: Sequence[Job], counted: Mapping[str, int]) -> Effects:
    numbers = [(job, counted.get(job.id, 0)) for job in jobs]
    return Effects(
        once=sum(number == 1 for _, number in numbers),
        repeated=sum(number > 1 for _, number in numbers),
        unexplained=sum(number > job.attempts for job, number in numbers),
        missing=sum(number == 0 for job, number in numbers if job.state is JobState.SUCCEEDED),
    )


def _problems(scenario: Scenario, ids: Sequence[str], jobs: Sequence[Job], effects: Effects | None) -> Iterator[str]:
    if len(ids) != scenario.jobs:
        yield f"{len(ids)} jobs were accepted for {scenario.jobs} keys"
    if len(jobs) != len(ids):
        yield f"{len(ids) - len(jobs)} accepted jobs are not there any more"
    open_ones = Counter(job.state for job in jobs if job.state not in TERMINAL)
    for state, number in sorted(open_ones.items()):
        yield f"{number} jobs have not ended after {scenario.deadline:g} s: {state}"
    if effects is not None and effects.unexplained:
        yield f"{effects.unexplained} jobs have had their effect more often than they were executed"
    if effects is not None and scenario.exactly_once and effects.repeated:
        yield f"{effects.repeated} jobs have had their effect more than once"
    if effects is not None and effects.missing:
        yield f"{effects.missing} jobs succeeded without their effect"
