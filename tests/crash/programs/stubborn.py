"""The application of the crash tests with a task for the process executor, whose children each worker keeps ready."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from holdfast import Context
from tests.crash.programs.tasks import app, note


@app.task("crash.stubborn", executor="process", timeout=5.0)
def stubborn(ctx: Context) -> None:
    """Ignores every signal it can, and has two children: one in its group, one in a session of its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(nap), subprocess.Popen(nap, start_new_session=True)]
    note("start", ctx, children=[child.pid for child in children])
    while True:
        time.sleep(1)
