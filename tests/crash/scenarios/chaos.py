"""Chaos scenarios, as a user runs them: `holdfast chaos run` with real workers, a service and its provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.crash.fleet import ROOT, START_SECONDS, Fleet, until
from tests.crash.report import Report, sound
from tests.crash.user_table import UserTable
from tests.support.plain_http import PLAIN
from tests.support.servers import Port
from tests.support.stores import Home

EXAMPLE = ROOT / "examples" / "streams"
MIXED = "failures-and-successes"
KINDS = {
    "duplicate-delivery": {"freeze", "lost_ack"},
    "worker-crash": {"crash"},
    "partial-execution": {"error"},
    "retry-storm": {"error"},
    MIXED: {"latency", "store_latency"},
}
"""The kinds of faults of each scenario: of the four ready ones, and of one of these tests' own."""
ATTEMPTS = 5


def balanced(folder: Path, home: Home, scenario: str, *, jobs: int, seed: int) -> Report:
    """Runs a scenario, and compares its report with the service's own database and the provider's log."""
    report = Report(figures={"seed": seed, "jobs": jobs})
    with Fleet(folder, home) as fleet, _provider(fleet) as provider:
        users = UserTable(fleet.url, folder)
        users.create()
        found = _run(fleet, folder, scenario, provider, jobs, seed)
        if not report.expect(bool(found), f"chaos run printed no report: {fleet.errors()[-2000:]}"):
            return report
        _check_report(report, scenario, found, jobs)
        _check_services(report, fleet, users, provider, found)
        return sound(fleet, report)


@contextmanager
def _provider(fleet: Fleet) -> Iterator[str]:
    """The external API of the `streams` example, as a process; its URL."""
    port = Port()
    url = f"http://127.0.0.1:{port.number}"
    command = [sys.executable, "-m", "uvicorn", "streams.provider:site", "--port", str(port.number)]
    path = os.pathsep.join([str(EXAMPLE), str(ROOT)])
    process = fleet.run([*command, "--log-level", "warning"], PYTHONPATH=path)

    def is_there() -> bool:
        with suppress(httpx.TransportError):
            limits = {"calls_per_second": 100_000}
            return httpx.put(f"{url}/behaviour", json=limits, timeout=START_SECONDS, verify=PLAIN).is_success
        return False

    until(is_there, START_SECONDS, "the provider to start")
    try:
        yield url
    finally:
        process.kill()
        process.wait()
        port.release()


def _run(fleet: Fleet, folder: Path, scenario: str, provider: str, jobs: int, seed: int) -> dict[str, Any]:
    output = folder / "report.json"
    source = str(Path(__file__).with_name(f"{MIXED}.toml")) if scenario == MIXED else scenario
    options = ["--app", "tests.crash.programs.service:app", "--effects", "tests.crash.programs.service:count_calls"]
    if scenario != MIXED:
        options += ["--payload", '{"number": "{n}"}']
    options += ["--jobs", str(jobs), "--seed", str(seed), "--deadline", "10m", "--json"]
    program = [sys.executable, "-m", "holdfast", "chaos", "run", source, *options]
    command = ["sh", "-c", 'exec "$@" >"$0"', str(output), *program]
    process = fleet.run(command, stdin=subprocess.DEVNULL, PROVIDER_URL=provider)
    until(lambda: process.poll() is not None, 900, f"chaos run {scenario}", pause=0.2)
    text = output.read_text() if output.exists() else ""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _check_report(report: Report, scenario: str, found: dict[str, Any], jobs: int) -> None:
    """The report's figures are those that the faults must have, and agree with each other."""
    injected, effects = found["injected"], found["effects"]
    report.figures |= {"injected": injected, "executions": found["executions"], "effects": effects}
    report.complaints += found["problems"]
    dead = jobs // 2 if scenario == MIXED else 0
    report.expect(found["balanced"], "the books do not balance")
    report.expect(found["accepted"] == jobs, f"{found['accepted']} of {jobs} jobs were accepted")
    report.expect((found["succeeded"], found["dead"]) == (jobs - dead, dead), f"{found['dead']} jobs are dead")
    report.expect(set(injected) <= KINDS[scenario], f"faults of other kinds: {injected}")
    report.expect(effects["once"] + effects["repeated"] == jobs - dead, f"effects: {effects}")
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
        report.expect(effects["once"] == jobs, f"a job that failed before its handler had an effect: {effects}")
    if scenario == MIXED:
        report.expect(found["executions"] == jobs - dead + ATTEMPTS * dead, f"{found['executions']} executions")
        report.expect(effects["once"] == jobs - dead, f"effects: {effects}")


def _check_services(report: Report, fleet: Fleet, users: UserTable, provider: str, found: dict[str, Any]) -> None:
    """Each job that succeeded is one row of the service and one message of the provider, and no other job is any."""
    succeeded = Counter(row.id for row in fleet.database.rows().values() if row.state == "succeeded")
    report.expect(len(succeeded) == found["succeeded"], f"the store has {len(succeeded)} jobs that succeeded")
    rows = users.count()
    report.expect(rows == succeeded, f"{rows.total()} users of {len(rows)} jobs, for {len(succeeded)} that succeeded")
    messages = httpx.get(f"{provider}/messages", timeout=START_SECONDS, verify=PLAIN).json()
    report.expect(set(messages) == set(succeeded), f"{len(messages)} messages for {len(succeeded)} jobs")
    calls = httpx.get(f"{provider}/calls", timeout=START_SECONDS, verify=PLAIN).json()
    repeats = len(calls) - len(messages)
    report.expect(repeats <= found["executions"] - len(succeeded), f"{repeats} calls were repeated")
    report.figures |= {"users": len(rows), "messages": len(messages), "calls repeated": repeats}
