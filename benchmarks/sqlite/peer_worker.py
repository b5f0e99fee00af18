"""Huey's side as a process: one consumer on one file, until it has run so many tasks or reads a line."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from benchmarks.sqlite.peer import STARTS, Peer


def main() -> None:
    """``peer_worker PATH TASKS``: ready, run at ``go``, then the figures."""
    path, tasks = Path(sys.argv[1]), int(sys.argv[2])
    consumer = Peer(path).consumer()
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    started, cpu = time.monotonic(), time.process_time()
    consumer.start()
    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stopping.set()), daemon=True).start()
    while len(STARTS) < tasks and not stopping.wait(0.002):
        pass
    figures = {
        "started_at": started,
        "ended_at": time.monotonic(),
        "cpu_seconds": time.process_time() - cpu,
        "starts": STARTS,
    }
    consumer.stop(graceful=True)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
