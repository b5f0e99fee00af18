"""What Holdfast says happened, beside the same figures computed directly in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.corpus import unpacked
from examples.demo.jobs import MEASURE, executions_log
from examples.demo.measure import Measure, Totals, measure_all
from holdfast import Holdfast, Job, JobFilter, JobState

_FIGURES = tuple(each.name for each in fields(Measure))


@dataclass
class Figures(Totals):
    """Everything that is compared."""

    gzip_files: int = 0
    gzip_bytes: int = 0


@dataclass
class Outcome:
    """What the store and the executions' own log tell."""

    figures: Figures = field(default_factory=Figures)
    jobs: int = 0
    executions: Counter[str] = field(default_factory=Counter)  # by job, as the executions wrote them down themselves
    attempts: int = 0
    rerun: set[str] = field(default_factory=set)  # not done at the first attempt
    seconds: list[tuple[float, str]] = field(default_factory=list)
    longest: tuple[int, str, str] = (0, "", "")


async def collect(app: Holdfast, folder: Path, copies: list[Path]) -> Outcome:
    """Read every job's result back from the store."""
    outcome = Outcome()
    outcome.executions.update(
        line.split()[0] for line in executions_log(folder).read_text(encoding="utf-8").splitlines()
    )
    async for job in _jobs(app):
        outcome.jobs += 1
        outcome.attempts += job.attempts
        if job.attempts > 1:
            outcome.rerun.add(job.id)
        _count(outcome, job)
    packed = [copy for copy in copies if copy.with_name(copy.name + ".gz").exists()]
    if outcome.figures.gzip_files == len(packed):  # as many succeeded as there are files: now what is in them
        outcome.figures.gzip_files, outcome.figures.gzip_bytes = unpacked(packed)
    return outcome


def _count(outcome: Outcome, job: Job) -> None:
    figures = outcome.figures
    if job.state is JobState.DEAD:
        figures.unparsable += 1
    elif job.task == MEASURE:
        result: dict[str, Any] = json.loads(job.result or "null")
        one = Measure(**{name: result[name] for name in _FIGURES})
        figures.add(one)
        outcome.seconds.append((result["seconds"], result["path"]))
        outcome.longest = max(outcome.longest, (one.longest_lines, one.longest_name, result["path"]))
    else:
        figures.gzip_files += 1


async def _jobs(app: Holdfast) -> AsyncIterator[Job]:
    cursor = None
    while True:
        page = await app.find(JobFilter(states=(JobState.SUCCEEDED, JobState.DEAD)), limit=500, cursor=cursor)
        for job in page.jobs:
            yield job
        cursor = page.cursor
        if cursor is None:
            return


def compute(sources: list[Path], copies: list[Path]) -> Figures:
    """The same without a queue."""
    totals = measure_all(sources)
    return Figures(**vars(totals), gzip_files=len(copies), gzip_bytes=sum(copy.stat().st_size for copy in copies))


def print_comparison(console: Console, outcome: Outcome, direct: Figures) -> bool:
    """The table; whether there is no difference."""
    table = Table(title="What the jobs found, and what is so", title_justify="left")
    table.add_column("figure")
    for column in ("by Holdfast", "directly", ""):
        table.add_column(column, justify="right")
    right = True
    for name, label in _LABELS.items():
        found, expected = getattr(outcome.figures, name), getattr(direct, name)
        right = right and found == expected
        table.add_row(label, f"{found:,}", f"{expected:,}", "[green]✓[/]" if found == expected else "[red]differs[/]")
    console.print(table)
    return right


_LABELS = {
    "measured": "files measured",
    "unparsable": "files that are no Python (dead letters)",
    "lines": "lines",
    "functions": "functions",
    "classes": "classes",
    "bytes": "bytes",
    "longest_lines": "lines of the longest function",
    "gzip_files": "files compressed",
    "gzip_bytes": "bytes that unpack to what they were",
}


def print_story(console: Console, outcome: Outcome, held: frozenset[str], seconds: float) -> bool:
    """What the run was like; whether every job was executed, none more often than it was charged for, and all that the
    killed worker ``held`` once more."""
    executions = outcome.executions.total()
    retries = 2 * outcome.figures.unparsable
    recovered = held & outcome.rerun
    facts = {
        "Throughput": f"{outcome.jobs / seconds:,.0f} jobs/s: {outcome.jobs:,} in {seconds:.1f} s, the crash included",
        "Executions": (
            f"{executions:,}: one for each job, {retries} retries of what is no Python, "
            f"{executions - outcome.jobs - retries} repeated: their worker was killed, or too busy to renew a lease"
        ),
        "Recovered": f"{len(recovered)} of the {len(held)} jobs the killed worker held had another attempt; all ended",
        "Longest function": f"{outcome.longest[1]}, {outcome.longest[0]:,} lines ({_short(outcome.longest[2])})",
        "Slowest files": ", ".join(
            f"{_short(path)} {spent:.2f} s" for spent, path in sorted(outcome.seconds, reverse=True)[:3]
        ),
    }
    table = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        table.add_row(f"[bold]{name}[/]", text)
    console.print(table)
    if len(outcome.executions) != outcome.jobs or executions > outcome.attempts:
        console.print(
            f"[red]{len(outcome.executions)} of {outcome.jobs} jobs were executed, {executions} times; "
            f"{outcome.attempts} attempts are on record.[/]"
        )
        return False
    if recovered != held:
        console.print(f"[red]{len(held - recovered)} of the killed worker's jobs had no other attempt.[/]")
        return False
    return True


async def print_dead_letters(console: Console, app: Holdfast, folder: Path, *, kept: bool) -> None:
    """Some of the dead letters, and how to look at all of them."""
    page = await app.find(JobFilter(states=(JobState.DEAD,)), limit=500)
    table = Table(title=f"{len(page.jobs)} dead letters, some of them", title_justify="left")
    table.add_column("file")
    table.add_column("attempts", justify="right")
    table.add_column("why", overflow="fold")
    for job in page.jobs[:: max(1, len(page.jobs) // 5)][:5]:
        table.add_row(_short(json.loads(job.payload)["path"]), str(job.attempts), _first_line(job.error))
    console.print(table)
    if kept:
        console.print(f"Everything is kept in {folder}. Look at them all:", soft_wrap=True)
        console.print(f"  holdfast dlq list --url sqlite:///{folder}/demo.db", soft_wrap=True)
    else:
        console.print("To look at them all, run it with --keep: python -m examples.demo --keep")


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _first_line(error: str | None) -> str:
    text = (error or "").splitlines()[0] if error else ""
    head, _, _ = text.partition(" (/")
    return head
