"""Runs scenarios one after the other and remembers what is done: an interrupted storm goes on where it was.

What is remembered holds for the very code it was found with: a change in the product begins a new storm.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
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
            if file.suffix in (".py", ".sql", ".lua"):
                digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Storm:
    """One storm: its scale, and its results so far."""

    def __init__(self, state: Path, scale: float, code: str, scenarios: Mapping[str, Scenario] = SCENARIOS) -> None:
        self._state = state
        self._scale = scale
        self._scenarios = scenarios
        self._identity = {"code": code, "counts": scale}
        self.results: dict[str, dict[str, Any]] = self._remembered()

    def _remembered(self) -> dict[str, dict[str, Any]]:
        if not self._state.exists():
            return {}
        known = json.loads(self._state.read_text(encoding="utf-8"))
        return dict(known["results"]) if known["identity"] == self._identity else {}

    def _remember(self) -> None:
        self._state.parent.mkdir(exist_ok=True)
        draft = self._state.with_suffix(".new")
        draft.write_text(json.dumps({"identity": self._identity, "results": self.results}, indent=1), encoding="utf-8")
        draft.replace(self._state)

    def run(self, names: Sequence[str]) -> bool:
        """Run what is left of these; whether every promise was kept."""
        for name in names:
            if self.results.get(name, {"complaints": True})["complaints"]:
                print(f"{name} …", flush=True)
                self.results[name] = self._one(name)
                self._remember()
        return not any(self.results[name]["complaints"] for name in names)

    def _one(self, name: str) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix=f"storm-{name}-"))
        began = time.monotonic()
        try:
            report = self._scenarios[name](folder, self._count, random.randrange(1 << 32))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            report = Report(
                complaints=[f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"]
            )
        if report.complaints:
            report.figures["kept in"] = str(folder)
        else:
            shutil.rmtree(folder)
        seconds = round(time.monotonic() - began, 1)
        return {"complaints": report.complaints, "figures": report.figures, "seconds": seconds}

    def _count(self, full: int) -> int:
        return max(1, round(full * self._scale))

    def table(self, names: Sequence[str]) -> str:
        """What was found, one scenario a line, and every complaint below."""
        lines = [f"{'scenario':<30}{'verdict':<10}{'seconds':>8}  figures"]
        for name in names:
            result = self.results[name]
            verdict = "kept" if not result["complaints"] else f"{len(result['complaints'])} BROKEN"
            figures = ", ".join(f"{key} {value}" for key, value in result["figures"].items() if key != "stderr")
            lines.append(f"{name:<30}{verdict:<10}{result['seconds']:>8}  {figures}")
        for name in names:
            lines += [f"{name}: {complaint}" for complaint in self.results[name]["complaints"][:20]]
        return "\n".join(lines)
