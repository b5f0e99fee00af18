"""The ready chaos scenarios, as a user runs them: `holdfast chaos run` with real workers on a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.crash.fleet import Fleet, until
from tests.crash.report import Report, sound
from tests.support.stores import Home

KINDS = {
    "duplicate-delivery": {"freeze", "lost_ack"},
    "worker-crash": {"crash"},
    "partial-execution": {"error"},
    "retry-storm": {"error"},
}
"""The kinds of faults of each scenario."""


def ready(folder: Path, home: Home, scenario: str, *, jobs: int, seed: int) -> Report:
    """One ready scenario: its books balance, and its figures agree with each other."""
    report = Report(figures={"seed": seed, "jobs": jobs})
    with Fleet(folder, home) as fleet:
        found = _run(fleet, folder, scenario, "--jobs", jobs, "--seed", seed, "--deadline", "10m")
        if not report.expect(bool(found), f"chaos run printed no report: {fleet.errors()[-2000:]}"):
            return report
        injected, effects = found["injected"], found["effects"]
        report.figures |= {"injected": injected, "executions": found["executions"], "effects": effects}
        report.complaints += found["problems"]
        report.expect(found["balanced"], "the books do not balance")
        report.expect(found["accepted"] == found["succeeded"] == jobs, f"{found['succeeded']} of {jobs} succeeded")
        report.expect(set(injected) <= KINDS[scenario], f"faults of other kinds: {injected}")
        report.expect(effects["once"] + effects["repeated"] == jobs, f"effects: {effects}")
        copies = 3 if scenario == "duplicate-delivery" else 1
        report.expect(found["submitted"] == copies * jobs, f"{found['submitted']} submissions")
        report.expect(found["killed_workers"] == injected.get("crash", 0), "workers died otherwise than by a fault")
        if scenario == "partial-execution":
            failures = found["executions"] - jobs - found["lost"]
            report.expect(failures == injected["error"], f"{failures} executions failed of {injected['error']} faults")
        if scenario == "retry-storm":
            report.expect(injected == {"error": 2 * jobs}, f"not each job failed twice: {injected}")
            report.expect(found["executions"] == 3 * jobs, f"{found['executions']} executions")
            report.expect(sum(found["retries"].values()) == 2 * jobs, f"retries: {found['retries']}")
        return sound(fleet, report)


def _run(fleet: Fleet, folder: Path, scenario: str, *arguments: object) -> dict[str, Any]:
    output = folder / "report.json"
    words = ["run", scenario, "--app", "tests.crash.programs.shop:app", "--json", "--payload", '{"number": "n-{n}"}']
    effects = ["--effects", "tests.crash.programs.shop:count_charges"]
    program = [sys.executable, "-m", "holdfast", "chaos", *words, *effects, *map(str, arguments)]
    command = ["sh", "-c", 'exec "$@" >"$0"', str(output), *program]
    process = fleet.run(command, stdin=subprocess.DEVNULL)
    until(lambda: process.poll() is not None, 700, f"chaos run {scenario}", pause=0.2)
    text = output.read_text() if output.exists() else ""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
