"""Runs scenarios one after the other and remembers what is done: an interrupted storm goes on where it was.

What is remembered holds for the very code it was found with: a change in the product begins a new storm. A scenario
that complained is run again, with another seed; what it complained of stays on record, whatever comes of that.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.crash.report import Report
from tests.storm.scenarios import SCENARIOS, Scenario

ROOT = Path(__file__).parents[2]


def fingerprint(*folders: Path) -> str:
    """Changes with any line of the code that the storm tests, or that tests it."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".sql", ".lua", ".js", ".mjs", ".yml"):
                digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def run_scenario(name: str, scenario: Scenario, scale: float) -> dict[str, Any]:
    """Runs a scenario in this process; returns its seed, complaints, figures and seconds."""
    folder = Path(tempfile.mkdtemp(prefix=f"storm-{name}-"))
    seed = random.randrange(1 << 32)
    began = time.monotonic()
    try:
        report = scenario(folder, lambda full: max(1, round(full * scale)), seed)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        report = Report(complaints=[what, *getattr(error, "__notes__", ())])
    if report.complaints:
        report.figures["kept in"] = str(folder)
    else:
        shutil.rmtree(folder)
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "complaints": report.complaints, "figures": report.figures, "seconds": seconds}


def run_in_own_process(name: str, scale: float) -> dict[str, Any]:
    """Runs a scenario in a process of its own, with servers of its own; returns the same."""
    command = [sys.executable, "-m", "tests.storm.one", name, str(scale)]
    ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(ran.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        complaint = f"its process ended with status {ran.returncode}: {ran.stderr[-1000:]}"
        return {"seed": 0, "complaints": [complaint], "figures": {}, "seconds": 0.0}


class Storm:
    """One storm: its scale, and every run of each scenario so far, oldest first."""

    def __init__(
        self, state: Path, scale: float, code: str, scenarios: Mapping[str, Scenario] = SCENARIOS, *, parallel: int = 1
    ) -> None:
        self._state = state
        self._scale = scale
        self._scenarios = scenarios
        self._parallel = parallel
        self._identity = {"code": code, "counts": scale}
        self.runs: dict[str, list[dict[str, Any]]] = self._remembered()

    def _remembered(self) -> dict[str, list[dict[str, Any]]]:
        if not self._state.exists():
            return {}
        known = json.loads(self._state.read_text(encoding="utf-8"))
        return dict(known["runs"]) if known["identity"] == self._identity else {}

    def _remember(self) -> None:
        self._state.parent.mkdir(exist_ok=True)
        draft = self._state.with_suffix(".new")
        draft.write_text(json.dumps({"identity": self._identity, "runs": self.runs}, indent=1), encoding="utf-8")
        draft.replace(self._state)

    def run(self, names: Sequence[str]) -> bool:
        """Run what is left of these; whether every promise was kept, each time."""
        left = [name for name in names if not self.runs.get(name) or self.runs[name][-1]["complaints"]]
        for name, result in self._results(left):
            self.runs.setdefault(name, []).append(result)
            self._remember()
        return not any(self.broken(name) for name in names)

    def _results(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._parallel == 1:
            for name in names:
                print(f"{name} …", flush=True)
                yield name, run_scenario(name, self._scenarios[name], self._scale)
            return
        with ThreadPoolExecutor(self._parallel) as pool:
            under_way = {pool.submit(run_in_own_process, name, self._scale): name for name in names}
            for number, each in enumerate(as_completed(under_way), start=1):
                result = each.result()
                verdict = "BROKEN" if result["complaints"] else "kept"
                print(f"{number}/{len(names)} {under_way[each]}: {verdict}, {result['seconds']} s", flush=True)
                yield under_way[each], result

    def broken(self, name: str) -> list[dict[str, Any]]:
        """The runs of this scenario that complained."""
        return [run for run in self.runs[name] if run["complaints"]]

    def table(self, names: Sequence[str]) -> str:
        """What was found, one scenario a line with the figures of its last run, and every complaint below."""
        lines = [f"{'scenario':<30}{'verdict':<16}{'seconds':>8}  figures"]
        for name in names:
            runs, broken = self.runs[name], self.broken(name)
            verdict = f"{len(broken)} of {len(runs)} BROKEN" if broken else "kept"
            figures = ", ".join(f"{key} {value}" for key, value in runs[-1]["figures"].items() if key != "stderr")
            lines.append(f"{name:<30}{verdict:<16}{runs[-1]['seconds']:>8}  {figures}")
        for name in names:
            for run in self.broken(name):
                lines += [f"{name}, seed {run['seed']}: {complaint}" for complaint in run["complaints"][:20]]
        return "\n".join(lines)
