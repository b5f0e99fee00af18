"""The view of ``watch --tag``: the progress of the jobs of a tag until all have ended."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from holdfast import Holdfast, JobFilter, JobState, NotFound, Unavailable
from holdfast.cli.context import Session
from holdfast.cli.output import make_console, print_json_line, print_note
from holdfast.core.stats import StateCounts
from holdfast.views.formatting import format_decimal, format_span, safe_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_RATE_SECONDS = 30.0  # span over which the rate is taken
_COST = 4.0  # a count may take a quarter of the time, at most
UNFINISHED = 75  # exit code, as of a timeout
_FAILED = (JobState.DEAD, JobState.CANCELLED)


class TagProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Document of one line of ``watch --tag --json``."""

    tag: str
    total: int
    ended: int
    states: dict[str, int]
    per_second: float | None
    seconds_left: float | None


class TagWatcher:
    """Counts the jobs of a tag again and again, and shows the counts, until all have ended or the time is over."""

    def __init__(self, session: Session, app: Holdfast, tag: str, pause: float, until: float | None) -> None:
        self._session = session
        self._app = app
        self._tag = tag
        self._pause = pause
        self._until = until
        self._samples: deque[tuple[float, int]] = deque()
        self._is_away = False

    def watch_tag(self) -> int:
        """Returns the exit code: 0 if all succeeded, 1 if one is dead or cancelled, 75 at the end of the time."""
        with self._display() as show:
            while True:
                begun = time.monotonic()
                counts = self._count()
                if counts is not None:
                    show(self._progress_of(counts))
                    if counts.ended == counts.total:
                        return 1 if any(counts.states[state] for state in _FAILED) else 0
                if not self._wait(_COST * (time.monotonic() - begun)):
                    return UNFINISHED

    def _count(self) -> StateCounts | None:
        """Returns the counts; None while the store is away."""
        try:
            counts: StateCounts = self._app.sync.count_states(JobFilter(tag=self._tag))
        except Unavailable as error:
            if not self._is_away:
                print_note(f"{error}; watching goes on")
            self._is_away = True
            return None
        self._is_away = False
        if not counts.total:
            raise NotFound(f"no job has the tag {self._tag!r}")
        return counts

    def _progress_of(self, counts: StateCounts) -> TagProgress:
        now, unended = time.monotonic(), counts.total - counts.ended
        self._samples.append((now, counts.ended))
        while len(self._samples) > 2 and self._samples[1][0] < now - _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = (counts.ended - before) / (now - since) if now > since and counts.ended >= before else None
        left = 0.0 if not unended else unended / rate if rate else None
        states = {state.value: number for state, number in counts.states.items()}
        return TagProgress(
            tag=self._tag, total=counts.total, ended=counts.ended, states=states, per_second=rate, seconds_left=left
        )

    def _wait(self, least: float) -> bool:
        """Waits until the next count; returns False at the end of the time."""
        seconds = max(self._pause, least)
        left = seconds if self._until is None else min(seconds, self._until - time.monotonic())
        if left <= 0:
            return False
        time.sleep(left)
        return True

    @contextmanager
    def _display(self) -> Iterator[Callable[[TagProgress], None]]:
        """Yields a function that shows progress: a bar on a terminal, else one line per change."""
        shown: list[dict[str, int]] = []

        def print_line(progress: TagProgress) -> None:
            if shown != [progress.states]:
                shown[:] = [progress.states]
                if self._session.json:
                    print_json_line(msgspec.to_builtins(progress))
                else:
                    click.echo(describe_progress(progress))
                    sys.stdout.flush()

        if self._session.json or not sys.stdout.isatty():
            yield print_line
            return
        from rich.live import Live

        with Live(console=make_console(), auto_refresh=False) as live:
            yield lambda progress: live.update(_draw(progress), refresh=True)


def describe_progress(progress: TagProgress) -> str:
    """Returns progress as a line of text."""
    share = 100 * progress.ended // progress.total
    parts = [f"{progress.ended:,} of {progress.total:,} ended ({share} %)"]
    parts += [f"{progress.states[state]:,} {state}" for state in _FAILED if progress.states[state]]
    if progress.states[JobState.FAILED]:
        parts.append(f"{progress.states[JobState.FAILED]:,} to be retried")
    if progress.per_second is not None:
        parts.append(f"{format_decimal(progress.per_second)}/s")
    if progress.seconds_left:
        parts.append(f"{format_span(progress.seconds_left)} left")
    return safe_text(f"{progress.tag}  {', '.join(parts)}")


def _draw(progress: TagProgress) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    style = "red" if any(progress.states[state] for state in _FAILED) else "default"
    bar = ProgressBar(total=progress.total, completed=progress.ended)
    return Group(Text(describe_progress(progress), style=style), bar)
