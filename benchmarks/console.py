"""Console on a store of a million jobs: time of each page, and the cost of ten consoles that are open.

An open console is what ``console.js`` does: the same page again and again, four seconds after the last answer, or
later if that was slow.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import uvloop

from benchmarks.application import fill
from benchmarks.drained import drained, rate_of
from benchmarks.harness import Line, Plan, at_most, percentile, times_at_least
from benchmarks.processes import Child, child
from holdfast.web.keys import new_key
from holdfast.web.keys_file import change_keys

_OWN = {"sec-fetch-site": "same-origin"}
_CONSOLES = 10
_INTERVAL, _SHARE = 4.0, 20  # of console.js
_DRAINED = "drained"
_PATIENCE = 60.0  # seconds
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the authorities, whose loading takes 50 ms of CPU


class Filled(NamedTuple):
    """A filled store: its URL, a job with many attempts and log lines, the cursor of the middle of the list of jobs,
    and the CPU seconds of its server so far."""

    url: str
    story: str
    middle: str
    server_seconds: Callable[[], float]


Fill = Callable[[Plan, int], AbstractContextManager[Filled]]

PAGES: dict[str, str] = {
    "overview": "",
    "overview, last week": "?span=7d",
    "jobs": "/jobs",
    "jobs, in the middle": "/jobs?cursor={middle}",
    **{f"jobs, {state}": f"/jobs?state={state}" for state in ("queued", "running", "scheduled", "waiting", "failed")},
    **{f"jobs, {state}": f"/jobs?state={state}" for state in ("succeeded", "dead", "cancelled")},
    "jobs of a queue": "/jobs?queue=queue-7",
    "jobs of a queue, dead": "/jobs?queue=queue-7&state=dead",
    "jobs of an unused queue": "/jobs?queue=none",
    "jobs of a task": "/jobs?task=task-7",
    "jobs with a tag": "/jobs?tag=customer-7",
    "jobs of a worker": "/jobs?worker=worker-7",
    "jobs with a reason": "/jobs?reason=error",
    "jobs with an error": "/jobs?error=host+db-7+did",
    "jobs, dead with an error": "/jobs?state=dead&error=host+db-7+did",
    "jobs, dead with no such error": "/jobs?state=dead&error=nothing",
    "jobs of an hour": "/jobs?created_after=-2d&created_before=-47h",
    "jobs of a group of errors": "/jobs?error_group=000000000007",
    "a job of 20 attempts": "/jobs/{story}",
    "a job by its key": "/jobs/key:story",
    "errors": "/errors",
    "a group of errors": "/errors/000000000007",
    "queues": "/queues",
    "queues, next": "/queues?after=queue-7",
    "workers": "/workers",
    "schedules": "/schedules",
    "limits": "/limits",
    "a limit": "/limits/limit-7",
    "faults": "/faults",
}
"""Address of each page; names in braces are fields of ``Filled``."""
_OPEN = ("", "/jobs", "", "/jobs?state=dead", "", "/queues", "", "/jobs/{story}", "", "/workers")
"""Pages of the consoles that are open."""


def lines(plan: Plan, fill_store: Fill, jobs: int) -> list[Line]:
    """Returns the lines of one store with so many jobs."""
    found: list[Line] = []
    with fill_store(plan, jobs) as filled, _api(plan, filled) as api:
        found += _measure_pages(plan, api, filled)
        found += _measure_consoles(plan, api, filled)
    return found


class Api(NamedTuple):
    """An API as a process, with a key to sign in."""

    process: Child
    address: str
    key: str

    def cpu_seconds(self) -> float:
        """Returns the CPU time of its process so far."""
        return float(self.process.ask("where")["cpu"])

    @contextmanager
    def sign_in(self) -> Iterator[httpx.Client]:
        """Yields a client that is signed in."""
        with httpx.Client(base_url=self.address, timeout=60, verify=_PLAIN) as client:
            answer = client.post("/console/sign-in", data={"key": self.key}, headers=_OWN)
            if answer.status_code != 303:
                raise RuntimeError(f"sign-in was answered {answer.status_code}")
            yield client


@contextmanager
def _api(plan: Plan, filled: Filled) -> Iterator[Api]:
    with plan.place() as folder:
        path = Path(folder) / "keys.toml"
        key_id, key, token = new_key("a benchmark's", ("admin",), (), None)
        change_keys(path, lambda known: {**known, key_id: key})
        with child("benchmarks.http.api", filled.url, path) as process:
            yield Api(process, f"http://127.0.0.1:{process.ask('where')['port']}", token)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _measure_pages(plan: Plan, api: Api, filled: Filled) -> list[Line]:
    """Asks for each page in turn, so that a cache of a few seconds serves as it does a person."""
    times, limit = plan.size(50, 1), at_most(200)
    with api.sign_in() as client, api.sign_in() as other:
        asks: dict[str, Callable[[], httpx.Response]] = {
            "sign-in": lambda: other.get("/console/sign-in"),
            "a key, checked": lambda: other.post("/console/sign-in", data={"key": api.key}, headers=_OWN),
        }
        for name, path in PAGES.items():
            address = f"/console{path.format(middle=filled.middle, story=filled.story)}"
            asks[name] = partial(client.get, address)
        for name, form in _PREVIEWS.items():
            asks[name] = partial(client.get, "/console/bulk/preview", params=form)
        found = {name: Line(name, "ms, p95", other="p50", target=limit) for name in asks}
        for _ in range(plan.rounds):
            took: dict[str, list[float]] = {name: [] for name in asks}
            for _ in range(times):
                for name, ask in asks.items():
                    took[name].append(_time(name, ask, found[name]))
            for name, milliseconds in took.items():
                found[name].add(percentile(milliseconds, 95), percentile(milliseconds, 50))
    return list(found.values())


_PREVIEWS = {
    "bulk preview, dead": {"action": "replay", "state": "dead"},
    "bulk preview, dead of a queue": {"action": "replay", "state": "dead", "queue": "queue-7"},
    "bulk preview, an error": {"action": "delete", "state": "dead", "error": "host db-7 did"},
}


def _time(name: str, ask: Callable[[], httpx.Response], line: Line) -> float:
    started = time.perf_counter()
    answer = ask()
    took = (time.perf_counter() - started) * 1000
    if answer.status_code == 422 and "too long" in answer.text:
        line.missing = "ends with: the search took too long"
    elif answer.status_code not in (200, 303):
        raise RuntimeError(f"{name} was answered {answer.status_code}: {answer.text[:2000]}")
    return took


# ── open consoles ─────────────────────────────────────────────────────────────────────────────────────────────────
def _measure_consoles(plan: Plan, api: Api, filled: Filled) -> list[Line]:
    """CPU time of the API and of the database beside ten consoles, and drains beside them and without, in turn."""
    share = Line(f"{_CONSOLES} open consoles", "% of a core", target=at_most(5))
    server = Line(f"{_CONSOLES} open consoles, database server", "% of a core")
    answer = Line(f"{_CONSOLES} open consoles, an answer", "ms, p95", other="p50")
    drain = Line(f"drain beside {_CONSOLES} open consoles", "jobs/s", other="without", target=times_at_least(0.95))
    jobs, seconds = plan.size(50_000, 200), plan.size(30.0, 0.5)
    for round_number in range(plan.rounds):
        with open_consoles(api, filled) as milliseconds:
            before, begun = (api.cpu_seconds(), filled.server_seconds()), time.monotonic()
            time.sleep(seconds)
            spent = time.monotonic() - begun
            share.add((api.cpu_seconds() - before[0]) / spent * 100)
            server.add((filled.server_seconds() - before[1]) / spent * 100)
        answer.add(percentile(milliseconds, 95), percentile(milliseconds, 50))
        rates = {}
        for is_beside in (True, False) if round_number % 2 else (False, True):
            uvloop.run(fill(filled.url, jobs, queue=_DRAINED))
            with open_consoles(api, filled) if is_beside else ExitStack():
                rates[is_beside] = rate_of(drained("benchmarks.worker", filled.url, 1, "--queue", _DRAINED))
        drain.add(rates[True], rates[False])
    return [share, server, answer, drain]


@contextmanager
def open_consoles(api: Api, filled: Filled) -> Iterator[Sequence[float]]:
    """Keeps ten consoles open; yields the milliseconds of their answers once each has one."""
    milliseconds: list[float] = []
    is_over, are_open = threading.Event(), threading.Barrier(_CONSOLES + 1)

    def refresh(number: int) -> None:
        with api.sign_in() as client:
            path = _OPEN[number % len(_OPEN)].format(story=filled.story)
            is_over.wait(_INTERVAL * number / _CONSOLES)
            is_first = True
            while not is_over.is_set():
                started = time.perf_counter()
                client.get(f"/console{path}", headers={"hx-request": "true", "hx-trigger": "live"}).raise_for_status()
                took = time.perf_counter() - started
                milliseconds.append(took * 1000)
                if is_first:
                    are_open.wait(_PATIENCE)
                    is_first = False
                is_over.wait(max(_INTERVAL, _SHARE * took))

    consoles = [threading.Thread(target=refresh, args=(number,)) for number in range(_CONSOLES)]
    for each in consoles:
        each.start()
    try:
        are_open.wait(_PATIENCE)
        yield milliseconds
    finally:
        is_over.set()
        for each in consoles:
            each.join()
