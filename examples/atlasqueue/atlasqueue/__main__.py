"""``python -m atlasqueue migrate | worker``: the two programs of AtlasQueue that need no HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys

from holdfast import HoldfastError
from holdfast.observe.logs import configure_logs
from holdfast.worker import run_worker


def main() -> int:
    """Run one of them; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atlasqueue", description="The programs of AtlasQueue.")
    parser.add_argument("program", choices=PROGRAMS, help="migrate: make the tables. worker: run jobs until SIGTERM.")
    program = PROGRAMS[parser.parse_args().program]
    try:
        return program()
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _migrate() -> int:
    from atlasqueue.app import app  # here, so that a wrong setting is told without a traceback
    from atlasqueue.tables import migrate

    applied = asyncio.run(migrate(app))
    print("\n".join(applied) or "up to date")
    return 0


def _work() -> int:
    from atlasqueue.worker.main import app

    finish_logs = configure_logs(app.settings, app.events)
    try:
        return run_worker(app, app.settings)
    finally:
        finish_logs()


PROGRAMS = {"migrate": _migrate, "worker": _work}

if __name__ == "__main__":
    sys.exit(main())
