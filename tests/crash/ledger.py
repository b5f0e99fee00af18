"""What handlers wrote down while they ran: the ground truth of every crash test. Pure but for ``append`` and ``read``.

One line for each thing that happened, appended with a single write to a file opened with O_APPEND: a line is there
whole or not at all, whichever process dies when. Times are seconds of CLOCK_MONOTONIC (one clock for every process of
a host) and of the wall clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ENDINGS = frozenset({"end", "cancelled"})


@dataclass(frozen=True)
class Execution:
    """One run of a handler, as the handler saw it."""

    job: str
    claims: int
    attempt: int
    pid: int
    started: float
    started_wall: float
    ended: float | None = None
    """When it returned or was cancelled; None: its process died under it (or it still runs)."""
    cancelled: bool = False
    lost: bool = False
    """Its worker learned that the lease was another's, so the claim stays counted although it was cancelled."""


def append(ledger: Path, /, **line: Any) -> None:
    """Write one line down. It begins with a line break: a process killed while it writes leaves half a line."""
    line |= {"pid": os.getpid(), "mono": time.monotonic(), "wall": time.time()}
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, b"\n" + json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


class Reader:
    """Reads on where it stopped: a ledger is looked at often, and grows long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        """Every line so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines() if line.endswith(b"}")]
        return self._lines


def executions(lines: Iterable[dict[str, Any]]) -> list[Execution]:
    """Starts paired with their endings: by job, claim and process."""
    found: dict[tuple[str, int, int, int], Execution] = {}
    starts: dict[tuple[str, int, int], int] = {}
    last: dict[tuple[str | None, int], tuple[str, int, int, int]] = {}
    for line in lines:
        what = line.get("what")
        if what == "start":
            run = (line["job"], line["claims"], line["pid"])
            starts[run] = starts.get(run, 0) + 1  # one lease started twice stays two executions: that is a fault
            last[line["job"], line["pid"]] = (*run, starts[run])
            found[*run, starts[run]] = Execution(*run[:2], line["attempt"], run[2], line["mono"], line["wall"])
        elif what in ENDINGS:
            run = (line["job"], line["claims"], line["pid"])
            key = (*run, starts.get(run, 0))
            if key in found:
                found[key] = replace(found[key], ended=line["mono"], cancelled=what == "cancelled")
        elif what == "refused":
            latest = last.get((line.get("job"), line["pid"]))
            if latest is not None:
                found[latest] = replace(found[latest], lost=True)
    return list(found.values())


def by_job(runs: Sequence[Execution]) -> dict[str, list[Execution]]:
    """The executions of each job, oldest first."""
    grouped: dict[str, list[Execution]] = {}
    for run in sorted(runs, key=lambda each: each.started):
        grouped.setdefault(run.job, []).append(run)
    return grouped
