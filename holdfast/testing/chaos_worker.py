"""A worker process of a chaos scenario: ``python -m holdfast.testing.chaos_worker PARENT TARGET JOURNAL``.

The scenario's settings, in the environment, go before those in the application's code. Each fault, and each change of
the plan, is a line of the journal before it happens. The process is killed when the one that started it has ended,
however that ended.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from functools import partial

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.events import Event, FaultInjected, FaultsChanged
from holdfast.telemetry.logs import configure_logs
from holdfast.worker import run_worker

CHAOS_SETTINGS = "CHAOS_SETTINGS"
"""Environment variable: JSON of the worker's settings. They have the store's password, so they are no argument."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> int:
    """Runs the worker until it is stopped; returns the exit code."""
    parent, target, journal = sys.argv[1:]
    try:
        _end_with_parent(int(parent))
        app = _load_application(target)
        app.settings = app.settings.replace_values(**msgspec.json.decode(os.environ[CHAOS_SETTINGS]))
        lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        app.events.subscribe(partial(_note, lines), FaultInjected, FaultsChanged)
        finish_logs = configure_logs(app.settings, app.events)
        try:
            return run_worker(app, app.settings)
        finally:
            finish_logs()
    except HoldfastError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _end_with_parent(parent: int) -> None:
    """Has the kernel kill this process with its parent, where it can: on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _load_application(target: str) -> Holdfast:
    module, _, attribute = target.partition(":")
    found: object = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    if not isinstance(found, Holdfast):
        raise ConfigError(f"app: {target} is of type {type(found).__name__}; name the application")
    return found


def _note(lines: int, event: Event) -> None:
    """Writes a line at once: the process may be killed next."""
    if isinstance(event, FaultInjected):
        os.write(lines, f"fault {event.kind}\n".encode())
    elif isinstance(event, FaultsChanged):
        os.write(lines, f"faults {event.active}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
