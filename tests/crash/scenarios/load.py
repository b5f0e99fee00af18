"""A fleet under steady load: workers, and submitters that try again. How soon each goes on when trouble is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import psutil

from tests.crash.checker import ALWAYS, Check
from tests.crash.database import Note
from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, facts, judged
from tests.crash.scenarios.kinds import SECRETS
from tests.crash.scenarios.submitting import await_quiet
from tests.support.load import percentile
from tests.support.stores import Home

SUBMITTER = "tests.crash.programs.patient"
MODES = ("keyed", "plain", "bulk", "concurrent")
WORKERS = 3
PATIENCE = 90
"""Seconds to wait for what has a bound of its own: past that it will never be."""
DRAINED = 120
"""Seconds for what was submitted meanwhile, on a busy machine."""
AT_ONCE, A_SECOND = 60, 5
"""Log lines a worker may write about an absence of the store: of its beginning and end, and for each second of it."""


class Load:
    """Use it with ``with``. ``direct`` is the URL for the test itself, where the fleet's goes through trouble."""

    def __init__(self, folder: Path, home: Home, *, direct: str | None = None) -> None:
        self.report = Report()
        self.fleet = Fleet(folder, home, direct=direct)
        self._resumed: dict[str, list[float]] = {"workers": [], "submitters": []}
        self._away = 0.0
        self._absences = 0

    def __enter__(self) -> Load:
        with ExitStack() as undo:
            undo.enter_context(self.fleet)
            self.fleet.start_workers(WORKERS)
            self._workers = [process.pid for process in self.fleet.processes]
            names = {f"{mode}-{number}": mode for number, mode in enumerate(MODES)}
            self._submitters = {name: self.fleet.start(SUBMITTER, mode, name) for name, mode in names.items()}
            try:
                self.all_workers_busy(time.monotonic())
            except AssertionError as error:
                self._add_output(error)
                raise
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._add_output(error)
        self._undo.__exit__(kind, error, trace)

    def _add_output(self, error: BaseException) -> None:
        error.add_note(f"output of the processes:\n{self.fleet.errors()[-4000:]}")

    # ── going on ──────────────────────────────────────────────────────────────────────────────────────────────
    def all_workers_busy(self, since: float) -> dict[str, list[float]]:
        """Wait until every worker has finished a job it began, and every submitter was acknowledged one, since then.

        After how many seconds each did."""
        until(
            lambda: all(since < at for times in self._first(since).values() for at in times),
            PATIENCE,
            "every process to go on",
            pause=0.1,
        )
        return {who: [at - since for at in times] for who, times in self._first(since).items()}

    def _first(self, since: float) -> dict[str, list[float]]:
        """When each process first did its work, all of it after ``since``; 0 where it has not."""
        begun = {(run.pid, run.job) for run in self.fleet.runs() if run.started > since}
        workers, submitters = dict.fromkeys(self._workers, 0.0), dict.fromkeys(self._submitters, 0.0)
        for line in self.fleet.lines("accepted"):
            if line["mono"] > since and (line["pid"], line["job"]) in begun and not workers[line["pid"]]:
                workers[line["pid"]] = line["mono"]
        for line in self.fleet.lines("ack"):
            if line["mono"] > since and not submitters[line["by"]]:
                submitters[line["by"]] = line["mono"]
        return {"workers": list(workers.values()), "submitters": list(submitters.values())}

    def resumed(self, gone: float, back: float, *, within: float) -> None:
        """The store was away from ``gone`` to ``back``: everybody goes on by itself within so many seconds."""
        self._absences += 1
        self._away += back - gone
        for who, times in self.all_workers_busy(back).items():
            self._resumed[who] += times
            self.report.expect(max(times) <= within, f"{who} needed {max(times):.1f} s to go on")

    def cpu_seconds(self) -> float:
        """What the busiest worker has used so far."""
        used = [psutil.Process(pid).cpu_times() for pid in self._workers]
        return float(max(times.user + times.system for times in used))

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────
    def stop_submitters(self) -> None:
        """Each hears the answer to what it has submitted, and ends."""
        for process in self._submitters.values():
            process.terminate()
        for name, process in self._submitters.items():
            self.fleet.await_end(process, PATIENCE, f"{name} to stop")
            self.report.expect(process.returncode == 0, f"{name} ended with exit code {process.returncode}")

    def judged(self, checks: Sequence[Check] = ALWAYS, *, gone: Set[str] = frozenset()) -> Report:
        """Nothing acknowledged is lost but what is known to be ``gone``, every key has one job, everything ends, and
        the logs stay readable."""
        self.stop_submitters()
        await_quiet(self.fleet, DRAINED)
        report, fleet = self.report, self.fleet
        errors = fleet.lines("error")
        report.expect(not errors, f"errors reached submitters: {[line['text'] for line in errors[:3]]}")
        acks = [line | {"jobs": [job for job in line["jobs"] if job not in gone]} for line in fleet.lines("ack")]
        notes = fleet.database.notes()
        doubted = {(line["by"], line["index"]) for line in fleet.lines("doubt")}
        kept = [note.job for note in notes if (note.by, note.index) in doubted]
        self._judge_keys([line for line in acks if line["jobs"]], notes)
        self._judge_logs(with_losses=bool(gone))
        known = facts(fleet, [*(job for line in acks for job in line["jobs"]), *kept])
        refusals = [line["seconds"] for line in fleet.lines("unavailable")]
        report.figures |= {
            "acknowledged": len(known.acknowledged) - len(kept) + len(gone),
            "in doubt": f"{len(kept)} of {len(doubted)} stored",
            "executions": len(known.runs),
            "attempts": sum(row.attempts for row in known.rows.values()),
            "store troubles": len(fleet.lines("trouble")),
            "refused in s, p50 and max": _spread(refusals),
            **{f"{who} resumed in s, p50 and max": _spread(times) for who, times in self._resumed.items()},
        }
        ended = Counter(row.state for row in known.rows.values())
        report.expect(set(ended) == {"succeeded"}, f"a job with attempts left did not succeed: {dict(ended)}")
        return judged(fleet, known, report, checks=checks)

    def _judge_keys(self, acks: Sequence[dict[str, Any]], notes: Sequence[Note]) -> None:
        """One job for each submission, whatever was tried how often, and it is the acknowledged one."""
        stored = Counter((note.by, note.index) for note in notes)
        twice = [each for each, count in stored.items() if count > 1]
        self.report.expect(not twice, f"submissions with two jobs: {twice[:3]}")
        owners = self.fleet.database.keys()
        wrong = [line for line in acks if line["key"] is not None and owners.get(line["key"]) != line["jobs"][0]]
        self.report.expect(not wrong, f"keys that stand for another job: {wrong[:3]}")
        keyed = sum(line["key"] is not None for line in acks)
        self.report.expect(keyed == len(owners), f"{keyed} keys were acknowledged and {len(owners)} are stored")

    def _judge_logs(self, *, with_losses: bool) -> None:
        """No process writes secrets, or without end: an absence is some lines of one event each. A loss is
        ``with_losses``: a submitter reports lost jobs, too, which has no log but a line of text."""
        log = self.fleet.errors()
        lines = log.splitlines()
        for secret in (*SECRETS, *(quote(secret, safe="") for secret in SECRETS)):
            self.report.expect(secret not in log, f"the logs show {secret!r}")
        strange = [
            line for line in lines if not (line.startswith("{") or (with_losses and "came back without" in line))
        ]
        self.report.expect(not strange, f"not lines of a log: {strange[:3]}")
        most = WORKERS * (self._absences * AT_ONCE + self._away * A_SECOND)
        self.report.expect(len(lines) <= most, f"{len(lines)} log lines about {self._away:.0f} s without the store")
        self.report.figures["log lines"] = len(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.5):.2f} {max(values, default=0):.2f}"
