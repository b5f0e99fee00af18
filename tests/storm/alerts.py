"""Every alert of ``deploy/prometheus/rules.yml``, evaluated by Prometheus's own ``promtool`` over series.

promtool comes with the Debian package ``prometheus``: ``apt-get install prometheus``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.crash.report import Report

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
STEP = 15
"""Seconds between two samples, and between two evaluations."""
_MISSING = (
    "promtool is not on PATH: install the Debian package prometheus "
    "(apt-get install --no-install-recommends prometheus), or unpack promtool from a release of Prometheus"
)


class Case(NamedTuple):
    """Series in promtool's notation, and what one alert shows ``at`` minutes. ``summary`` is None if it is silent."""

    alert: str
    name: str
    series: dict[str, str]
    at: int
    labels: dict[str, str] = {}  # noqa: RUF012 - a tuple's default, never changed
    summary: str | None = None


def _dead(instance: str, task: str = "mail") -> str:
    return f'holdfast_jobs_dead_total{{instance="{instance}",task="{task}"}}'


def _attempts(succeeded: str, failed: str, dead: str) -> dict[str, str]:
    counters = {"succeeded": succeeded, "failed": failed, "dead": dead}
    return {f'holdfast_jobs_{each}_total{{instance="w",task="mail"}}': counters[each] for each in counters}


def _heartbeats(refused: str, sent: str) -> dict[str, str]:
    counters = {"errors_total": refused, "latency_seconds_count": sent}
    return {f'holdfast_store_{each}{{instance="w",verb="heartbeat"}}': counters[each] for each in counters}


def _late(quick: str, every: str, family: str, labels: str) -> dict[str, str]:
    name = f"holdfast_{family}_bucket"
    buckets = {"0.1": quick, "1.0": quick, "2.5": every, "+Inf": every}
    return {f'{name}{{instance="w",{labels}le="{bound}"}}': values for bound, values in buckets.items()}


_QUEUE = {"queue": "mail"}
_TASK = {"task": "mail"}
_WORKER = {"instance": "w"}
_OLDEST = 'holdfast_queue_oldest_seconds{queue="mail"}'
_PAUSED = 'holdfast_queue_paused{queue="mail"}'
_TICK_LATE = 'holdfast_schedule_late_seconds{schedule="nightly"}'
_QUEUED = 'holdfast_queue_jobs{queue="mail",state="queued"}'
_LOST = 'holdfast_lease_lost_total{instance="w"}'
_RECOVERED = 'holdfast_jobs_recovered_total{instance="w"}'
_REQUESTS = 'holdfast_http_requests_total{{instance="a",status_code="{}"}}'
_UP = 'up{job="holdfast-api",instance="api:8000"}'
_DEAD_LETTERS = "New dead letters of mail in 15 minutes: "
_TAKEN_BACK = "Jobs taken back in 15 minutes from workers that were gone: "

CASES = (
    Case("HoldfastQueueLate", "late", {_OLDEST: "342x80", _PAUSED: "0x80"}, 10, _QUEUE,
         "The oldest job of queue mail has waited 5m 42s."),
    Case("HoldfastQueueLate", "late for a minute", {_OLDEST: "0x20 342x4 0x60", _PAUSED: "0x80"}, 6),
    Case("HoldfastQueueLate", "paused", {_OLDEST: "342x80", _PAUSED: "1x80"}, 10),
    Case("HoldfastDrainSlow", "slow", {"holdfast_predicted_drain_seconds": "3600x80"}, 20, {},
         "What waits would take 1h 0m 0s at the present rate."),
    Case("HoldfastDrainSlow", "quick", {"holdfast_predicted_drain_seconds": "600x80"}, 20),
    Case("HoldfastScheduleLate", "late", {_TICK_LATE: "342x80"}, 10, {"schedule": "nightly"},
         "Schedule nightly is late by 5m 42s."),
    Case("HoldfastScheduleLate", "late for a minute", {_TICK_LATE: "0x20 342x4 0x60"}, 6),
    Case("HoldfastNoWorkers", "none", {"holdfast_workers": "0x40", _QUEUED: "5x40"}, 5, {},
         "Jobs wait, and no worker is alive."),
    Case("HoldfastNoWorkers", "one", {"holdfast_workers": "1x40", _QUEUED: "5x40"}, 5),
    Case("HoldfastNoWorkers", "nothing waits", {"holdfast_workers": "0x40", _QUEUED: "0x40"}, 5),
    Case("HoldfastQueuePausedLong", "forgotten", {_PAUSED: "1x6000"}, 1445, _QUEUE,
         "Queue mail has been paused for a day."),
    Case("HoldfastQueuePausedLong", "an hour", {_PAUSED: "1x240 0x5760"}, 1445),
    Case("HoldfastDeadLetters", "first burst", {_dead("w"): "0x8 7x40"}, 5, _TASK, _DEAD_LETTERS + "7."),
    Case("HoldfastDeadLetters", "before the first scrape", {_dead("w"): "7x40"}, 5, _TASK, _DEAD_LETTERS + "7."),
    Case("HoldfastDeadLetters", "one, later", {_dead("w"): "0x200 1x40"}, 55, _TASK, _DEAD_LETTERS + "1."),
    Case("HoldfastDeadLetters", "two workers", {_dead("v"): "3x200 5x40", _dead("w"): "_x190 2x50"}, 55, _TASK,
         _DEAD_LETTERS + "4."),
    Case("HoldfastDeadLetters", "another task", {_dead("w"): "0x40", _dead("w", "sms"): "0x8 2x40"}, 5,
         {"task": "sms"}, "New dead letters of sms in 15 minutes: 2."),
    Case("HoldfastDeadLetters", "none", {_dead("w"): "0x240"}, 55),
    Case("HoldfastDeadLetters", "an hour ago", {_dead("w"): "0x8 7x300"}, 60),
    Case("HoldfastJobsFailing", "half", _attempts("0+1x120", "0+1x120", "0x120"), 25, _TASK,
         "50% of the attempts of mail fail."),
    Case("HoldfastJobsFailing", "all dead", _attempts("0x120", "0x120", "0+2x120"), 25, _TASK,
         "100% of the attempts of mail fail."),
    Case("HoldfastJobsFailing", "one in ten", _attempts("0+9x120", "0+1x120", "0x120"), 25),
    Case("HoldfastJobsFailing", "nothing runs", _attempts("5x120", "5x120", "5x120"), 25),
    Case("HoldfastWorkersLost", "one", {_RECOVERED: "0x100 1x60"}, 30, {}, _TAKEN_BACK + "1."),
    Case("HoldfastWorkersLost", "thirty", {_RECOVERED: "0x100 10 20 30x60"}, 30, {}, _TAKEN_BACK + "30."),
    Case("HoldfastWorkersLost", "before the first scrape", {_RECOVERED: "4x40"}, 5, {}, _TAKEN_BACK + "4."),
    Case("HoldfastWorkersLost", "none", {_RECOVERED: "4x240"}, 55),
    Case("HoldfastLeasesLost", "two", {_LOST: "0x100 2x60"}, 30, _WORKER,
         "Settlements of w that came too late in 15 minutes: 2."),
    Case("HoldfastLeasesLost", "none", {_LOST: "2x240"}, 55),
    Case("HoldfastWorkerUnwell", "unwell", {'holdfast_worker_healthy{instance="w"}': "0x40"}, 8, _WORKER,
         "Worker w does not fetch, or its heartbeats are not stored."),
    Case("HoldfastWorkerUnwell", "starts", {'holdfast_worker_healthy{instance="w"}': "0x4 1x40"}, 8),
    Case("HoldfastLoopLate", "blocked", _late("0+1x120", "0+2x120", "loop_lag_seconds", ""), 25, _WORKER,
         "The event loop of w is more than a second late."),
    Case("HoldfastLoopLate", "quick", _late("0+2x120", "0+2x120", "loop_lag_seconds", ""), 25),
    Case("HoldfastTargetDown", "down", {_UP: "1x8 0x40"}, 6, {"job": "holdfast-api", "instance": "api:8000"},
         "Prometheus does not reach api:8000 of holdfast-api."),
    Case("HoldfastTargetDown", "another's", {'up{job="node",instance="a"}': "0x40"}, 6),
    Case("HoldfastApiAbsent", "its targets are gone", {"holdfast_store_up": "1x8 stale"}, 6, {},
         "No API process is scraped: alerts about queues, schedules and the store are silent."),
    Case("HoldfastApiAbsent", "the store is away", {"holdfast_store_up": "1x8 0x40"}, 6),
    Case("HoldfastStoreDown", "down", {"holdfast_store_up": "1x8 0x40"}, 5, {}, "No API process reaches the store."),
    Case("HoldfastStoreDown", "one of two", {'holdfast_store_up{instance="a"}': "0x40",
                                             'holdfast_store_up{instance="b"}': "1x40"}, 5),
    Case("HoldfastStoreSlow", "slow", _late("0x120", "0+2x120", "store_latency_seconds", 'verb="claim",'), 25,
         {"verb": "claim"}, "One in a hundred `claim` calls takes more than 2.485s."),
    Case("HoldfastStoreSlow", "quick", _late("0+2x120", "0+2x120", "store_latency_seconds", 'verb="claim",'), 25),
    Case("HoldfastStoreErrors", "full", _heartbeats("0x8 1+1x120", "0x8 1+1x120"), 25, {"verb": "heartbeat"},
         "100% of the calls `heartbeat` of the store fail."),
    Case("HoldfastStoreErrors", "once", _heartbeats("0x40 1x120", "0x40 1x120"), 21),
    Case("HoldfastStoreErrors", "a tenth", _heartbeats("0+1x120", "0+10x120"), 25),
    Case("HoldfastApiErrors", "a tenth", {_REQUESTS.format(200): "0+9x60", _REQUESTS.format(503): "0+1x60"}, 12, {},
         "10% of the requests are answered 5xx."),
    Case("HoldfastApiErrors", "a client's own", {_REQUESTS.format(200): "0+9x60", _REQUESTS.format(404): "0+9x60"},
         12),
)  # fmt: skip
"""For each alert at least one case in which it fires and one in which it is silent."""


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def evaluated(folder: Path) -> Report:
    """Runs promtool over every case, each as a file of its own."""
    report, rules = Report(), alerts()
    promtool = shutil.which("promtool")
    if promtool is None:
        return Report(complaints=[_MISSING])
    for number, case in enumerate(CASES):
        path = folder / f"case-{number}.yml"
        path.write_text(json.dumps(_document(case, rules[case.alert])), encoding="utf-8")
        done = subprocess.run(
            [promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
        )
        report.expect(not done.returncode, f"{case.alert}, {case.name}: {done.stdout}{done.stderr}")
    report.figures |= {"alerts": len(rules), "cases": len(CASES)}
    return report


def _document(case: Case, rule: dict[str, Any]) -> dict[str, Any]:
    """One case as promtool reads it; JSON is YAML."""
    fires = [] if case.summary is None else [_expected(case, rule, case.summary)]
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{STEP}s",
        "tests": [
            {
                "interval": f"{STEP}s",
                "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
                "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": case.alert, "exp_alerts": fires}],
            }
        ],
    }


def _expected(case: Case, rule: dict[str, Any], summary: str) -> dict[str, Any]:
    runbook = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], rule["annotations"]["runbook"])
    return {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {"summary": summary, "runbook": runbook},
    }
