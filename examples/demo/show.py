"""The run of the demo: submit everything, watch the workers, kill one of them halfway, report."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo import corpus, report
from examples.demo.jobs import LEASE, MEASURE, SETTINGS, make_app
from holdfast import Holdfast, JobFilter, JobState
from holdfast.core.events import ChildEnded, Event
from holdfast.core.models import TERMINAL
from holdfast.worker.supervisor import Supervisor

GZIPS = 300  # files that are compressed too, or half of all if they are few
PATIENCE = 150.0  # seconds until the demo gives up: something is wrong then
USUAL = 60.0  # seconds it takes at most where two cores have nothing else to do
_LOOK = 0.1  # seconds between looks at the queue


@dataclass(frozen=True)
class Input:
    """What the jobs are made of."""

    sources: list[Path]
    copies: list[Path]


@dataclass(frozen=True)
class Kill:
    """The worker that was killed, and the jobs it held then."""

    pid: int
    held: frozenset[str]
    after: float  # seconds


async def show(*, files: int | None, processes: int, keep: bool) -> int:
    """Run the demo; 0 if every figure is right."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        (folder / "holdfast.toml").write_text(SETTINGS.format(folder=folder, processes=processes), encoding="utf-8")
        return await _run(console, folder, files, keep)
    except DemoFailed as failure:
        console.print(f"[bold red]The demo failed:[/] {failure}")
        return 1
    finally:
        if not keep:
            shutil.rmtree(folder)


class DemoFailed(Exception):
    """The demo cannot go on."""


async def _run(console: Console, folder: Path, files: int | None, keep: bool) -> int:
    started = time.monotonic()
    given = _gather(console, folder, files)
    app = make_app(folder / "holdfast.toml")
    async with app:
        total = await _submit(app, given)
        console.print(f"{total} jobs are stored in {folder / 'demo.db'}; they survive any crash from here on.")
        began = time.monotonic()
        async with _workers(console, app, folder) as running:
            kill = await _watch(console, app, total, began, running, whole=files is None)
        seconds = time.monotonic() - began
        console.print("Computing the same figures directly …")
        outcome = await report.collect(app, folder, given.copies)
        direct = await asyncio.to_thread(report.compute, given.sources, given.copies)
        right = report.print_comparison(console, outcome, direct)
        right = report.print_story(console, outcome, kill.held, seconds) and right
        await report.print_dead_letters(console, app, folder, kept=keep)
    console.print(verdict(right, commands=bool(given.copies), seconds=time.monotonic() - started))
    return 0 if right else 1


def verdict(right: bool, *, commands: bool, seconds: float) -> str:
    """The last words: what was shown, and what was not."""
    words = ["[bold green]Every figure is right.[/]" if right else "[bold red]There are differences.[/]"]
    if not commands:
        words.append("[yellow]No command job was run: there is no gzip here.[/]")
    if seconds > USUAL:
        words.append(
            f"[yellow]It took {seconds:.0f} s: this machine is slow, or busy; else it is {USUAL:.0f} at most.[/]"
        )
    return " ".join(words)


def _gather(console: Console, folder: Path, files: int | None) -> Input:
    library = corpus.library(files)
    if not library:
        raise DemoFailed(f"this Python ({sys.executable}) has no library of source files to work on")
    copies = corpus.copy_for_gzip(library, folder / "gzip", min(GZIPS, max(1, len(library) // 2)))
    python = ".".join(map(str, sys.version_info[:3]))
    console.print(f"{len(library)} source files of Python {python}, and 20 broken ones to be found.")
    console.print(
        f"{len(copies)} of them are compressed by gzip, too."
        if copies
        else "There is no gzip here: nothing is compressed."
    )
    return Input([*library, *corpus.write_broken(folder / "broken")], copies)


async def _submit(app: Holdfast, given: Input) -> int:
    jobs = [app.draft_job(MEASURE, {"path": str(path)}) for path in given.sources]
    # -f: a second run, after a crash, writes over what the first one left.
    gzips = [app.draft_job("command", {"argv": ["gzip", "-n", "-k", "-f", str(copy)]}) for copy in given.copies]
    mixed = [job for pair in zip_longest(jobs, gzips) for job in pair if job is not None]
    await app.enqueue_many(mixed)
    return len(mixed)


@asynccontextmanager
async def _workers(console: Console, app: Holdfast, folder: Path) -> AsyncIterator[asyncio.Task[int]]:
    """Worker processes under a supervisor, as ``holdfast worker start --processes N`` runs them."""

    def tell(event: Event) -> None:
        if isinstance(event, ChildEnded):
            again = "" if event.restart_in is None else f"; another one starts in {event.restart_in:.1f} s"
            console.print(f"The supervisor says: worker {event.pid} was {event.cause}{again}.")

    app.events.subscribe(tell, ChildEnded)
    command = [sys.executable, "-m", "examples.demo.worker", str(folder / "holdfast.toml")]
    supervisor = Supervisor(command, app.settings.processes, app.settings, app.events)
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    try:
        yield running
    finally:
        supervisor.stop("demo")
        await running


async def _watch(
    console: Console, app: Holdfast, total: int, began: float, running: asyncio.Task[int], *, whole: bool
) -> Kill:
    """Show the progress until every job has ended; halfway, kill a worker that is at work, and another one where its
    last write came through before it was dead, so that it held nothing any more.

    Of few jobs, not the ``whole`` input, all may have ended before one is seen at work: an idle one has to do then."""
    kill: Kill | None = None
    with _progress(console) as progress:
        bar = progress.add_task("", total=total, failed=0)
        while True:
            states = await _states(app)
            ended = sum(states.get(state, 0) for state in TERMINAL)
            progress.update(bar, completed=ended, description=_described(states))
            if ended * 2 >= total and (kill is None or (whole and not kill.held)):
                idle_too = not whole and ended * 10 >= total * 9
                kill = await _kill_one(console, app, began, idle_too=idle_too) or kill
            if ended == total:
                break
            if running.done():  # a signal, such as Ctrl-C, goes to the supervisor
                raise DemoFailed(f"the workers were stopped when {ended} of {total} jobs had ended")
            if time.monotonic() - began > PATIENCE:
                raise DemoFailed(f"only {ended} of {total} jobs have ended after {PATIENCE:.0f} s: {states}")
            await asyncio.sleep(_LOOK)
    if kill is None:
        raise DemoFailed("every job has ended before a worker with a job in hand could be killed")
    if whole and not kill.held:
        raise DemoFailed("no worker that was killed held a job: nothing had to be recovered")
    return kill


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
    )


def _described(states: dict[str, int]) -> str:
    shown = (JobState.RUNNING, JobState.FAILED, JobState.DEAD)
    return "  ".join(f"{states.get(state, 0)} {state}" for state in shown)


async def _states(app: Holdfast) -> dict[str, int]:
    states: dict[str, int] = {}
    for queue in await app.queues(most=1_000_000):
        for state, count in queue.states.items():
            states[state] = states.get(state, 0) + count
    return states


async def _kill_one(console: Console, app: Holdfast, began: float, *, idle_too: bool) -> Kill | None:
    """kill -9 to the worker with most jobs in hand; None if no worker has any right now, which may have to do."""
    busiest, most = None, -1 if idle_too else 0
    for worker in await app.workers():
        held = await app.count(JobFilter(states=(JobState.RUNNING,), worker=worker.heartbeat.worker))
        if worker.alive and held > most:
            busiest, most = worker.heartbeat, held
    if busiest is None:
        return None
    os.kill(busiest.pid, signal.SIGKILL)
    await _gone(busiest.pid)
    page = await app.find(JobFilter(states=(JobState.RUNNING,), worker=busiest.worker), limit=500)
    held_ids = frozenset(job.id for job in page.jobs)
    fate = f"They go to another one when its lease has run out, in {LEASE:.0f} s." if held_ids else "All was written."
    console.print(f"[bold]Halfway: kill -9 {busiest.pid}[/], a worker with {len(held_ids)} jobs in hand. {fate}")
    return Kill(busiest.pid, held_ids, time.monotonic() - began)


async def _gone(pid: int) -> None:
    """Return once the supervisor has buried it: until then its last write may still come through."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await asyncio.sleep(0.01)
