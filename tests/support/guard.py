"""Starts programs for a test process and ends them when that process ends, however it ends.

``python guard.py FOLDER`` reads one command a line, ``{"argv": […], "user": uid or null, "log": path}``, starts it and
answers with its pid. At the end of its input, which comes with the death of the process at the other end, it ends what
it started and removes the folder. It stands alone: it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE = 10
"""Seconds between asking a program to end at once and killing it."""


def start(command: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start one program, leader of a session of its own; it is reaped as soon as it ends."""
    user: int | None = command["user"]
    with Path(command["log"]).open("ab") as log:
        child = subprocess.Popen(
            command["argv"],
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    threading.Thread(target=child.wait, daemon=True).start()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    """End a program at once, with those it started."""
    child.send_signal(signal.SIGCONT)
    child.send_signal(signal.SIGQUIT)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> None:
    """Serve until the input ends."""
    children = []
    for line in sys.stdin:
        children.append(start(json.loads(line)))
        print(children[-1].pid, flush=True)
    for child in children:
        end(child)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
