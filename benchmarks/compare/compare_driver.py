"""Driver of ``benchmarks.compare``: ``compare_driver.py WORKLOAD JOBS`` prints the figures as a JSON list.

A rate is the median of the rates of many short parts of a run: what else the machine did for a moment does not count.

Uses nothing but the public API and the CLI, so that it runs with the code of any revision. Workers import it as the
application's module.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from holdfast import Holdfast, web

_STARTS: list[float] = []
_SINGLES, _CALLERS, _EACH = 1000, 100, 100
_PART = 500  # submissions in a part of a run, at most
_DRAINED_PART = 2000  # jobs in a part of a drain: some claims of up to 1,000, whose handlers start in a burst each
_LATENCIES, _GAP = 400, 0.02  # jobs, and the mean of the random gaps between them in seconds

app = Holdfast(os.environ["COMPARE_URL"], log_level="ERROR", concurrency=100)


@app.task("stamp")
async def stamp(n: int) -> None:
    """Notes when it started."""
    _STARTS.append(time.monotonic())


_new_job = getattr(stamp, "new_job", None) or vars(type(stamp))["job"].__get__(stamp)  # older revisions have the latter


def _write_starts() -> None:
    Path(os.environ["COMPARE_STARTS"]).write_text(json.dumps(_STARTS), encoding="utf-8")


if "COMPARE_STARTS" in os.environ:
    atexit.register(_write_starts)


@contextmanager
def _worker(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Starts a worker by the CLI; yields its process and the file its handlers' start times will be in."""
    with tempfile.TemporaryDirectory() as folder:
        starts = Path(folder) / "starts.json"
        command = [sys.executable, "-m", "holdfast", "worker", "start", "--app", "compare_driver:app", *options]
        process = subprocess.Popen(command, env=os.environ | {"COMPARE_STARTS": str(starts)}, stdout=sys.stderr)
        try:
            yield process, starts
        finally:
            process.kill()
            process.wait()


async def _fill(jobs: int) -> None:
    async with app:
        await app.enqueue_many(_new_job(n=index) for index in range(jobs))


def _median_rate(instants: list[float], each: int = 1, most: int = _PART) -> float:
    """Returns the median number of jobs a second over parts of at most ``most`` jobs, whose instants are ``each`` jobs
    apart."""
    part = max(1, min(most, len(instants) * each // 10) // each)
    return part * each / statistics.median(after - before for before, after in pairwise(instants[::part]))


def drain(jobs: int) -> list[float]:
    """Jobs a second of one worker process, by the starts of its handlers."""
    uvloop.run(_fill(jobs))
    with _worker("--drain") as (process, file):
        process.wait(600)
        starts = json.loads(file.read_text(encoding="utf-8"))
    if len(starts) != jobs:
        raise RuntimeError(f"{len(starts)} handlers ran for {jobs} jobs")
    return [_median_rate(starts, most=_DRAINED_PART)]


def submit(jobs: int) -> list[float]:
    """Jobs a second: in bulk, one after another, and from a hundred callers at once."""
    return uvloop.run(_submit(jobs))


async def _submit(jobs: int) -> list[float]:
    async def one_after_another(count: int, instants: list[float]) -> None:
        for index in range(count):
            await stamp.enqueue(n=index)
            instants.append(time.perf_counter())

    bulk: list[float] = []
    singles: list[float] = []
    callers: list[float] = []
    async with app:
        await one_after_another(50, [])
        bulk.append(time.perf_counter())
        for _ in range(jobs // 1000):
            await app.enqueue_many(_new_job(n=index) for index in range(1000))
            bulk.append(time.perf_counter())
        await one_after_another(_SINGLES, singles)
        await asyncio.gather(*[one_after_another(_EACH, callers) for _ in range(_CALLERS)])
    return [_median_rate(bulk, 1000), _median_rate(singles), _median_rate(sorted(callers))]


def latency(jobs: int) -> list[float]:
    """Milliseconds from the return of a submission to its handler's start on an idle worker: p50 and p99."""
    with _worker() as (process, file):
        returned = uvloop.run(_at_random_gaps())
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        starts = json.loads(file.read_text(encoding="utf-8"))
    if len(starts) != len(returned):
        raise RuntimeError(f"{len(starts)} handlers ran for {len(returned)} jobs")
    late = sorted(max(0.0, start - at) * 1000 for start, at in zip(starts[20:], returned[20:], strict=True))
    return [late[len(late) // 2], late[len(late) * 99 // 100]]


async def _at_random_gaps() -> list[float]:
    returned = []
    async with app:
        await (await stamp.enqueue(n=-1)).result(timeout=60)
        returned.append(time.monotonic())
        for index in range(_LATENCIES):
            await asyncio.sleep(random.expovariate(1 / _GAP))
            await stamp.enqueue(n=index)
            returned.append(time.monotonic())
        await asyncio.sleep(1)
    return returned


def http(jobs: int) -> list[float]:
    """Requests per CPU second through the API in this process: submissions, then liveness probes."""
    return uvloop.run(_http(jobs))


async def _http(jobs: int) -> list[float]:
    create: Any = getattr(web, "create_app", None) or vars(web)["asgi"]  # older revisions have the latter
    api = create(app)
    bodies = [json.dumps({name: "stamp", "payload": {"n": 1}}).encode() for name in ("task", "type")]
    async with app:
        rates = [await _cpu_rate(api, "POST", "/v1/jobs", each, 100) for each in bodies]
        body = bodies[rates.index(max(rates))]
        submissions = await _cpu_rate(api, "POST", "/v1/jobs", body, jobs // 4)
        return [submissions, await _cpu_rate(api, "GET", "/health/live", b"", jobs)]


async def _cpu_rate(api: Any, method: str, path: str, body: bytes, count: int) -> float:
    """Returns requests per CPU second, 0 if one is refused."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    statuses = set()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        statuses.add(message.get("status", 200))

    began = time.process_time()
    for _ in range(count):
        await api({**scope}, receive, send)
    return count / (time.process_time() - began) if statuses <= {200, 201} else 0.0


if __name__ == "__main__":
    workloads = {"drain": drain, "submit": submit, "latency": latency, "http": http}
    sys.stdout.write(json.dumps(workloads[sys.argv[1]](int(sys.argv[2]))))
