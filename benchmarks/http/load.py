"""Clients that keep their connections, each with one request under way: what wrk does, and as little beside it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from benchmarks.telling import say

_HEAD = b"POST /v1/jobs%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


class Counts:
    """What all clients have seen while it counted."""

    def __init__(self) -> None:
        self.counting = False
        self.some = asyncio.Event()
        self.milliseconds: list[float] = []
        self.refused = 0
        self.over = False
        self.sample = ""

    def refuse(self, sample: str) -> None:
        """An answer that was none."""
        self.refused += 1
        self.sample = sample
        self.some.set()


class Client(asyncio.Protocol):
    """One connection: the next request goes out when the last one is answered."""

    def __init__(self, request: bytes, counts: Counts) -> None:
        self._request = request
        self._counts = counts
        self._answer = b""
        self._sent = 0.0

    def connection_made(self, transport: Any) -> None:  # uvloop's is none of asyncio's
        self._transport = transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._counts.over:
            self._counts.refuse("the connection was closed")

    def _send(self) -> None:
        self._answer = b""
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]):
            return
        if self._counts.counting:
            self._counts.milliseconds.append((time.perf_counter() - self._sent) * 1000)
            self._counts.some.set()
            if not head.startswith(b"HTTP/1.1 201 "):
                self._counts.refuse(self._answer[:500].decode("latin-1"))
        self._send()


def main() -> None:
    """``load PORT CLIENTS JOBS SECONDS WARM``: on "go", so many jobs a request for so long."""
    port, clients, jobs = map(int, sys.argv[1:4])
    say({"ready": True})
    sys.stdin.readline()
    say(uvloop.run(_load(port, clients, jobs, *map(float, sys.argv[4:6]))))


async def _load(port: int, clients: int, jobs: int, seconds: float, warm: float) -> dict[str, object]:
    counts, request = Counts(), request_of(jobs)
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Client(request, counts), "127.0.0.1", port) for _ in range(clients)]
    await asyncio.sleep(warm)
    counts.counting, begun = True, time.perf_counter()
    await asyncio.sleep(seconds)
    await counts.some.wait()
    counts.counting, counts.over, took = False, True, time.perf_counter() - begun
    for transport, _ in made:
        transport.abort()
    return {
        "requests": len(counts.milliseconds),
        "seconds": took,
        "milliseconds": counts.milliseconds,
        "refused": counts.refused,
        "sample": counts.sample,
    }


def request_of(jobs: int) -> bytes:
    """The bytes of a request that submits so many."""
    job = {"task": "noop", "payload": {"n": 1}}
    body = json.dumps(job if jobs == 1 else {"jobs": [job] * jobs}, separators=(",", ":")).encode()
    return _HEAD % (b"" if jobs == 1 else b"/batch", len(body), body)


if __name__ == "__main__":
    main()
