"""``python -m delayed_queue start | stop | server | submit-jobs``. Workers are ``holdfast worker start``."""

from __future__ import annotations

import argparse
import os
import sys

from holdfast import HoldfastError

READER_GONE = 141
"""Exit code when the output has no reader any more, as in ``| head -1``: that of Holdfast's own commands."""


def main() -> int:
    """Do what was asked; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m delayed_queue")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start", help="run Redis, the HTTP server and workers until Ctrl-C or stop")
    starting.add_argument("--workers", type=int, default=3, metavar="N", help="how many workers [3]")
    commands.add_parser("stop", help="stop what start has started in this directory, and remove it")
    serving = commands.add_parser("server", help="run the HTTP server alone, on SERVER_PORT [8080]")
    serving.add_argument("--exposed", action="store_true", help="serve other hosts, without keys")
    commands.add_parser("submit-jobs", help="submit JOB_COUNT [10] jobs due within TIME_OFFSET_SEC [10] seconds")
    asked = parser.parse_args()
    if asked.command == "start" and not 1 <= asked.workers <= 256:
        starting.error("--workers: give a whole number from 1 to 256")
    try:
        return _run(asked)
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _run(asked: argparse.Namespace) -> int:
    """Each imports what it needs, so that a wrong setting gives no traceback."""
    if asked.command == "start":
        from delayed_queue.start import start

        return start(asked.workers)
    if asked.command == "stop":
        from delayed_queue.start import stop

        stop()
    elif asked.command == "server":
        from delayed_queue.server import serve

        return serve(exposed=asked.exposed)
    else:
        from delayed_queue.submit import submit_jobs

        for job_id in submit_jobs():
            print(job_id, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
