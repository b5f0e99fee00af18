"""Real processes for a test: started, killed, frozen, woken, and none of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.settings.settings import SETTINGS as SETTINGS_TABLE
from holdfast.settings.types import PREFIX
from tests.crash import ledger
from tests.crash.checker import Frozen
from tests.crash.database import database_of
from tests.support import forks
from tests.support.stores import Home

ROOT = Path(__file__).parents[2]
MARK = "CRASH_TEST"
_CLAIM_SECONDS = 0.3
"""After which a server has done the claim that a killed or stopped process had sent."""
START_SECONDS = 60.0
SETTINGS = {
    "lease": "2s",
    "heartbeat": "600ms",
    "sweep": "500ms",
    "poll": "1s",
    "grace": "5s",
    "concurrency": "5",
    "log_level": "warning",
}
PASSED_ON = frozenset(f"{PREFIX}{name.upper()}" for name in SETTINGS_TABLE if name.startswith("transport"))
"""What a home says by the environment."""
LEASE, SWEEP = 2.0, 0.5 * 1.2  # seconds; sweeps are jittered by a fifth
WORKER = "tests.crash.programs.worker"
ACTOR = "tests.storm.history.actor"
ENDS = frozenset({None, 0, -signal.SIGKILL})
"""Expected exit codes of a fleet's process: alive, stopped or killed. With any other it ended by itself."""


@dataclass(frozen=True)
class Kill:
    """One process that was killed, and what it held."""

    pid: int
    wall: float
    held: Sequence[tuple[str, int]]
    unstarted: Sequence[tuple[str, int]]


class Fleet:
    """Processes that share one store and one ledger, in one folder."""

    def __init__(self, folder: Path, home: Home, *, direct: str | None = None, **settings: str) -> None:
        """``direct``: the URL for the test itself, where the fleet's goes through trouble."""
        self._folder = folder
        self._home = home
        self._lent = ExitStack()
        self.url = self._lent.enter_context(home(folder))
        self.database = database_of(direct or self.url)
        self.ledger = folder / "ledger"
        self._reader = ledger.Reader(self.ledger)
        self._mark = uuid.uuid4().hex
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in PASSED_ON},
            **{f"HOLDFAST_{name.upper()}": value for name, value in {**SETTINGS, **settings}.items()},
            "HOLDFAST_URL": self.url,
            "HOLDFAST_CONFIG": str(folder / "holdfast.toml"),
            "HOLDFAST_APP": "tests.crash.programs.tasks:app",
            "CRASH_LEDGER": str(self.ledger),
            "PYTHONPATH": str(ROOT),
            MARK: self._mark,
        }
        (folder / "holdfast.toml").touch()
        self._log = (folder / "stderr").open("ab")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.killed: dict[int, float] = {}
        self.kills: list[Kill] = []
        self.frozen: list[Frozen] = []
        self._unstarted: Counter[str] = Counter()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (mishaps := self.mishaps()):
            error.add_note("\n".join(mishaps))
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()
        until(self._all_exited, 60, "every process of this test to be gone")
        self._lent.close()

    def _all_exited(self) -> bool:
        """Kill what is left; whether nothing was."""
        survivors = self._survivors()
        for pid in survivors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not survivors

    def _survivors(self) -> list[int]:
        """Every living process that descends from one of ours, wherever it went."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:  # it has just ended, or is not ours to read
                    continue
        return found

    @property
    def carried(self) -> bool:
        """Whether a transport carries the jobs' ids."""
        return f"{PREFIX}TRANSPORT" in self._environment

    def another(self, name: str) -> str:
        """The URL of one more empty store."""
        (self._folder / name).mkdir()
        return self._lent.enter_context(self._home(self._folder / name))

    # ── starting ──────────────────────────────────────────────────────────────────────────────────────────────
    def start(self, program: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Run one of the programs; it leads a session of its own."""
        words, given = [program, *arguments], {**self._environment, **environment}
        process = forks.start(words, folder=ROOT, environment=given, output=self._log.fileno(), session=True)
        self.processes.append(process)
        return process

    def run(
        self, command: Sequence[str | Path], *, stdin: int = subprocess.DEVNULL, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run any program as one of the fleet."""
        process = subprocess.Popen(
            list(command),
            env={**self._environment, **environment},
            cwd=ROOT,
            stdin=stdin,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_workers(self, count: int, **environment: str) -> None:
        """Start workers and wait until they work."""
        started = {self.start(WORKER, **environment).pid for _ in range(count)}
        self.await_ready(started)

    def await_ready(self, pids: set[int]) -> None:
        """Wait until these workers have reported that they are there."""
        until(lambda: pids <= {line["pid"] for line in self.lines("ready")}, START_SECONDS, "the workers to start")

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    def working(self) -> list[subprocess.Popen[bytes]]:
        """Living workers that have begun to work."""
        ready = {line["pid"] for line in self.lines("ready")}
        return [process for process in self.living() if process.pid in ready]

    def await_working(self, count: int) -> list[subprocess.Popen[bytes]]:
        """``working``, once there are so many: on a busy machine what takes a dead one's place is slow to start, and
        where all are killed as soon as they have, none can keep a promise."""
        until(lambda: len(self.working()) >= count, count * START_SECONDS, f"{count} workers to work")
        return self.working()

    def await_end(self, process: subprocess.Popen[bytes], seconds: float, what: str) -> float:
        """Wait until this process has ended; how long that took."""
        return until(lambda: process.poll() is not None, seconds, what, pause=0.01)

    # ── hurting ───────────────────────────────────────────────────────────────────────────────────────────────
    def kill(self, process: subprocess.Popen[bytes]) -> Kill:
        """kill -9; what the process held is looked up while its leases last."""
        process.kill()
        process.wait()
        self.killed[process.pid] = time.monotonic()
        kill = Kill(process.pid, time.time(), *self._read_held(process.pid))
        self.kills.append(kill)
        return kill

    def _read_held(self, pid: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """The leases that a killed or stopped process holds, and those whose handlers it has not started."""
        held = self.database.held_by(pid)
        time.sleep(_CLAIM_SECONDS)
        held = list(dict.fromkeys([*held, *self.database.held_by(pid)]))
        started = {(run.job, run.claims) for run in self.runs()}
        unstarted = [lease for lease in held if lease not in started]
        self._unstarted.update(job for job, _ in unstarted)
        return held, unstarted

    def freeze(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """SIGSTOP, and SIGCONT so many seconds later."""
        since = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        self._read_held(process.pid)
        time.sleep(seconds)
        self.frozen.append(Frozen(process.pid, since, time.monotonic()))
        os.kill(process.pid, signal.SIGCONT)

    def keep_up(self, count: int) -> None:
        """Start workers until there are ``count``; those that died by themselves are noted as killed."""
        for process in self.processes:
            if process.poll() == -signal.SIGKILL and process.pid not in self.killed:
                self.killed[process.pid] = time.monotonic()
        for _ in range(count - len(self.living())):
            self.start(WORKER)

    # ── seeing ────────────────────────────────────────────────────────────────────────────────────────────────
    def lines(self, what: str) -> list[dict[str, Any]]:
        """The ledger's lines of one kind."""
        return [line for line in self._reader.lines() if line["what"] == what]

    def kinds(self) -> set[str]:
        """The kinds of lines there are."""
        return {str(line["what"]) for line in self._reader.lines()}

    def runs(self) -> list[ledger.Execution]:
        """Every execution so far."""
        return ledger.executions(self._reader.lines())

    def unstarted(self) -> Counter[str]:
        """Claims per job that killed or frozen processes held unstarted."""
        return self._unstarted

    def errors(self) -> str:
        """What the processes wrote to stderr."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def mishaps(self) -> list[str]:
        """Mishaps outside the scenario: processes that ended by themselves, unexpected errors."""
        codes = [(process, process.poll()) for process in self.processes]
        found = [
            f"{process.args!r} ended by itself with exit code {code}" for process, code in codes if code not in ENDS
        ]
        return [*found, "a process wrote a traceback"] if "Traceback (most recent" in self.errors() else found


def until(condition: Callable[[], bool], seconds: float, what: str, *, pause: float = 0.05) -> float:
    """Wait for the condition; how long it took. AssertionError where it does not come true."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(pause)
    return time.monotonic() - began
