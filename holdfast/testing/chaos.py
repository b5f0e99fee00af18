"""Runs chaos scenarios: worker processes that get faults, jobs that must come through, and the books at the end."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.app import Holdfast
from holdfast.app.faults import check_allowed
from holdfast.core.errors import ConfigError, Conflict, HoldfastError, Unavailable
from holdfast.core.faults import NUMBER, STORE_KINDS, InjectedError
from holdfast.core.models import TERMINAL, Attempt, Job, JobState, NewJob, Reason
from holdfast.settings.types import PREFIX
from holdfast.testing.chaos_worker import CHAOS_SETTINGS
from holdfast.testing.scenario import WORKER_SETTINGS, Scenario
from holdfast.views.formatting import format_timestamp

T = TypeVar("T")

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_PATIENCE = 60.0  # seconds for a store that is away
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
    none: int
    """Jobs that did not succeed and have no effect."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scenario."""

    scenario: str
    seed: int
    seconds: float
    accepted: int
    """Distinct jobs: a copy of a submission is none."""
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
        """Returns True if there are no problems."""
        return not self.problems


async def run_chaos(app: Holdfast, scenario: Scenario, *, target: str) -> ChaosReport:
    """Runs a scenario on the application's store, with worker processes of this machine.

    target: ``module:name`` by which the workers import the application. Conflict: its settings do not allow faults, or
    others are on. ConfigError: the scenario does not fit the application.
    """
    check_allowed(app.settings)
    seed = random.SystemRandom().randrange(10**9) if scenario.seed is None else scenario.seed
    task = _task_of(app, scenario)
    count_effects = None if scenario.effects is None else _load_function(scenario.effects)
    drafts = _draft_jobs(app, scenario, task)
    faults = [each if each.kind in STORE_KINDS or each.task else replace(each, task=task) for each in scenario.faults]
    async with app:
        await _check_no_faults(app)
        with _Workers(app, scenario, target) as workers:
            await workers.await_ready()
            try:
                await app.faults.start(faults, span=scenario.span, seed=seed, replace=False)
                await workers.await_faults()
                began = time.time()
                handles = await _patiently(lambda: app.enqueue_many(drafts), began + _PATIENCE)  # each has a key
                ids = list(dict.fromkeys(handle.id for handle in handles))
                jobs = await _await_ends(app, ids, workers, began + scenario.deadline)
            finally:
                changed = await _stop_faults(app, seed)
        attempts = await _patiently(lambda: _read_attempts(app, jobs), time.time() + _PATIENCE)
        effects, refused = await _count_effects(count_effects, scenario, jobs)
    problems = [*_problems(scenario, ids, jobs, effects), *filter(None, [changed, refused])]
    if problems:
        problems.append(f"the logs of the workers are in {workers.folder}")
    states = Counter(job.state for job in jobs)
    report = ChaosReport(
        scenario=scenario.name,
        seed=seed,
        seconds=round(time.time() - began, 1),
        accepted=len(ids),
        submitted=len(handles),
        succeeded=states[JobState.SUCCEEDED],
        dead=states[JobState.DEAD],
        cancelled=states[JobState.CANCELLED],
        executions=sum(job.attempts for job in jobs),
        lost=sum(attempt.reason == Reason.CRASHED for each in attempts.values() for attempt in each),
        killed_workers=workers.killed,
        injected=workers.read_injected(),
        retries=_retries(jobs, attempts, began),
        effects=effects,
        problems=problems,
    )
    if not problems:
        workers.remove_logs()
    return report


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
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does
        remedy = "give module:function"
        raise ConfigError(f"effects: {target} cannot be imported: {type(error).__name__}: {error}; {remedy}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"effects: {target} is of type {type(found).__name__}; give a function")
    return found


async def _check_no_faults(app: Holdfast) -> None:
    plan = await app.faults.read()
    if plan is not None:
        until = format_timestamp(plan.until_us)
        raise Conflict(f"faults are on until {until}, from elsewhere: wait, or end them with `holdfast chaos stop`")


async def _stop_faults(app: Holdfast, seed: int) -> str | None:
    """Switches the scenario's faults off; returns a problem if others have taken their place."""
    until = time.time() + _PATIENCE
    found = await _patiently(app.faults.read, until)
    if found is not None and found.seed != seed:
        return "other faults were switched on meanwhile"
    await _patiently(app.faults.stop, until)
    return None


async def _patiently(call: Callable[[], Awaitable[T]], until: float) -> T:
    """Calls until the store answers. Unavailable: it does not until then."""
    while True:
        try:
            return await call()
        except Unavailable as error:
            if time.time() > until:
                raise Unavailable(f"{error} (faults that are still on: `holdfast chaos stop`)") from None
            await asyncio.sleep(_LOOK_SECONDS)


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
        self._target = target
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
        self._is_named = False  # by an error
        self._started = 0
        self._living: dict[int, subprocess.Popen[bytes]] = {}  # by number
        config = {f"{PREFIX}CONFIG": str(settings.file)} if settings.stamp else {}
        given = {CHAOS_SETTINGS: json.dumps({**WORKER_SETTINGS, **scenario.settings, "url": settings.url})}
        self._environment = {**os.environ, f"{PREFIX}APP": target, **config, **given}
        self.killed = 0

    def __enter__(self) -> _Workers:
        try:
            for _ in range(self._count):
                self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        living = self._living.values()
        for process in living:
            process.terminate()
        until = time.monotonic() + _STOP_SECONDS
        while any(process.poll() is None for process in living) and time.monotonic() < until:
            for process in living:
                process.send_signal(signal.SIGCONT)  # it may be frozen, and again by its next job
            time.sleep(_LOOK_SECONDS / 5)
        for process in living:
            process.kill()
            process.wait()
        if error is not None and not self._is_named:
            self.remove_logs()

    def _start(self) -> None:
        number = self._started
        journal = self.folder / f"worker-{number}.journal"
        journal.touch()
        with self._log_of(number).open("wb") as log:
            self._living[number] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast.testing.chaos_worker"),
                    *(str(os.getpid()), self._target, str(journal)),
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started += 1

    def _log_of(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def _last_line(self, number: int) -> str:
        """Describes the last line of a worker's log, which stays."""
        self._is_named = True
        log = self._log_of(number)
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it wrote nothing"]
        return f"{last[0]} (log: {log})"

    def replace_dead(self) -> None:
        """Starts a process for each that was killed. Raises HoldfastError for one that ended otherwise."""
        for number, process in list(self._living.items()):
            code = process.poll()
            if code is None:
                continue
            del self._living[number]
            if code != -signal.SIGKILL:
                raise HoldfastError(f"a worker ended with exit code {code}: {self._last_line(number)}")
            self.killed += 1
            self._start()

    async def await_ready(self) -> None:
        """Waits until as many workers as asked for are there."""

        async def are_ready() -> bool:
            pids = {process.pid for process in self._living.values()}
            workers = await _patiently(self._app.workers, time.time() + _START_SECONDS)
            return len(pids & {each.heartbeat.pid for each in workers if each.alive}) >= self._count

        await self._until(are_ready, "start")

    async def await_faults(self) -> None:
        """Waits until each worker has the plan of faults."""

        async def have_heard() -> bool:
            return all("faults " in self._journal_of(number) for number in self._living)

        await self._until(have_heard, "read the plan of faults")

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        until = time.monotonic() + _START_SECONDS
        while not await condition():
            self.replace_dead()
            if time.monotonic() > until:
                last = self._last_line(next(iter(self._living)))
                raise HoldfastError(f"the workers did not {what} within {_START_SECONDS:g} s; the first says: {last}")
            await asyncio.sleep(_LOOK_SECONDS / 5)

    def _journal_of(self, number: int) -> str:
        return (self.folder / f"worker-{number}.journal").read_text("utf-8")

    def read_injected(self) -> dict[str, int]:
        """Returns the numbers of faults in the workers' journals, by kind."""
        lines = [line.split() for number in range(self._started) for line in self._journal_of(number).splitlines()]
        return dict(sorted(Counter(words[1] for words in lines if words[0] == "fault").items()))

    def remove_logs(self) -> None:
        """Removes what the workers have written."""
        shutil.rmtree(self.folder)


# ── after ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _await_ends(app: Holdfast, ids: Sequence[str], workers: _Workers, until: float) -> list[Job]:
    """Returns the jobs when all have ended, or as they are at the deadline."""
    while True:
        workers.replace_dead()
        found = await _patiently(lambda: _summaries(app, ids), max(until, time.time()) + _PATIENCE)
        jobs = [job for job in found if job is not None]
        if all(job.state in TERMINAL for job in jobs) or time.time() > until:
            return jobs
        await asyncio.sleep(_LOOK_SECONDS)


async def _summaries(app: Holdfast, ids: Sequence[str]) -> list[Job | None]:
    store = await app.open_store()
    found: list[Job | None] = []
    for start in range(0, len(ids), _AT_ONCE):
        found += await store.query.summaries(ids[start : start + _AT_ONCE])
    return found


async def _read_attempts(app: Holdfast, jobs: Sequence[Job]) -> dict[str, list[Attempt]]:
    """Returns the failed attempts of each job."""
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


async def _count_effects(function: Any, scenario: Scenario, jobs: Sequence[Job]) -> tuple[Effects | None, str | None]:
    """Returns the effects, or what is wrong with the application's function."""
    if function is None:
        return None, None
    try:
        counted = function([job.id for job in jobs])
        if inspect.isawaitable(counted):
            counted = await counted
    except Exception as error:  # whatever the function does
        return None, f"effects: {scenario.effects} raised {type(error).__name__}: {error}"
    if not isinstance(counted, Mapping):
        return None, f"effects: {scenario.effects} returned {type(counted).__name__}; return a number for each id"
    for job_id, number in counted.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            return None, f"effects: {scenario.effects} returned {number!r} for {job_id}; return whole numbers from 0"
    return _judge_effects(jobs, counted), None


def _judge_effects(jobs: Sequence[Job], counted: Mapping[str, int]) -> Effects:
    numbers = [(job, counted.get(job.id, 0)) for job in jobs]
    return Effects(
        once=sum(number == 1 for _, number in numbers),
        repeated=sum(number > 1 for _, number in numbers),
        unexplained=sum(number > job.claims for job, number in numbers),  # a job that waits begins again, too
        missing=sum(number == 0 for job, number in numbers if job.state is JobState.SUCCEEDED),
        none=sum(number == 0 for job, number in numbers if job.state is not JobState.SUCCEEDED),
    )


def _problems(scenario: Scenario, ids: Sequence[str], jobs: Sequence[Job], effects: Effects | None) -> Iterator[str]:
    if len(ids) != scenario.jobs:
        yield f"{len(ids)} jobs were accepted for {scenario.jobs} keys"
    if len(jobs) != len(ids):
        yield f"{len(ids) - len(jobs)} accepted jobs are not there any more"
    open_ones = Counter(job.state for job in jobs if job.state not in TERMINAL)
    for state, number in sorted(open_ones.items()):
        yield f"{number} jobs have not ended after {scenario.deadline:g} s: {state}"
    strange = [job.error or "" for job in jobs if job.state is JobState.DEAD and not _died_of_faults(job)]
    if strange and not scenario.may_die:
        error, number = Counter(strange).most_common(1)[0]
        yield f"{len(strange)} jobs are dead without a fault, {number} of them of: {error}"
    if effects is not None and effects.unexplained:
        yield f"{effects.unexplained} jobs have had their effect more often than they were executed"
    if effects is not None and scenario.exactly_once and effects.repeated:
        yield f"{effects.repeated} jobs have had their effect more than once"
    if effects is not None and effects.missing:
        yield f"{effects.missing} jobs succeeded without their effect"


def _died_of_faults(job: Job) -> bool:
    return job.reason == Reason.CRASHED or (job.error or "").startswith(InjectedError.__name__)
