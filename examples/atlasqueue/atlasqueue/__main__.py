"""``python -m atlasqueue start | migrate | api | worker | wipe``: the programs of AtlasQueue."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable

from atlasqueue.config import name_variables
from holdfast import HoldfastError
from holdfast.telemetry.logs import configure_logs
from holdfast.worker import run_worker


def main() -> int:
    """Run one of them; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atlasqueue", description="The programs of AtlasQueue.")
    commands = parser.add_subparsers(dest="program", required=True)
    commands.add_parser("start", help="migrate, then run an API and a worker until Ctrl-C")
    commands.add_parser("migrate", help="make the tables; harmless when they are there")
    serving = commands.add_parser("api", help="serve the HTTP API until SIGTERM")
    serving.add_argument("--exposed", action="store_true", help="serve other hosts, without keys")
    commands.add_parser("worker", help="run jobs until SIGTERM")
    wiping = commands.add_parser("wipe", help="delete the tables with everything in them")
    wiping.add_argument("--yes", action="store_true", required=True, help="say so")
    asked = vars(parser.parse_args())
    program = PROGRAMS[asked.pop("program")]
    asked.pop("yes", None)
    try:
        return program(**asked)
    except HoldfastError as error:
        print(f"error: {name_variables(str(error))}", file=sys.stderr)
        return error.exit_code


def _migrate() -> int:
    from atlasqueue.app import app  # here, so that a wrong setting gives no traceback
    from atlasqueue.tables import migrate

    applied = asyncio.run(migrate(app))
    print("\n".join(applied) or "up to date")
    return 0


def _wipe() -> int:
    from atlasqueue.app import app
    from atlasqueue.tables import wipe

    asyncio.run(wipe(app))
    return 0


def _start() -> int:
    from atlasqueue.app import app
    from atlasqueue.start import start
    from atlasqueue.tables import migrate

    finish_logs = configure_logs(app.settings, app.events)
    try:
        applied = asyncio.run(migrate(app))
        logging.getLogger("atlasqueue").info("migrated", extra={"applied": applied})
    finally:
        finish_logs()
    return start()


def _serve(*, exposed: bool) -> int:
    from atlasqueue.api import create_site
    from atlasqueue.app import app
    from holdfast.web import create_app
    from holdfast.web.server import serve

    finish_logs = configure_logs(app.settings, app.events)
    api = create_app(app, checks_hosts=True)
    try:
        return serve(api.app, app.settings, exposed=exposed, site=create_site(api))
    finally:
        finish_logs()


def _work() -> int:
    from atlasqueue.worker.main import app

    finish_logs = configure_logs(app.settings, app.events)
    try:
        return run_worker(app, app.settings)
    finally:
        finish_logs()


PROGRAMS: dict[str, Callable[..., int]] = {
    "start": _start,
    "migrate": _migrate,
    "api": _serve,
    "worker": _work,
    "wipe": _wipe,
}

if __name__ == "__main__":
    sys.exit(main())
