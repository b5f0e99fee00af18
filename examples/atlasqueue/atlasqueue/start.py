"""An API and a worker, as processes beside each other. PostgreSQL and Redis must run already."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_PATIENCE = 60.0  # seconds for each of them to end
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start() -> int:
    """Run both until Ctrl-C, SIGTERM or the end of one of them. The exit code."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    with ExitStack() as both, suppress(KeyboardInterrupt):
        started = [both.enter_context(_process(program)) for program in ("api", "worker")]
        while all(process.poll() is None for process in started):
            time.sleep(0.1)
        print("one of them has ended, so both do", file=sys.stderr)
        return 1
    return 0


def _interrupt(*_: object) -> None:
    """End both. Once: what is asked again while that is under way must not break it off."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _process(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """One program of AtlasQueue, in a session of its own: Ctrl-C is for us alone, who end both in order."""
    process = subprocess.Popen([sys.executable, "-m", "atlasqueue", program], start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        process.kill()
        process.wait()
