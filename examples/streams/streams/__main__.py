"""``python -m streams start | stop | story | run | pending | migrate``: the system on this machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib import import_module

from holdfast import HoldfastError

SERVICES = ("users", "notifications")


def main() -> int:
    """Runs a command; returns the exit code."""
    arguments = parse_arguments()
    try:
        return run_command(arguments)
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m streams", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser(
        "start", help="run the whole system until Ctrl-C or stop, the gateway on GATEWAY_PORT [8000]"
    )
    starting.add_argument("--workers", type=int, default=1, metavar="N", help="workers of each service [1]")
    commands.add_parser("stop", help="stop the system that start runs in this directory")
    commands.add_parser("story", help="start the system, make its parts fail, check every promise: about half a minute")
    running = commands.add_parser("run", help="run a command with the settings of a service: run users holdfast list")
    running.add_argument("service", choices=SERVICES)
    running.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    pending = commands.add_parser("pending", help="show what workers have taken from a stream and not acknowledged")
    pending.add_argument("service", choices=SERVICES)
    migrating = commands.add_parser("migrate", help="create the tables of a service; harmless when they are there")
    migrating.add_argument("service", choices=SERVICES)
    arguments = parser.parse_args()
    if arguments.command == "start" and not 1 <= arguments.workers <= 256:
        starting.error("--workers: give a whole number from 1 to 256")
    if arguments.command == "run" and not arguments.words:
        running.error("COMMAND is missing: python -m streams run users holdfast list")
    return arguments


def run_command(arguments: argparse.Namespace) -> int:
    """Each command imports what it needs: containers run `migrate` without the packages of the others."""
    if arguments.command == "migrate":
        from streams.tables import migrate

        asyncio.run(migrate(import_module(f"streams.{arguments.service}.tasks").app))
        return 0
    if arguments.command == "story":
        from streams.local.story import tell_story

        return tell_story()
    if arguments.command == "pending":
        from streams.local.pending import show_pending

        show_pending(arguments.service)
        return 0
    from streams.local import start

    if arguments.command == "start":
        return start.start(arguments.workers)
    if arguments.command == "run":
        return start.run(arguments.service, arguments.words)
    start.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
